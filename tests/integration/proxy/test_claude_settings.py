"""This module tests Claude Code's settings, hooks, MCP servers, skills, output style and appended prompt, from the
config to the real binary; and what is kept of an episode with sub-agents.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rewards.task import Task
from rl.episodes.setup import agent_from
from rl.traces.collect.dataset import rows
from rl.traces.collect.outputs import Collection
from rollout.agent.kept import AgentOutput
from rollout.audit import audit_heard, audit_tokens
from rollout.episode import Episode, Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.records import Record, record_of
from rollout.sandbox import Sandbox
from rollout.sandbox.local.box import boot_local
from rollout.trace import trace
from tests.integration.claude_kit import answers, call, in_turn, scripted
from tests.kit import CharTokenizer, char_policy

pytestmark = [pytest.mark.claude, pytest.mark.asyncio]
HOOKS = Path(__file__).parents[3] / "configs" / "agent" / "hooks.json"
# A whole MCP server: it says what it is, lists a tool, and calls it.
MCP = """
import json, sys
TOOL = {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {}}}
ME = {"name": "toy", "version": "1"}
for line in sys.stdin:
    asked = json.loads(line)
    answer = {
        "initialize": {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "serverInfo": ME},
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "the sum is 42"}]},
    }.get(asked.get("method"))
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer or {}}), flush=True)
"""


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    server = ProxyServer(ping_s=0.3)
    await server.start()
    yield server
    await server.stop()


async def played(proxy: ProxyServer, task: Task, script: Any, **settings: Any) -> tuple[Episode, Record]:
    """Play an episode with the config's agent, and keep what a collection keeps."""
    config = OmegaConf.merge(
        OmegaConf.load(HOOKS.parent / "claude_code.yaml"), {"max_turns": 8, "timeout_s": 60, **settings}
    )
    agent = agent_from(OmegaConf.create({"agent": config}), 2000, 10**6)

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        binds = {agent.binary: str(agent.binary)} if socket_dir else None
        return await boot_local(task.snapshot, binds=binds, socket_dir=socket_dir)

    setup = Setup(char_policy(scripted(script)), proxy, boot, agent, keeps=True, grades=False)
    episode = await run_episode(setup, task, "collect-0-t-1")
    return episode, record_of(episode, "collect", 0, "chars", "kit")


def hook_events(told: bytes) -> list[str]:
    return [json.loads(line)["hook_event_name"] for line in told.splitlines() if line]


async def test_hooks_mcp_servers_skills_and_styles_reach_claude_code(
    proxy: ProxyServer, task: Task, tmp_path: Path
) -> None:
    skill = tmp_path / "mending"
    skill.mkdir()
    (skill / "SKILL.md").write_text("---\nname: mending\ndescription: How to mend code.\n---\nMend it twice.\n")
    style = tmp_path / "terse.md"
    style.write_text("---\nname: Terse\ndescription: Few words.\n---\nSAY-LITTLE.\n")
    script = in_turn(call("mcp__toy__add", a=1), call("Bash", command='echo "$FROM_SETTINGS"'), "Done.")
    episode, record = await played(
        proxy,
        task,
        script,
        settings={"env": {"FROM_SETTINGS": "from-settings", "ENABLE_TOOL_SEARCH": "false"}},
        hooks=str(HOOKS),
        mcp_servers={"toy": {"command": "python3", "args": ["-c", MCP]}},
        skills=[str(skill)],
        output_style=str(style),
        append_system_prompt="APPENDED-WORDS.",
    )
    assert episode.agent is not None and episode.agent.status == "finished", episode.agent
    assert (episode.verdict.reason, episode.verdict.reward) == ("not_graded", None)
    prompt = episode.session.policy.tokenizer.decode(episode.session.tree.nodes[0].ids)
    assert "APPENDED-WORDS." in prompt and "SAY-LITTLE." in prompt and "How to mend code." in prompt
    assert "mcp__toy__add" in json.dumps([point.tools for point in trace(record).points])
    heard = json.dumps(record.events)
    assert "the sum is 42" in heard and "from-settings" in heard
    kept = episode.agent.kept
    assert kept is not None and kept.problems == []
    events = hook_events(kept.files[".claude/hooks.jsonl"])
    assert {"SessionStart", "UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop", "SessionEnd"} <= {*events}
    shipped = json.loads(HOOKS.read_text())["hooks"]
    assert {*events} <= shipped.keys() and len(shipped) == 9
    assert len(episode.rows) == 1


async def test_sub_agents_are_kept_whole(proxy: ProxyServer, task: Task, tmp_path: Path) -> None:
    """Session files of both threads, a row per call, and a check that finds what is not there."""
    asked = call("Agent", description="d", prompt="SUB look", subagent_type="general-purpose", run_in_background=False)

    def script(prompt: str) -> str:
        if "MAIN" in prompt:
            return asked if answers(prompt) == 0 else "Done."
        return call("Bash", command="echo found $ANTHROPIC_AUTH_TOKEN") if answers(prompt) == 0 else "I found  it.\n"

    main = Task(**{**vars(task), "problem_statement": "MAIN go."})
    episode, record = await played(proxy, main, script, hooks=str(HOOKS))
    collection = Collection(OmegaConf.create({"cooldown_s": 0, "grade": False, "protocol": "tokens", "key_env": None}))
    collection.begin(tmp_path, Setup(char_policy(None), proxy, None, None))  # type: ignore[arg-type]
    collection.kept(episode, record)
    assert record.missing == []
    place = tmp_path / "traces" / task.instance_id / "epoch_0"
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    (sub,) = [name for name in files if "/subagents/" in name and name.endswith(".jsonl")]
    assert any(name.endswith(".meta.json") for name in files) and "I found  it." in (place / sub).read_text()
    assert "SubagentStop" in hook_events((place / "sessions" / "hooks.jsonl").read_bytes())
    # The session's secret, which the sub-agent printed, is in no file.
    secret = episode.session.secret
    assert secret in json.dumps(record.events)
    assert not any(secret.encode() in (place / name).read_bytes() for name in files)
    assert b"[redacted]" in (place / "stream.jsonl").read_bytes()
    made = list(rows(trace(record), 0, CharTokenizer()))
    assert [row["turn"] for row in made] == [0, 1, 2, 3] and made[2]["messages"][-1]["content"] == "I found  it.\n"
    assert [("MAIN go." in row["prompt"]) for row in made] == [True, False, False, True]
    assert [*audit_tokens(record), *audit_heard(record)] == []
    # What is taken away is missed.
    assert episode.agent is not None
    files_only = {name: data for name, data in episode.agent.kept.files.items() if "/subagents/" in name}
    left = AgentOutput(b"", b"", files_only, ["x"], episode.agent.kept.places)
    less = replace(episode.agent, events=[], kept=left)
    record.missing = []
    collection.kept(replace(episode, agent=less), record)
    assert record.missing == [
        "x", "the result at the end of the stream", "the agent's session file",
        "2 replies in the agent's session files",
    ]  # fmt: skip
