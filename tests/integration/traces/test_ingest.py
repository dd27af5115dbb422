"""This module tests session files of the real Claude Code as states, beside what its proxy has received and sent in the
same episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from rl.traces.ingest import claude_code, states
from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import State
from rollout.agent.kept import keep
from rollout.sandbox import ExecResult
from tests.integration.claude_kit import Script, Stage, call, in_turn, scripted, stage
from tests.integration.proxy.test_claude_threads import SUMMARY, agent, put_big, reader, with_subs

pytestmark = [pytest.mark.claude, pytest.mark.asyncio]
SHELL = {"bare": True, "tools": ("Bash",), "system_prompt": "Do it."}


async def session_of(played: Stage, place: Path) -> Path:
    """Write Claude Code's own files to ``place``; return the main one."""
    kept = await keep(played.box, ExecResult(0, b"", b"", False, False, 0.0), [".claude/projects"])
    for name, data in kept.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    (main,) = claude_code.sessions(place)
    return main


def ingested(path: Path, subagents: bool = True) -> tuple[list[State], Findings]:
    findings = Findings(lambda text: pytest.fail(text))
    out = path.with_suffix(".states.jsonl.zst") if path.is_file() else path / "states.jsonl.zst"
    with states.writing(out) as writer:
        claude_code.ingest(path, writer, findings, subagents)
    return list(states.read_states(out)), findings


def plain(message: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A message without what changes nothing: how a text is wrapped, marks for caching; and without thinking."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kept = [{k: v for k, v in one.items() if k != "cache_control"} for one in blocks if one["type"] != "thinking"]
    return message["role"], kept


def check(found: list[State], played: Stage) -> None:
    """Check that each state is a call that the proxy had, and its action the reply that it gave."""
    asked = [(call.body, [plain(one) for one in call.body["messages"]]) for call in played.calls]
    replies = [list(node.reply.blocks) for node in played.session.tree.nodes if node.sampled and node.reply]
    for state in found:
        mine = [plain(one) for one in state.messages[1:]]
        bodies = [body for body, messages in asked if messages == mine]
        assert bodies, state.where
        assert plain(state.messages[0]) == plain({"role": "system", "content": bodies[0]["system"]})
        tools = [{k: v for k, v in tool.items() if k != "cache_control"} for tool in bodies[0]["tools"]]
        assert state.tools == tools and state.source_model == "policy" and state.schema_version == 1
        unsigned = [{k: v for k, v in one.items() if k != "signature"} for one in state.student_action["content"]]
        assert unsigned in replies, state.where


def without_requests(path: Path) -> None:
    """Take out of the files below ``path`` what Claude Code has noted of its requests, as older versions leave them."""
    for file in path.rglob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not json.loads(line)["type"].startswith("api-request")))


async def test_parallel_calls_thinking_and_a_resumed_session(task: Task, tmp_path: Path) -> None:
    three = "((let me see))I look." + "".join(call("Bash", command=f"echo {n}") for n in range(3))
    async with stage(scripted(in_turn(three, "((hm))Done.")), task, **SHELL) as played:
        await played.play("MAIN go.")
        await played.play("MAIN more.", "--continue")
        main = await session_of(played, tmp_path)
        found, findings = ingested(main)
        assert [len(state.messages) for state in found] == [2, 4, 6] and all(state.exact for state in found)
        check(found, played)
        first, second, third = found
        kinds = [block["type"] for block in first.student_action["content"]]
        assert kinds == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
        assert "let me see" not in json.dumps([second.messages, third.messages])
        assert sorted(one["content"] for one in second.messages[3]["content"]) == ["0", "1", "2"]
        assert findings.counts["records of type cost-state passed over"] == 2
        # Without the notes of requests, the transcript says the same, but proves nothing, and has no system prompt.
        without_requests(tmp_path)
        again, findings = ingested(main)
        assert [state.messages[1:] for state in again] == [state.messages[1:] for state in found]
        assert [state.student_action for state in again] == [state.student_action for state in found]
        assert not any(state.exact for state in again) and again[0].messages[0] == {"role": "system", "content": ""}


