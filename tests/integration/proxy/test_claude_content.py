"""This module tests how Claude Code rewrites replies and tool results that it sends back: one conversation stays one
sequence.

Every test runs the real Claude Code with its full prompt, tools and reminders, and ends with the audit.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from tests.integration.claude_kit import Stage, call, in_turn, scripted, stage

pytestmark = pytest.mark.asyncio


def blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def prompt_text(played: Stage) -> str:
    """Return the text of the last prompt."""
    node = next(node for node in reversed(played.session.tree.nodes) if not node.sampled)
    return played.session.policy.tokenizer.decode(node.path_ids())


async def test_rewritten_echoes_stay_one_row(task: Task, tmp_path: Path) -> None:
    """The echoes have an Edit with an added default and other order of keys, trimmed text, moved cache_control, strings
    for lists, a `system` message among the others, and reminders before and after the prompt."""
    script = in_turn(
        "\n I look.  \n" + call("Bash", description="list", command="echo hi > a.txt; cat a.txt"),
        call("Read", file_path="a.txt"),
        call("Edit", new_string="hello", old_string="hi", file_path="a.txt"),
        "  All good. \n",
    )
    async with stage(scripted(script), task, claude_md=True) as played:
        await played.box.put("CLAUDE.md", b"Be good.\n")
        run = await played.play("Greet.")
        played.check(tmp_path, rows=1)

        assert (run.status, run.detail) == ("finished", "  All good. \n")
        first, last = played.calls[0].body["messages"], played.calls[-1].body["messages"]
        assert [m["role"] for m in last] == ["user", "system", *["assistant", "user"] * 3]
        reminders = [b for b in blocks(first[0]) if b["text"].startswith("<system-reminder>")]
        assert len(reminders) == 3 and "Be good." in reminders[0]["text"]
        # The same messages in another form, which a comparison of bytes would not recognise.
        assert isinstance(first[1]["content"], list) and isinstance(last[1]["content"], str)
        assert blocks(last[2])[0] == {"type": "text", "text": "I look."}
        edit = blocks(last[6])[0]["input"]
        assert edit == {"replace_all": False, "file_path": "a.txt", "old_string": "hi", "new_string": "hello"}
        marked = ["cache_control" in json.dumps(m) for m in last]
        assert marked == [False] * (len(last) - 1) + [True]
        assert prompt_text(played).count("Be good.") == 1


async def test_parallel_calls_and_tool_errors(task: Task, tmp_path: Path) -> None:
    """The results of parallel calls come in the order in which the calls ended."""
    calls = call("Bash", command="sleep 0.3; echo slow") + call("Nope", x=1) + call("Bash", command="exit 3")
    wrong = (
        call("Bash", cmd="x") + call("Edit", file_path=3) + call("Edit", file_path="a", old_string="b", new_string="")
    )
    async with stage(scripted(in_turn(calls, wrong, "Enough.")), task) as played:
        run = await played.play("Try.")
        played.check(tmp_path, rows=1)
        assert (run.status, len(played.calls)) == ("finished", 3)
        results = [b for b in blocks(played.calls[-1].body["messages"][3]) if b["type"] == "tool_result"]
        asked = [b["id"] for b in blocks(played.calls[-1].body["messages"][2])]
        assert sorted(b["tool_use_id"] for b in results) == sorted(asked)
        assert [b["tool_use_id"] for b in results] != asked
        text = prompt_text(played)
        for said in ("slow", "No such tool available: Nope", "Exit code 3", "InputValidationError"):
            assert said in text


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\xff\0\0" * 8 for _ in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


async def test_images_become_a_placeholder(task: Task, tmp_path: Path) -> None:
    async with stage(scripted(in_turn(call("Read", file_path="dot.png"), "A dot.")), task) as played:
        await played.box.put("dot.png", png())
        await played.play("Look.")
        played.check(tmp_path, rows=1)
        (result,) = blocks(played.calls[-1].body["messages"][3])
        assert [b["type"] for b in result["content"]] == ["image"]
        text = prompt_text(played)
        assert "[image (image/png) left out: this model reads text only]" in text
        assert result["content"][0]["source"]["data"] not in text


async def test_very_long_results(task: Task, tmp_path: Path) -> None:
    """Before it shows a long file, Claude Code asks for a token count; it then cuts the file and says so in a `system`
    message. A long output goes to a file, with a preview."""
    script = in_turn(call("Read", file_path="big.txt"), call("Bash", command="cat big.txt big.txt"), "Long.")
    async with stage(scripted(script), task) as played:
        await played.box.put("big.txt", b"".join(b"line %d %s\n" % (i, b"x" * 60) for i in range(1500)))
        await played.play("Read on.")
        played.check(tmp_path, rows=1)
        (count,) = [sent for sent in played.requests if sent.path.endswith("/count_tokens")]
        assert len(count.text()) > 100_000
        last = played.calls[-1].body["messages"]
        assert last[4]["role"] == "system" and "PARTIAL view" in json.dumps(last[4])
        assert "<persisted-output>" in json.dumps(last[-1])
        assert len(played.session.tree.nodes) == 6  # counting leaves nothing in the tree


async def test_malformed_call_is_text_and_counted(task: Task, tmp_path: Path) -> None:
    said = " I edit:\n[[Edit {broken  \n"
    async with stage(scripted(in_turn(call("Bash", command="true"), said)), task) as played:
        run = await played.play("Edit.")
        (row,) = played.check(tmp_path, rows=1)
        assert run.detail == said
        assert played.session.counters.malformed_calls == 1
        assert len(row.nodes) == 2


async def test_cut_replies_go_on_in_one_row(task: Task, tmp_path: Path) -> None:
    """A cut call is passed on as text. Claude Code then writes "Output token limit hit", and the row goes on."""
    script = in_turn("words " * 300, "Now " + call("Bash", command="echo " + "y" * 2000), "  End. ")
    async with stage(scripted(script), task, max_tokens=1000) as played:
        run = await played.play("Talk.")
        (row,) = played.check(tmp_path, rows=1)
        assert (run.status, run.detail) == ("finished", "  End. ")
        assert (len(row.nodes), played.session.counters.cut_replies) == (3, 2)
        assert prompt_text(played).count("Output token limit hit") == 2


async def test_replies_that_are_always_cut_end_the_run(task: Task, tmp_path: Path) -> None:
    """After three continuations Claude Code gives up. That is a failure of the policy, and all of it is one row."""
    async with stage(scripted(lambda _: "words " * 100), task, max_tokens=100, bare=True) as played:
        run = await played.play("Talk.")
        (row,) = played.check(tmp_path, rows=1)
        assert (run.status, len(row.nodes), sum(row.mask)) == ("error", 4, 400)
        assert "output token maximum" in run.detail


async def test_thinking_comes_back_signed_and_stays_one_row(task: Task, tmp_path: Path) -> None:
    script = in_turn("((I must look.))" + call("Bash", command="echo 1"), "((Hm.))Once more.", "((So.))Done.")
    async with stage(scripted(script), task) as played:
        await played.play("Think.")
        await played.play("And again.", "--continue")
        (row,) = played.check(tmp_path, rows=1)
        assert len(row.nodes) == 3
        last = played.calls[-1].body["messages"]
        echoes = [b for m in last if m["role"] == "assistant" for b in blocks(m) if b["type"] == "thinking"]
        assert [b["thinking"] for b in echoes] == ["I must look.", "Hm."]
        assert all(b["signature"].startswith("msg_") for b in echoes)
        trained = "".join(chr(i) for i, m in zip(row.response_ids, row.mask, strict=True) if m and i < 0x110000)
        for thought in ("((I must look.))", "((Hm.))", "((So.))"):
            assert trained.count(thought) == 1


@pytest.mark.parametrize("nothing", ["", "((Only thought.))"])
@pytest.mark.parametrize("first", [False, True])
async def test_reply_that_shows_nothing_is_asked_for_again(
    task: Task, tmp_path: Path, nothing: str, first: bool
) -> None:
    """Claude Code drops such a reply from the conversation and adds a reminder to the user's message before it. If that
    is the first message, a system message comes between."""
    work = [call("Bash", command="echo 1")]
    replies = iter([nothing, *work, "Fin."] if first else [*work, nothing, *work, "Fin."])
    async with stage(scripted(lambda _: next(replies)), task) as played:
        run = await played.play("Say something.")
        (row,) = played.check(tmp_path, rows=1)
        assert run.detail == "Fin." and len(row.nodes) == (3 if first else 4)
        last = played.calls[-1].body["messages"]
        assert [m["role"] for m in last] == ["user", "system", *["assistant", "user"] * (1 if first else 2)]
        assert "Your previous response had no visible output" in json.dumps(last[0 if first else 3])
        assert prompt_text(played).count("Your previous response had no visible output") == 1


async def test_deferred_tools_change_the_head(task: Task, tmp_path: Path) -> None:
    """ToolSearch adds a tool to the next requests, so their prompts begin differently: a second row, and no third.
    The policy reads which tool was found."""
    script = in_turn(call("ToolSearch", query="select:WebFetch"), call("Bash", command="echo 1"), "Done.")
    async with stage(scripted(script), task) as played:
        await played.play("Find a tool.")
        played.check(tmp_path, rows=2)
        first, second, third = [{tool["name"] for tool in sent.body["tools"]} for sent in played.calls]
        assert (second - first, third) == ({"WebFetch"}, second)
        (result,) = blocks(played.calls[-1].body["messages"][3])
        assert result["content"] == [{"type": "tool_reference", "tool_name": "WebFetch"}]
        assert "tool: [tool WebFetch]" in prompt_text(played)


async def test_tool_search_off_keeps_one_row(task: Task, tmp_path: Path) -> None:
    script = in_turn(call("Bash", command="echo 1"), "Done.")
    async with stage(scripted(script), task) as played:
        await played.play("Go.", "--settings", json.dumps({"env": {"ENABLE_TOOL_SEARCH": "false"}}))
        played.check(tmp_path, rows=1)
        names = {tool["name"] for tool in played.calls[0].body["tools"]}
        assert "ToolSearch" not in names and {"WebFetch", "WebSearch"} <= names
