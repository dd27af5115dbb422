"""This module tests conversations that become several, or that break off: sub-agents, compaction, resumed sessions,
retries.

Every test runs the real Claude Code and ends with the audit. There is one training sequence per conversation whose
prompts do not extend another one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from rewards.task import Task
from rollout import SIDE_MODEL
from tests.integration.claude_kit import (
    Moody,
    Script,
    Stage,
    answers,
    call,
    failing,
    in_turn,
    scripted,
    stage,
)
from tests.kit import CharTokenizer

pytestmark = pytest.mark.asyncio


def agent(task: str, kind: str = "general-purpose", **more: object) -> str:
    return call("Agent", description="d", prompt=f"SUB {task}", subagent_type=kind, **more)


def with_subs(main: Script, sub: Script) -> Script:
    """Play ``main`` for prompts with MAIN in them, and ``sub`` for all others, which are sub-agents' (SUB)."""
    return lambda prompt: main(prompt) if "MAIN" in prompt else sub(prompt)


def thread_of(prompt: str) -> str:
    """Return "main", or the first word of what the sub-agent was told to do."""
    return "main" if "MAIN" in prompt else prompt.split("SUB ", 1)[1].split()[0].split("<")[0]


async def test_sub_agents_in_sequence(task: Task, tmp_path: Path) -> None:
    """Each sub-agent in the foreground has a system prompt and tools of its own, and is one sequence."""
    main = in_turn(agent("one", run_in_background=False), agent("two", "Explore", run_in_background=False), "Done.")
    sub = in_turn(call("Bash", command="echo sub"), "I found it.")
    async with stage(scripted(with_subs(main, sub)), task) as played:
        run = await played.play("MAIN go.")
        rows = played.check(tmp_path, rows=3)
        assert (run.status, run.detail) == ("finished", "Done.")
        assert sorted(len(row.nodes) for row in rows) == [2, 2, 3]
        systems = {json.dumps([b["text"] for b in sent.body["system"]]) for sent in played.calls}
        assert len(systems) == 3
        assert "I found it." in played.calls[-1].text()


async def test_sub_agents_in_parallel_are_interleaved(task: Task, tmp_path: Path) -> None:
    """Two sub-agents of one kind have the same head and different first messages; their calls overlap in time."""
    order: list[str] = []
    both = asyncio.Barrier(2)

    async def mood(number: int, prompt: str) -> None:
        order.append(thread_of(prompt))
        if order[-1] != "main":
            await both.wait()

    main = in_turn(agent("one", run_in_background=False) + agent("two", run_in_background=False), "Done.")
    sub = in_turn(call("Bash", command="echo 1"), call("Bash", command="echo 2"), "Found.")
    async with stage(Moody(with_subs(main, sub), mood), task) as played:
        run = await played.play("MAIN go.")
        rows = played.check(tmp_path, rows=3)
        assert (run.status, run.detail) == ("finished", "Done.")
        assert sorted(len(row.nodes) for row in rows) == [2, 3, 3]
        assert (order[0], order[-1], len(order)) == ("main", "main", 8)
        assert {*order[1:3]} == {*order[3:5]} == {*order[5:7]} == {"one", "two"}


async def test_background_agents_notify_by_reminders_alone(task: Task, tmp_path: Path) -> None:
    """Agents run in the background unless told otherwise. The main conversation goes on meanwhile, and learns that an
    agent has ended from a user message that is only a <system-reminder>."""
    main = in_turn(agent("one"), "I wait.", "Done.")
    sub = in_turn(call("Bash", command="echo 1"), "Found.")
    went_on = asyncio.Event()

    async def mood(number: int, prompt: str) -> None:
        if thread_of(prompt) != "main":
            await went_on.wait()
        elif answers(prompt) == 1:
            went_on.set()

    async with stage(Moody(with_subs(main, sub), mood), task) as played:
        await played.play("MAIN go.")
        rows = played.check(tmp_path, rows=2)
        assert sorted(len(row.nodes) for row in rows) == [2, 3]
        (message,) = [m for m in played.calls[-1].body["messages"] if "task-notification" in json.dumps(m)]
        assert all(b["text"].strip().startswith("<system-reminder>") for b in message["content"])
        # A span's key leaves reminders out, but the policy reads them.
        text = CharTokenizer().decode([*max(rows, key=lambda row: len(row.nodes)).response_ids])
        assert text.count("<task-notification>") == 1 and "<result>Found.</result>" in text


SUMMARY = "<analysis>Short.</analysis><summary>MAIN: lines were read.</summary>"


def reader(prompt: str) -> str:
    """Read on and on, write a summary when asked for one, and end after it."""
    if "CRITICAL: Respond with TEXT ONLY" in prompt[-10_000:]:
        return SUMMARY
    if "continued from a previous conversation" in prompt:
        return "Finished."
    return call("Read", file_path="big.txt", limit=100, offset=1 + 100 * answers(prompt))


