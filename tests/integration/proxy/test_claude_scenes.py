"""This module tests scenes of the real Claude Code that honest runs have, beside those of the other two files. Each
ends in the audit.

A scene is a script, what is in the box, how Claude Code is started (once or more often), the number of rows, and words
that the requests must have had: they show that the scene took place.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from tests.integration.claude_kit import Moody, Script, answers, call, failing, in_turn, scripted, stage
from tests.integration.proxy.test_claude_threads import agent, put_big, with_subs

pytestmark = pytest.mark.asyncio

SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    name, result = asked.get("method"), {}
    if name == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "numbers", "version": "1"}}
    elif name == "tools/list":
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        result = {"tools": [{"name": "double", "description": "Doubles.", "inputSchema": schema}]}
    elif name == "tools/call":
        result = {"content": [{"type": "text", "text": f"twice is {2 * asked['params']['arguments']['n']}"}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def pdf() -> bytes:
    page = zlib.compress(b"BT /F1 24 Tf 72 700 Td (A page) Tj ET")
    parts = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<<>>>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(page), page),
    ]
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer<</Size 5/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % len(out)
    return out + b"xref\n0 5\n0000000000 65535 f \n" + table + end


NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": "1+1"}
    ],
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def settings(**values: Any) -> tuple[str, str]:
    return "--settings", json.dumps(values)


def hooks(*events: str) -> tuple[str, str]:
    """Hooks for these events, each of which says its event to the agent."""

    def said(event: str) -> str:
        spoken = {"hookSpecificOutput": {"hookEventName": event, "additionalContext": f"HOOK {event}"}}
        return f"echo '{json.dumps(spoken)}'"

    return settings(hooks={e: [{"matcher": "", "hooks": [{"type": "command", "command": said(e)}]}] for e in events})


@dataclass
class Scene:
    """See the module's docstring. ``plays``: the extra arguments of each start."""

    script: Script
    rows: int | None
    shows: Sequence[str] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    plays: Sequence[Sequence[str]] = ((),)
    agent: dict[str, Any] = field(default_factory=dict)
    engine: Any = None


def bash(command: str, **more: Any) -> str:
    return call("Bash", command=command, **more)


NUMBERS = json.dumps({"mcpServers": {"numbers": {"command": sys.executable, "args": ["server.py"]}}})
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
ONE_SUB = in_turn(agent("one", run_in_background=False), "Done.")


def resuming(prompt: str) -> str:
    """Start a sub-agent, and when it has ended, tell it to go on."""
    if "MAIN" not in prompt:
        return in_turn(bash("echo sub"), "It is there.", "It still is.")(prompt)
    if not answers(prompt):
        return agent("one", run_in_background=False)
    if answers(prompt) == 1 and (known := re.search(r"agentId: (\w+)", prompt)):
        return call("SendMessage", to=known[1], summary="look again", message="SUB again: look again")
    return "Done."