async def test_sub_agents_are_left_out_or_nested(task: Task, tmp_path: Path) -> None:
    main = in_turn(agent("one", run_in_background=False) + agent("two", run_in_background=False), "Done.")
    sub: Script = in_turn(call("Bash", command="echo 1"), "Found.")
    async with stage(scripted(with_subs(main, sub)), task) as played:
        await played.play("MAIN go.")
        path = await session_of(played, tmp_path)
        alone, _ = ingested(path, subagents=False)
        found, _ = ingested(path)
        assert (len(alone), len(found)) == (2, 6) and all(state.exact for state in found)
        check(found, played)
        calls = [block["id"] for block in found[0].student_action["content"] if block["type"] == "tool_use"]
        inner = [state for state in found if state.agent]
        assert {state.spawned_by for state in inner} == {*calls} and {len(state.agent) for state in inner} == {1}
        by_call = {state.spawned_by: state.messages for state in inner}
        assert ["SUB one" in json.dumps(by_call[name]) for name in calls] == [True, False]
        assert {state.conversation for state in found} == {path.stem}
        folder, _ = ingested(tmp_path)
        assert [state.state_id for state in folder] == [state.state_id for state in found]


async def test_a_sub_agent_of_a_sub_agent_names_both(task: Task, tmp_path: Path) -> None:
    main = in_turn(agent("one", run_in_background=False), "Done.")
    outer = in_turn(agent("inner", run_in_background=False), "Outer.")
    subs: Script = lambda prompt: outer(prompt) if "SUB one" in prompt else "Inner."  # noqa: E731
    async with stage(scripted(with_subs(main, subs)), task) as played:
        await played.play("MAIN go.")
        found, _ = ingested(await session_of(played, tmp_path))
        assert len(found) == 5 and all(state.exact for state in found)
        check(found, played)
        calls = {block["id"] for state in found for block in state.student_action["content"] if "id" in block}
        (inner,) = [state for state in found if "Inner." in json.dumps(state.student_action)]
        (last,) = [state for state in found if "Outer." in json.dumps(state.student_action)]
        assert inner.agent[:1] == last.agent and len(inner.agent) == 2
        assert {inner.spawned_by, last.spawned_by} == calls


async def test_a_compaction_ends_a_history_and_keeps_what_it_preserves(task: Task, tmp_path: Path) -> None:
    room = {"max_context": 20_000, "tools": ("Read",), "system_prompt": "Read."}
    async with stage(scripted(reader), task, bare=True, **room) as played:
        await put_big(played)
        await played.play("MAIN read all.")
        path = await session_of(played, tmp_path)
        found, findings = ingested(path)
        assert findings.counts["compactions"] == 1 and all(state.exact for state in found)
        check(found, played)
        last = json.dumps(found[-1].messages)
        assert "MAIN: lines were read." in last and "MAIN read all." not in last and "line 150 " in last
        assert SUMMARY not in json.dumps([state.student_action for state in found])
        without_requests(tmp_path)
        again, _ = ingested(path)
        assert [state.messages[1:] for state in again] == [state.messages[1:] for state in found]


async def test_a_changed_message_is_not_proven(task: Task, tmp_path: Path) -> None:
    async with stage(scripted(in_turn(call("Bash", command="echo 12345"), "Done.")), task, **SHELL) as played:
        await played.play("MAIN go.")
        path = await session_of(played, tmp_path)
        text = path.read_text()
        assert '"content":"12345"' in text
        path.write_text(text.replace('"content":"12345"', '"content":"12346"'))
        found, findings = ingested(path)
        assert [state.exact for state in found] == [True, False]
        assert findings.counts["states from the transcript (a message of the request is not in the file)"] == 1
        marked = text.replace('"cacheControl":[', '"cacheControl":[{"path":["tools",0],"value":1},')
        path.write_text(marked)
        found, findings = ingested(path)
        assert not any(state.exact for state in found)
        assert findings.counts["states from the transcript (the request's digest is another)"] == 2