async def put_big(played: Stage) -> None:
    await played.box.put("big.txt", b"".join(b"line %d %s\n" % (i, b"x" * 60) for i in range(1500)))


def check_compaction(played: Stage, rows: list) -> None:
    """Check the three rows: the conversation, its summary, and the conversation that starts from the summary.

    The request for the summary is added to the last context message, so the summary shares the tokens before that
    message. The conversation after it starts anew.
    """
    conversation, summary, after = rows
    assert (len(summary.nodes), len(after.nodes)) == (1, 1) and len(conversation.nodes) > 1
    tree = played.session.tree
    asked, answered = tree.nodes[summary.nodes[0]], tree.nodes[conversation.nodes[-1]]
    assert asked.text == SUMMARY
    shared = {node.index for node in asked.path()} & {node.index for node in answered.path()}
    assert len(shared) >= 2
    first = CharTokenizer().decode(after.prompt_ids)
    assert "MAIN: lines were read." in first and "continued from a previous conversation" in first
    # The newest messages are kept. Their replies are context now, with the tokens that were sampled (invariant 2), and
    # are trained on in the first row.
    sent = {*played.calls[-1].text().split('"')}
    kept = [node for node in tree.nodes if node.reply and node.reply.tool_ids and node.reply.tool_ids <= sent]
    assert kept and all(node.text in first for node in kept)
    assert all(not m for m in after.mask[: -len(tree.nodes[after.nodes[0]].ids)])


@pytest.mark.parametrize("bare", [False, True])
async def test_full_context_is_compacted(task: Task, tmp_path: Path, bare: bool) -> None:
    """Our error for a full context makes Claude Code compact and go on."""
    room = {"max_context": 20_000, "tools": ("Read",), "system_prompt": "Read."} if bare else {"max_context": 45_000}
    async with stage(scripted(reader), task, bare=bare, **room) as played:
        await put_big(played)
        run = await played.play("MAIN read all.")
        rows = played.check(tmp_path, rows=3)
        assert (run.status, run.detail) == ("finished", "Finished.")
        assert played.session.counters.context_full == 1
        check_compaction(played, rows)


async def test_no_room_for_the_summary_ends_the_run(task: Task, tmp_path: Path) -> None:
    """The request for a summary is long itself. When it is refused as well, it is tried once more at most."""
    async with stage(scripted(reader), task, max_context=21_000) as played:
        await put_big(played)
        run = await played.play("MAIN read all.")
        played.check(tmp_path, rows=1)
        assert (run.status, run.detail) == ("error", "Prompt is too long")
        assert 2 <= played.session.counters.context_full == len(played.calls) - 1 <= 3


@pytest.mark.parametrize(
    "window",
    [
        {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "45000"},
        {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "30"},
    ],
)
async def test_auto_compaction(task: Task, tmp_path: Path, window: dict[str, str]) -> None:
    """Claude Code compacts by the token counts that we report, before the context is full."""
    async with stage(scripted(reader), task, max_context=45_000) as played:
        await put_big(played)
        run = await played.play("MAIN read all.", "--settings", json.dumps({"env": window}))
        rows = played.check(tmp_path, rows=3)
        assert (run.status, run.detail, played.session.counters.context_full) == ("finished", "Finished.", 0)
        check_compaction(played, rows)
        tree = played.session.tree
        assert 28_000 < tree.nodes[rows[0].nodes[-1]].length < 42_000


async def test_compact_command(task: Task, tmp_path: Path) -> None:
    async with stage(scripted(reader), task) as played:
        await put_big(played)
        await played.play("MAIN read all.", max_turns=3)
        await played.play("/compact", "--continue")
        run = await played.play("MAIN more.", "--continue")
        rows = played.check(tmp_path, rows=3)
        assert [r.status for r in played.runs] == ["max_turns", "finished", "finished"] and run.detail == "Finished."
        check_compaction(played, rows)


@pytest.mark.parametrize("bare", [False, True])
async def test_resumed_conversation_is_one_row(task: Task, tmp_path: Path, bare: bool) -> None:
    """Three processes play one conversation: the second with --resume ID, the third with --continue."""
    script = in_turn(call("Bash", command="echo 1"), " First. ", call("Edit", file_path="x"), "Second.", "Third.")
    async with stage(scripted(script), task, bare=bare) as played:
        run = await played.play("MAIN one.")
        known = next(event["session_id"] for event in run.events if "session_id" in event)
        await played.play("MAIN two.", "--resume", known)
        await played.play("MAIN three.", "--continue")
        (row,) = played.check(tmp_path, rows=1)
        assert [r.detail for r in played.runs] == [" First. ", "Second.", "Third."]
        assert len(row.nodes) == len(played.calls) == 5


