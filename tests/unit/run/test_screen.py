"""This module tests the screen on a terminal and in a pipe: real processes, a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from rl.run.screen import Screen, this_command
with Screen(every_s=0.1) as screen:
    screen.say("begun [x]")
    screen.redirect("run.log")
    print("what a library prints")
    screen.show("starting")
    time.sleep(0.3)
    for done in range(8):
        screen.show("step 1/2  rollout", done, 8, "3 resolved")
        time.sleep(0.05)
        if done == 4:
            screen.say("an event")
    screen.restore()
    if "fail" in sys.argv:
        raise RuntimeError("broken")
    screen.next(("continue", this_command()), ("log", "run.log"))
"""
BAR = "━"


def in_pipe(tmp_path: Path) -> str:
    return subprocess.run(
        command(tmp_path), cwd=tmp_path, env=environment(), text=True, capture_output=True, check=True
    ).stdout


def on_terminal(tmp_path: Path, *arguments: str) -> str:
    """Return all that the program wrote to its terminal, control sequences included."""
    ours, theirs = pty.openpty()
    env = environment() | {"TERM": "xterm-256color"}
    with subprocess.Popen(
        command(tmp_path, *arguments), cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ):
        os.close(theirs)
        written = b""
        while True:
            try:
                written += (data := os.read(ours, 4096))
            except OSError:  # Linux's end of a terminal whose other side is closed
                break
            if not data:
                break
    os.close(ours)
    return written.decode()


def command(directory: Path, *arguments: str) -> list[str]:
    (directory / "program.py").write_text(PROGRAM)
    return [sys.executable, "program.py", *arguments]


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TTY_COMPATIBLE", "COLUMNS")}
    return plain | {"PYTHONPATH": str(Path(__file__).parents[3])}


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    lines = in_pipe(tmp_path).splitlines()
    assert not any(BAR in line or "\x1b" in line for line in lines)
    assert re.fullmatch(r"\[ +\d+\.\d s\] begun \[x\]", lines[0])
    counted = [line for line in lines if "rollout" in line]
    assert 1 <= len(counted) <= 4, lines
    assert re.fullmatch(r"\[ +\d+\.\d s\] step 1/2  rollout \d/8  3 resolved", counted[0])
    assert not any("starting" in line for line in lines), "nothing is counted there"
    assert lines[-2] == f"continue  {sys.executable} program.py"
    assert lines[-1] == "log       run.log"
    assert (tmp_path / "run.log").read_text() == "what a library prints\n"


def test_colours_that_are_forced_do_not_make_a_pipe_a_terminal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert BAR not in in_pipe(tmp_path)


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(tmp_path: Path) -> None:
    written = on_terminal(tmp_path)
    assert "starting" in written and BAR in written and "3 resolved" in written
    assert "an event" in written and "what a library prints" not in written
    kept = written[written.rindex("\x1b[2K") :]  # after the last line that was wiped
    assert BAR not in kept and "continue" in kept and "log" in kept
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_an_error_on_a_terminal_leaves_it_clean(tmp_path: Path) -> None:
    written = on_terminal(tmp_path, "fail")
    after = written[written.index("Traceback") :]
    assert "RuntimeError: broken" in after and BAR not in after
