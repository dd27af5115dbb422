"""This module tests what the agents other than Claude Code have in common: what they are told, how their output,
which may be hostile, is read, and what a missing program says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.agents import main
from rl.config.compose import compose
from rl.episodes.setup import AGENTS, INSTALLED, agent_from
from rollout import storable
from rollout.agent import Status, forward
from rollout.agent.codex import Codex
from rollout.agent.command import CommandAgent
from rollout.agent.events import reply_of
from rollout.agent.headless import Headless
from rollout.agent.mini_swe_agent import MiniSweAgent
from rollout.agent.opencode import OpenCode
from rollout.agent.programs import Program
from rollout.agent.qwen_code import QwenCode
from rollout.sandbox import ExecResult

KINDS = {kind.__name__: kind for kind in INSTALLED}
LIMITS = {"timeout_s": 9.0, "max_tokens": 64, "max_context": 4096}
ID = "toolu_0011223344556677000a_0001"


@pytest.fixture(autouse=True)
def nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def made(name: str) -> Headless:
    return KINDS[name](**LIMITS, max_turns=3)


def done(*lines: Any, returncode: int | None = 0, timed_out: bool = False) -> ExecResult:
    out = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return ExecResult(returncode, out, b"boom", timed_out, False, 1.0)


def test_a_call_tells_which_reply_it_is_in() -> None:
    assert reply_of(ID) == "msg_0011223344556677000a_00"
    # The same prompt with other parameters has another reply.
    assert reply_of("toolu_0011223344556677000a_00_1a01") == "msg_0011223344556677000a_00_1a"
    assert reply_of("call_1") == "" == reply_of("")


@pytest.mark.parametrize("name", KINDS)
def test_the_environment_is_built_from_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "GEMINI_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "real")
    told = made(name).environment("secret", socket=Path("/s/p"))
    words = [*told.values(), *made(name).argv("/home/agent")]
    assert told[forward.SOCKET] == "/s/p" and "PATH" not in told and "real" not in told.values()
    assert any("secret" in word for word in words) and any(forward.BASE_URL in word for word in words)
    assert all("http" not in word.replace(forward.BASE_URL, "") for word in words)


@pytest.mark.parametrize("name", KINDS)
def test_without_its_program_one_line_says_what_to_do(name: str) -> None:
    program = KINDS[name].PROGRAM
    assert program is not None
    config = compose([f"agent={program.name}"])
    with pytest.raises(
        FileNotFoundError, match=rf"not installed: \.venv/bin/python -m rl\.agents install {program.name}"
    ):
        agent_from(config, 1, 1)
    program.directory.mkdir(parents=True)
    assert isinstance(agent_from(config, 1, 1), KINDS[name]) and program.name in AGENTS
    with pytest.raises(ValueError, match=r"has no agent\.bare, agent\.tools"):
        agent_from(compose([f"agent={program.name}", "+agent.tools=[]", "+agent.bare=true"]), 1, 1)


def test_the_command_lists_what_there_is_and_refuses_what_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["agents"])
    assert main() == 0 and capsys.readouterr().out.count("not installed") == len(KINDS)
    monkeypatch.setattr("sys.argv", ["agents", "install", "codex", "unheard"])
    assert main() == 2 and "there is no agent unheard" in capsys.readouterr().err


def test_a_python_is_looked_for_where_one_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in use, on PATH (where pyenv's refuse to run), among pyenv's versions."""
    for place, does in (("bin", "exit 127"), ("versions/3.98.1/bin", "echo 3.98")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "python3.98").write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / place / "python3.98").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert Program("x", "1", pythons=("3.98",)).python() == str(tmp_path / "versions/3.98.1/bin/python3.98")
    assert Program("x", "1").python() == os.path.realpath(sys.executable)
    with pytest.raises(FileNotFoundError, match=r"it needs Python 3\.97 or 3\.99 with venv: install one"):
        Program("x", "1", pythons=("3.97", "3.99")).python()


def test_any_command_has_its_words_replaced(tmp_path: Path) -> None:
    config = compose(["agent=command", "agent.command=[run,'{base_url}/v1','{home}','{max_tokens}','{secret}']"])
    agent: Any = agent_from(config, 64, 4096)
    assert agent.argv("/h")[-5:] == [
        "run",
        f"{forward.BASE_URL}/v1",
        "/h",
        "64",
        "",
    ]  # lists of processes show a secret
    assert agent.environment("s3", socket=tmp_path)["OPENAI_API_KEY"] == "s3"
    with pytest.raises(ValueError, match=r"agent\.command: give the program"):
        agent_from(compose(["agent=command"]), 1, 1)
    with pytest.raises(FileNotFoundError, match=r"agent\.shows: /no/where"):
        agent_from(compose(["agent=command", "agent.command=[run]", "agent.shows=[/no/where]"]), 1, 1)
    assert isinstance(agent, CommandAgent)
    assert agent.result(done(b"words"), 2).detail == "words"
    assert agent.result(done(returncode=3), 2).status is Status.ERROR


