"""The audit tells what a tool was given from what Claude Code makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.audit import audit_heard
from rollout.audit.ran import changed_input, same_input
from tests.kit import empty_record

# Each pair was seen in 2.1.329, or stands in its code.
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Bash", {"command": "cd /testbed && ls \\\\; a  \n"}, {"command": "ls \\; a"}),
    ("Bash", {"command": "a", "timeout": "500", "run_in_background": "False"},
     {"command": "a", "timeout": 500, "run_in_background": False}),
    ("Bash", {"command": "a", "description": None}, {"command": "a"}),
    ("Write", {"file_path": "a", "content": "x  \ny\t\n"}, {"content": "x\ny\n", "file_path": "a"}),
    ("Edit", {"file_path": "a", "old_string": "<fnr>", "new_string": "b  "},
     {"replace_all": False, "file_path": "a", "old_string": "<function_results>", "new_string": "b"}),
    ("Edit", {"old_str": "1", "new_str": "2"}, {"file_path": "", "old_string": "1", "new_string": "2"}),
    ("ToolSearch", {"files": "a", "ids": "[1, 2]"}, {"files": ["a"], "ids": [1, 2], "most": 5}),
    ("SendMessage", {"to": "x"}, {"to": "x", "recipient": "x"}),
    ("mcp__a__b", {"n": 1, "of": [{"a": None}]}, {"n": 1, "of": [{"a": None}]}),
    ("Bash", {"command": "echo \\u00e9"}, {"command": "echo é"}),
]  # fmt: skip
DIFFERENT: list[tuple[str, dict[str, Any], Any]] = [
    ("Bash", {"command": "ls"}, {"command": "rm"}),
    ("Bash", {"command": "ls"}, {}),
    ("Bash", {"command": "cd a && ls"}, {"command": "cd a && ls -a"}),
    ("Bash", {"command": "ls && cd a && pwd"}, {"command": "pwd"}),
    ("Bash", {"command": "  ls"}, {"command": "ls"}),
    ("Bash", {"command": "ls", "timeout": "5"}, {"command": "ls", "timeout": 6}),
    ("Bash", {}, {"command": "ls"}),
    ("Bash", {"command": "ls"}, "ls"),
    ("Write", {"file_path": "a", "content": "x\n\ny"}, {"file_path": "a", "content": "x\ny"}),
    ("Edit", {"file_path": "a", "replace_all": False}, {"file_path": "a", "replace_all": True}),
    ("mcp__a__b", {"of": [1, 2]}, {"of": [1, 2, 3]}),
]


def test_what_claude_code_changes_is_the_same_input() -> None:
    for tool, sampled, ran in SAME:
        assert same_input(tool, sampled, ran), (sampled, ran)


def test_another_input_is_another_one() -> None:
    for tool, sampled, ran in DIFFERENT:
        assert not same_input(tool, sampled, ran), (sampled, ran)


def hook(output: str, **changes: Any) -> dict[str, Any]:
    event = {"type": "system", "subtype": "hook_response", "hook_event": "PreToolUse", "hook_name": "PreToolUse:Bash"}
    return {**event, "output": output, "exit_code": 0, **changes}


CHANGED = '{"hookSpecificOutput": {"hookEventName": "PreToolUse", "updatedInput": {"command": "rm"}}}'


@pytest.mark.parametrize(
    "event",
    [
        hook("done\n" + CHANGED),  # the answer is not all JSON
        hook(CHANGED.replace('"updated', '"permissionDecision": "deny", "updated')),
        hook(CHANGED.replace('"updated', '"permissionDecision": "ask", "updated')),
        hook(CHANGED, exit_code=2),
        hook(CHANGED.replace("PreToolUse", "Stop")),
        hook(CHANGED, hook_event="PostToolUse"),
        hook('{"hookSpecificOutput": []}'),
        hook("[" * 5000),
    ],
)
def test_a_hook_that_changes_nothing_is_none(event: dict[str, Any]) -> None:
    assert changed_input(hook(CHANGED)) == ("Bash", {"command": "rm"})
    assert changed_input(event) is None
    assert changed_input(hook(CHANGED, exit_code=1)) is not None  # Claude Code takes it


def test_a_changed_input_is_compared_with_the_calls_that_wait_for_their_results() -> None:
    def call(name: str, command: str) -> dict[str, Any]:
        block = {"type": "tool_use", "id": name, "name": "Bash", "input": {"command": command}}
        return {"type": "assistant", "message": {"id": "msg_0", "content": [block]}}

    def heard(*events: dict[str, Any]) -> list[str]:
        record = empty_record(events=[*events], agent={"events": len(events), "reports": False})
        return list(audit_heard(record))

    result = {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "b", "content": ""}]}}
    assert heard(call("a", "ls"), call("b", "rm"), hook(CHANGED)) == []
    (found,) = heard(call("a", "ls"), call("b", "rm"), result, hook(CHANGED))
    assert 'Bash ran {"command": "rm"}, but {"command": "ls"} was sampled (a)' in found
    # Any number can be printed into the output; only the last ones are compared.
    assert heard(*[call(f"{n}", f"{n}") for n in range(200)], *[hook(CHANGED)] * 2)[0].endswith("(100)")


json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["Bash", "x"]), json, json)
def test_whatever_ran_is_compared(tool: str, sampled: Any, ran: Any) -> None:
    assert same_input(tool, sampled, sampled)
    assert isinstance(same_input(tool, sampled, ran), bool)
    changed_input({**hook(""), "output": ran})