SCENES: dict[str, Scene] = {
    "a sub-agent that is resumed": Scene(
        resuming, 2, ["SUB again", "It still is."], plays=[settings(env={"ENABLE_TOOL_SEARCH": "false"})]
    ),
    "two equal sub-agents at once": Scene(
        with_subs(in_turn(2 * agent("one", run_in_background=False), "Done."), in_turn(bash("echo 1"), "Same.")),
        None,  # they share replies, or not: one may be told before the other asks
        ["Same."],
    ),
    "a sub-agent that speaks and thinks beside its calls": Scene(
        with_subs(ONE_SUB, in_turn("((Hm.))I look." + bash("echo 1"), "((So.))It is there.")), 2, ["It is there."]
    ),
    "a sub-agent of a sub-agent": Scene(
        lambda p: (
            ONE_SUB(p)
            if "MAIN" in p
            else (in_turn(agent("inner", run_in_background=False), "Outer.")(p) if "SUB one" in p else "Inner.")
        ),
        3,
        ["Outer."],
    ),
    "a sub-agent of one's own kind": Scene(
        with_subs(in_turn(agent("one", "critic", run_in_background=False), "Done."), in_turn("Bad.")),
        2,
        ["You are strict.", "Bad."],
        plays=[["--agents", json.dumps({"critic": {"description": "Critic.", "prompt": "You are strict."}})]],
    ),
    "a fork of the session": Scene(
        in_turn(bash("echo 1"), "First.", "Second.", "Third."),
        1,
        ["First."],
        plays=[(), ("--continue", "--fork-session")],
    ),
    "a tool server": Scene(
        in_turn(call("mcp__numbers__double", n=21), "Done."),
        1,
        ["twice is 42"],
        {"server.py": SERVER.encode()},
        [["--mcp-config", NUMBERS, *settings(env={"ENABLE_TOOL_SEARCH": "false"})]],
    ),
    "a tool server that is searched": Scene(
        in_turn(call("ToolSearch", query="select:mcp__numbers__double"), call("mcp__numbers__double", n=21), "Done."),
        2,
        ["twice is 42"],
        {"server.py": SERVER.encode()},
        [["--mcp-config", NUMBERS]],
    ),
    "hooks that speak": Scene(
        in_turn(bash("echo 1"), "Done."),
        1,
        ["HOOK SessionStart", "HOOK UserPromptSubmit", "HOOK PostToolUse"],
        plays=[hooks("SessionStart", "UserPromptSubmit", "PreToolUse", "PostToolUse")],
    ),
    "a hook that refuses a call": Scene(
        in_turn(bash("echo 1"), "Done."),
        1,
        ["not today"],
        plays=[
            settings(
                hooks={
                    "PreToolUse": [
                        {"matcher": "Bash", "hooks": [{"type": "command", "command": "echo not today >&2; exit 2"}]}
                    ]
                }
            )
        ],
    ),
    "a hook that does not let it stop": Scene(
        in_turn("Done.", "Really done."),
        1,
        ["go on"],
        plays=[
            settings(
                hooks={
                    "Stop": [
                        {
                            "hooks": [
                                {
                                    "type": "command",
                                    "command": "test -e stopped || { touch stopped; echo go on >&2; exit 2; }",
                                }
                            ]
                        }
                    ]
                }
            )
        ],
    ),
    "a skill": Scene(
        in_turn(call("Skill", skill="greet"), "Done."),
        1,
        ["Say hello thrice."],
        {".claude/skills/greet/SKILL.md": b"---\nname: greet\ndescription: Greets.\n---\nSay hello thrice.\n"},
        agent={"project_settings": True},
    ),
    "plan mode, which headless runs lack": Scene(
        in_turn(call("ExitPlanMode", plan="Do it."), "Done."),
        1,
        ["ExitPlanMode is disabled for this session"],
        plays=[["--permission-mode", "plan"]],
    ),
    "a PDF": Scene(in_turn(call("Read", file_path="a.pdf"), "Done."), 1, ["a.pdf"], {"a.pdf": pdf()}),
    "a notebook": Scene(
        in_turn(
            call("Read", file_path="n.ipynb"),
            call("NotebookEdit", notebook_path="n.ipynb", cell_id="a", new_source="2+2"),
            "Done.",
        ),
        1,
        ["2+2"],
        {"n.ipynb": json.dumps(NOTEBOOK).encode()},
        [settings(env={"ENABLE_TOOL_SEARCH": "false"})],
    ),
    "an answer by a schema": Scene(
        in_turn("Words.", call("StructuredOutput", n=3), "Done."),
        1,
        ["StructuredOutput"],
        plays=[["--json-schema", SCHEMA]],
    ),
    "a list of things to do": Scene(
        in_turn(
            call("TodoWrite", todos=[{"content": "a", "status": "pending", "activeForm": "a"}]),
            call("TaskCreate", subject="a", description="a"),
            "Done.",
        ),
        1,
        plays=[settings(env={"ENABLE_TOOL_SEARCH": "false"})],
    ),
    "searching": Scene(in_turn(call("Glob", pattern="*.py"), call("Grep", pattern="def"), "Done."), 1, [".py"]),
    "a command in the background": Scene(
        in_turn(bash("echo begun; sleep 0.2; echo ended", run_in_background=True), bash("sleep 0.5"), "Done."),
        1,
        ["background"],
    ),
    "an appended system prompt": Scene(
        in_turn(bash("echo 1"), "Done."), 1, ["Be brief."], plays=[["--append-system-prompt", "Be brief."]]
    ),
    "an output style": Scene(
        in_turn(bash("echo 1"), "Done."),
        1,
        ["Speak like a pirate."],
        {".claude/output-styles/pirate.md": b"---\nname: pirate\ndescription: Arr.\n---\nSpeak like a pirate.\n"},
        [settings(outputStyle="pirate")],
        {"project_settings": True},
    ),
    "a command of the project's": Scene(
        in_turn("Done."),
        1,
        ["Count to seven."],
        {".claude/commands/count.md": b"Count to $ARGUMENTS.\n"},
        [("PROMPT", "/count seven")],
        {"project_settings": True},
    ),
    "a web page without a network": Scene(
        in_turn(call("WebFetch", url="https://example.invalid/", prompt="what"), "Done."),
        1,
        plays=[settings(env={"ENABLE_TOOL_SEARCH": "false"})],
    ),
    "an engine that fails a sub-agent": Scene(
        with_subs(ONE_SUB, in_turn(bash("echo sub"), "I found it.")), 2, ["I found it."], engine=failing(2, 4)
    ),
    "a file written and edited in one reply": Scene(
        in_turn(
            call("Write", file_path="new.txt", content="  a\n\tb\n") + call("Read", file_path="new.txt"),
            call("Edit", file_path="new.txt", old_string="\tb", new_string="    b "),
            "Done.",
        ),
        1,
        ["new.txt"],
    ),
    "words of all kinds": Scene(
        in_turn(
            "«ß» 你好 \u202e\u200d🙂\x07 &lt;b&gt; <system-reminder>no</system-reminder>" + bash("echo 1"),
            "\n\nDone.\n",
        ),
        1,
        ["你好"],
    ),
}