def test_an_agent_that_has_asked_for_a_summary_reports_no_replies() -> None:
    """They do not say so: OpenCode goes on after a reply without calls, and Qwen Code's prompt is shorter."""
    call = {"callID": ID, "tool": "bash", "state": {"status": "completed", "input": {}, "output": "a"}}
    ran = [{"type": "tool_use", "part": call}, {"type": "step_finish"}]
    said = [{"type": "text", "part": {"text": "So far."}}, {"type": "step_finish"}]
    asked = {"type": "tool_use", "id": ID, "name": "run", "input": {}}
    sizes = [{"type": "assistant", "message": {"content": [asked], "usage": {"input_tokens": n}}} for n in (5, 0, 9, 2)]
    sub = [sizes[0], sizes[2], sizes[3] | {"parent_tool_use_id": ID}]
    for kind, full, lines in (
        (OpenCode, False, [*ran, *said]),
        (OpenCode, True, [*said, *ran]),
        (QwenCode, False, sizes[:3]),
        (QwenCode, False, sub),
        (QwenCode, True, sizes),
    ):
        run = made(kind.__name__).result(done(*lines), 1)
        assert (run.replies is None) == full == any(event.get("subtype") == "compact_boundary" for event in run.events)


def test_what_agents_say_becomes_replies_and_ends() -> None:
    call = {"callID": ID, "tool": "bash", "state": {"status": "completed", "input": {"command": "ls"}, "output": "a"}}
    run = made(OpenCode.__name__).result(
        done(
            {"type": "text", "part": {"text": "I look."}}, {"type": "tool_use", "part": call}, {"type": "step_finish"}
        ),
        1,
    )
    assert (run.status, run.replies, run.detail) == (Status.FINISHED, {reply_of(ID)}, "I look.")
    assert [block["type"] for block in run.events[0]["message"]["content"]] == ["text", "tool_use"]
    full, end = {"type": "error", "error": {"name": "ContextOverflowError"}}, {"type": "step_finish"}
    told = [{"type": "text", "part": {"text": words}} for words in ("All that was done.", "Go on.", "Done.")]
    told[1]["part"]["synthetic"] = True
    for rest, status, detail in (
        ([told[0], end, told[1], told[2], end], Status.FINISHED, "Done."),  # an error that it has overcome
        ([], Status.ERROR, "ContextOverflowError"),
    ):
        run = made(OpenCode.__name__).result(done(full, *rest, returncode=1), 1)
        assert (run.status, run.detail, "Go on." in str(run.events)) == (status, detail, False)
    said = {"type": "item.completed", "item": {"id": "item_0", "type": "agent_message", "text": "Done."}}
    run = made(Codex.__name__).result(done(said, {"type": "turn.completed"}), 1)
    assert (run.status, run.detail, run.replies) == (Status.FINISHED, "Done.", None)
    failed = {"type": "turn.failed", "error": {"message": "no"}}
    assert made(Codex.__name__).result(done(failed, returncode=1), 1).status is Status.ERROR
    stopped = {"added": {"role": "exit", "content": "LimitsExceeded", "exit_status": "LimitsExceeded"}}
    mini = made(MiniSweAgent.__name__)
    assert (mini.result(done(stopped), 3).status, mini.result(done(stopped), 2).status) == (
        Status.MAX_TURNS,
        Status.ERROR,
    )
    for name in KINDS:
        assert made(name).result(done(returncode=1), 1).status is Status.CRASHED
        assert made(name).result(done(timed_out=True), 1).status is Status.TIMEOUT


WORD = (
    "type part item message error text tool_use tool_result assistant result user added role content tool_calls id "
    "name input callID tool state status output function arguments exit item.completed turn.failed step_finish success "
    "command_execution agent_message tool_id tool_name parameters"
)
WORDS = st.sampled_from(WORD.split()) | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
LINES = st.lists(st.dictionaries(WORDS, VALUES, max_size=5) | st.binary(max_size=20), max_size=6)


@pytest.mark.parametrize("name", KINDS)
@given(lines=LINES)
def test_no_output_is_too_hostile(name: str, lines: list[Any]) -> None:
    run = made(name).result(done(*lines), 1)
    assert all(storable(event) and isinstance(event["type"], str) for event in run.events)
    assert isinstance(run.detail, str) and "" not in (run.replies or ())
