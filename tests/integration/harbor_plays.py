"""The tasks of examples/harbor as tests need them: admitted or refused, and played by the real Claude Code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rewards.task import Task, load_tasks
from rl.config.compose import compose
from rl.data import admit, convert, images
from rl.episodes.boxes import kind_of
from rollout.agent import Agent
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Episode, Setup, run_episode
from rollout.proxy.server import ProxyServer
from tests.integration.claude_kit import Script, call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.sandboxes import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "harbor"
# What makes a solution a wrong one: the text that stands in place of another, and the reward.
WRONG = {
    "python": ("max(", "min(", 0.0),
    "go": ("MoveToFront", "MoveToBack", 0.0),
    "javascript": ("join('=')", "join('')", 0.0),
    "rust": ("numbers(version))", "version.len())", 0.0),
    "java": ("append(c)", "append(' ')", 0.0),
    "steps": ("get(name, 0) + number", "get(name, 1) + number", 0.0),  # below min_reward: no second step
    "separate": ("fullmatch", "match", 0.0),
    "json": ("not in found", "not in found[-1:]", 0.0),  # of three keys one is 1
    "fraction": (".upper()", "", 0.75),
}
# With what the agent sees that what it wrote is no nonsense.
COMPILES = {
    "go": "go vet ./...",
    "javascript": "node --check query.js",
    "rust": "cargo check --offline --quiet",
    "java": "javac -d /tmp/own Csv.java",
}


def admitted(place: Path, *names: str) -> tuple[dict[str, Task], dict[str, str]]:
    """Convert, build and admit examples; return those that are admitted, and why others are not, by name."""
    rows, built, out = (place / f"{name}.parquet" for name in ("rows", "built", "admitted"))
    only = ["--instance-ids", *(f"examples__{name}" for name in names)]
    assert convert.main(["harbor", str(EXAMPLES), "--out", str(rows), *only]) == 0
    assert images.main([str(rows), "--out", str(built)]) == 0
    assert admit.main([str(built), "--out", str(out), "--tries", "2", "--jobs", "2", "sandbox=docker"]) == 0
    report = json.loads((place / "admitted.admission.json").read_text())["tasks"]
    short = {f"examples__{name}": name for name in names}
    refused = {short[one["instance_id"]]: one["why"] for one in report if one["status"] != "pass"}
    return {short[task.instance_id]: task for task in load_tasks(out)}, refused


def replies(name: str, wrong: bool) -> Iterator[str]:
    """Yield what a policy says that repairs an example as its solution does, or in a wrong way."""
    for solution in sorted((EXAMPLES / name).rglob("solve.sh")):
        text = solution.read_text()
        text = text.replace(*WRONG[name][:2]) if wrong else text
        yield call("Bash", command=f"{text}{COMPILES.get(name, 'python -m compileall -q .')} && echo compiled")
        yield "Done."


async def played(task: Task, agent: Agent, script: Script) -> Episode:
    """Play a task in containers."""
    proxy = ProxyServer()
    await proxy.start()
    try:
        boot = kind_of(compose(["sandbox=docker"], "evaluate").sandbox).boot(agent)
        return await run_episode(Setup(char_policy(scripted(script)), proxy, boot, agent), task, task.instance_id)
    finally:
        await proxy.stop()


async def check_plays(task: Task, name: str, place: Path) -> Sequence[Episode]:
    """Let the real Claude Code repair an example, and then do it wrong, and check rewards and records."""
    agent = ClaudeCode(find_binary(None), 8, 90, 2000, system_prompt="Repair the code.", tools=("Bash",), bare=True)
    episodes = []
    for wrong, reward in ((False, 1.0), (True, WRONG[name][2])):
        episode = await played(task, agent, in_turn(*replies(name, wrong)))
        assert episode.verdict.reward == reward and episode.patch, (name, wrong, episode.verdict)
        record = check_record(episode, place / f"{name}-{wrong}")
        assert any(b"compiled" in node.says for node in record.nodes)
        episodes.append(episode)
    return episodes