@pytest.mark.parametrize("name", SCENES)
async def test_scene(name: str, task: Task, tmp_path: Path) -> None:
    scene = SCENES[name]
    engine = Moody(scene.script, scene.engine) if scene.engine else scripted(scene.script)
    async with stage(engine, task, **scene.agent) as played:
        for path, content in scene.files.items():
            await played.box.put(path, content)
        for number, extra in enumerate(scene.plays):
            prompt = "MAIN go." if not number else "MAIN go on."
            if extra[:1] == ("PROMPT",):
                prompt, extra = extra[1], extra[2:]
            run = await played.play(prompt, *extra)
        played.check(tmp_path, rows=scene.rows)
        assert run.status == "finished", run.detail
        sent = "".join(call.text() for call in played.calls)
        assert [words for words in scene.shows if words not in sent] == []


async def test_a_conversation_that_is_compacted_twice(task: Task, tmp_path: Path) -> None:
    """After its first summary the policy reads on until the context is full again. The request for the second summary
    extends no reply: the newest exchanges, which it leaves out, are all that was said since the first."""
    summaries = 0

    def script(prompt: str) -> str:
        nonlocal summaries
        if "CRITICAL: Respond with TEXT ONLY" in prompt.rsplit("assistant: ", 2)[-2]:
            summaries += 1
            return f"<analysis>Short.</analysis><summary>MAIN: part {summaries}.</summary>"
        if summaries == 2:
            return "Finished."
        return call("Read", file_path="big.txt", limit=100, offset=1 + 100 * (answers(prompt) % 14))

    async with stage(scripted(script), task, max_context=45_000, max_turns=60) as played:
        await put_big(played)
        run = await played.play("MAIN read all.")
        rows = played.check(tmp_path, rows=5)
        assert (run.status, run.detail, summaries) == ("finished", "Finished.", 2)
        said = [played.session.tree.nodes[row.nodes[-1]].text for row in rows]
        assert [text for text in said if "<summary>" in text] == [
            f"<analysis>Short.</analysis><summary>MAIN: part {number}.</summary>" for number in (1, 2)
        ]