async def test_failed_calls_are_asked_again(task: Task, tmp_path: Path) -> None:
    """Claude Code's own retries of a 529 have x-stainless-retry-count: 0, like first requests; the proxy knows them by
    their content."""
    engine = Moody(in_turn(call("Bash", command="echo 1"), "Fin."), failing(1, 3))
    async with stage(engine, task) as played:
        run = await played.play("MAIN go.")
        (row,) = played.check(tmp_path, rows=1)
        assert (run.detail, len(played.calls), len(row.nodes)) == ("Fin.", 4, 2)
        assert played.session.counters.engine_errors == 2
        assert [sent.retry for sent in played.calls] == [0, 0, 0, 0]
        assert played.calls[2].body["messages"] == played.calls[3].body["messages"]


async def noted(played: Stage, text: bytes) -> None:
    """Wait until Claude Code has noted ``text`` in its transcript, from which it continues."""
    home = cast(Any, played.box)._host(played.box.home)
    while not any(text in note.read_bytes() for note in home.rglob("*.jsonl")):
        await asyncio.sleep(0.05)


async def kill_when(event: Coroutine[Any, Any, Any], played: Stage) -> None:
    """Start Claude Code and kill it when ``event`` is there."""
    playing = asyncio.create_task(played.play("MAIN go."))
    await asyncio.wait_for(event, 60)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_killed_in_a_reply_and_continued(task: Task, tmp_path: Path) -> None:
    """The generation is aborted and nothing of it is trained on. The next process has "No response requested." in its
    place and goes on in the same row."""
    sampling = asyncio.Event()

    async def mood(number: int, prompt: str) -> None:
        if number == 2:
            sampling.set()
            await asyncio.sleep(60)

    engine = Moody(in_turn(call("Bash", command="echo 1"), "Fin."), mood)
    async with stage(engine, task) as played:

        async def begun() -> None:
            await sampling.wait()
            await noted(played, b"tool_result")

        await kill_when(begun(), played)
        await played.play("MAIN again.", "--continue")
        (row,) = played.check(tmp_path, rows=1)
        assert (engine.aborted, played.session.counters.aborted) == (1, 1)
        assert len(row.nodes) == 2
        assert played.calls[-1].body["messages"][4]["content"] == [{"type": "text", "text": "No response requested."}]


async def test_killed_in_a_tool_and_continued(task: Task, tmp_path: Path) -> None:
    """The call was delivered but its result never came; the next process goes on after it."""
    work = call("Bash", command="touch begun; tail -f /dev/null")
    async with stage(scripted(in_turn(work, "Fin.")), task) as played:

        async def begun() -> None:
            """The tool runs, and the call is noted."""
            while True:
                with contextlib.suppress(FileNotFoundError):
                    await played.box.get("begun")
                    return await noted(played, b"touch begun")
                await asyncio.sleep(0.05)

        await kill_when(begun(), played)
        await played.play("MAIN again.", "--continue")
        (row,) = played.check(tmp_path, rows=1)
        assert len(row.nodes) == 2
        assert "Tool call interrupted" in played.calls[-1].text()


async def test_what_a_headless_run_asks_of_the_small_model(task: Task, tmp_path: Path) -> None:
    """By itself it asks nothing (no titles, no summaries of tools); a sub-agent on "haiku" uses it. The sub-call of a
    web search has the main model's name, and a tool of a special type; nothing reports it, so it is not trained on."""
    main = in_turn(
        call("WebSearch", query="what"), agent("small", "Explore", model="haiku", run_in_background=False), "Done."
    )
    script = with_subs(main, in_turn("A sub answer."))
    async with stage(
        scripted(lambda p: "Nothing found." if "web search" in p and "MAIN" not in p else script(p)), task
    ) as played:
        await played.play("MAIN go.", "--settings", json.dumps({"env": {"ENABLE_TOOL_SEARCH": "false"}}))
        rows = played.check(tmp_path, rows=2, unreported=["Nothing found."])
        assert sorted(len(row.nodes) for row in rows) == [1, 3]
        assert [sent.body["model"] for sent in played.calls] == ["policy", "policy", "policy", SIDE_MODEL, "policy"]
        assert played.session.counters.side_calls == 1
        search = played.calls[1].body
        assert [tool["type"] for tool in search["tools"]] == ["web_search_20250305"]
        assert search["tool_choice"] == {"type": "auto"}
        # These are all fields of a request: there is never a temperature or a stop sequence.
        said = {"model", "messages", "system", "tools", "metadata", "max_tokens", "stream", "output_config"}
        assert search.keys() == said | {"tool_choice"}
        for sent in (played.calls[0], *played.calls[2:]):
            assert sent.body.keys() == said | {"thinking", "context_management"}
            assert (sent.body["max_tokens"], sent.body["thinking"]["type"]) == (2000, "adaptive")
