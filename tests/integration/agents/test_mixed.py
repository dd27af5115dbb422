"""A step of a run with two agents goes through the agent loop: the real Claude Code and the real Codex."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.config.compose import compose
from rl.data.choice import ChoiceRules, choose
from rl.episodes.setup import mix_from
from rl.metrics.episodes import fold, read_jsonl
from rl.quickstart.tasks import CANDIDATES, make_tasks
from rl.traces.export.conversation import agent_name, conversations
from rollout.agent.codex import Codex
from rollout.audit import audit_claims, audit_heard, audit_tokens
from rollout.audit.lines import Lines
from rollout.records.reading import Reader
from tests.integration.claude_kit import call, scripted
from tests.kit import char_policy
from tests.lacks import lacks

SETTINGS = [
    "agent=mixed",
    "agent.mix={claude_code:1,codex:1}",
    "agent.claude_code.bare=true",
    "agent.claude_code.tools=[Bash]",
    "agent.claude_code.timeout_s=600",
    "agent.codex.timeout_s=600",
    "actor_rollout_ref.rollout.max_model_len=1000000",
    "actor_rollout_ref.model.path=kit",
    "proxy.max_tokens=2000",
    "sandbox.cpu_s=300",
    "sandbox.file_mb=256",
]


def repair(prompt: str) -> str:
    """Read, edit, say so: the same with the shell of either agent."""
    place = re.search(r"in (\w+)\.py must return the (\w+) of", prompt)
    assert place
    module, cue = place.groups()
    answers = prompt[place.end() :].count("assistant: ") - 1
    edit = f"sed -i '0,/return .*/s||return {CANDIDATES[cue]}|' {module}.py"
    commands = [f"cat {module}.py", edit]
    if answers >= len(commands):
        return "Done."
    if "(tool exec_command)" in prompt:
        return call("exec_command", cmd=commands[answers])
    return call("Bash", command=commands[answers])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three tasks, of which the third names its agent."""
    make_tasks(tmp_path, seed=5, n_train=3, n_heldout=1)
    path = tmp_path / "train.parquet"
    rows = [{"agent": None} | row for row in pyarrow.parquet.read_table(path).to_pylist()]
    rows[2]["agent"] = "codex"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


async def test_each_group_of_a_step_has_one_agent(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks are drawn, a third one names its agent; every episode is resolved, whole and in its agent's events."""
    from rl.train import agent_loop

    assert Codex.PROGRAM
    if not Codex.PROGRAM.directory.is_dir():
        lacks(f"codex {Codex.PROGRAM.version}: python -m rl.agents install codex")
    run = tmp_path / "run"
    run.mkdir()
    config = compose(["+experiment=quickstart", *SETTINGS, f"run.dir={run}"])
    mix, (first, second, third) = mix_from(config), load_tasks(file)
    assert mix and third.agent == "codex"
    wanted = {"claude_code", "codex"}
    step = next(
        one for one in itertools.count(1) if {mix.draw(task.instance_id, one) for task in (first, second)} == wanted
    )
    drawn = {task.instance_id: mix.draw(task.instance_id, step, task.agent) for task in (first, second, third)}

    monkeypatch.setattr(agent_loop, "load_policy", lambda *_: char_policy(scripted(repair)))
    engine: Any = SimpleNamespace(servers={})
    worker = agent_loop.Worker(config, None, "", engine)
    await worker.start()

    async def the_worker() -> agent_loop.Worker:
        return worker

    loop: Any = object.__new__(agent_loop.ClaudeCodeAgentLoop)
    loop.config, loop._worker = config, the_worker
    try:
        outputs = await asyncio.gather(
            *(
                loop.run(
                    {}, task=task, task_file=str(file), split="train", global_steps=step, uid=f"u{n}", session_id=k
                )
                for n, task in enumerate(drawn)
                for k in range(2)
            )
        )
    finally:
        await worker.proxy.stop()
    assert [(len(one), one[0].reward_score) for one in outputs] == [(1, 1.0)] * 6

    records, lines = list(Reader(run)), Lines(run)
    assert sorted((one.task, one.agent["kind"]) for one in records) == sorted([*drawn.items()] * 2)
    for record in records:
        found = [*audit_claims(record), *audit_heard(record), *audit_tokens(record), *lines.compare(record)]
        assert not found, (record.agent, found)
        assert record.agent["reports"] == (record.agent["kind"] == "claude_code")  # each is read as what it is
        tools = {
            name for talk in conversations(record) for name in re.findall(r"exec_command|Bash", json.dumps(talk.tools))
        }
        assert tools == {"exec_command" if record.agent["kind"] == "codex" else "Bash"}
        assert agent_name(record) == record.agent["kind"].replace("_", "-")
    lines.close()
    folded = fold([one for path in (run / "episode_metrics").glob("*") for one in read_jsonl(path)], "episode")
    counts = [
        folded[f"agent/{name}/{figure}"] for name in sorted(wanted) for figure in ("count", "resolve_rate", "rows")
    ]
    assert counts == [2, 1, 1, 4, 1, 1]
    chosen = choose([run], ChoiceRules(resolved=True, best=1))
    assert {one.task: one.facts["agent_kind"] for one in chosen.entries} == drawn
