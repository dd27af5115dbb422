"""This module helps tests with programs of the project: how they are started, what they say, and which run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def plain_environment() -> dict[str, str]:
    """Return this process's environment without wandb's settings and with the repository on Python's path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return kept | {"PYTHONPATH": str(ROOT)}


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the output up to the first line with ``words``; fail if the process ends before."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError(f"ended before {words!r}:\n{''.join(seen)}")


def until(process: subprocess.Popen[str], reached: Callable[[], T]) -> T:
    """Poll ``reached`` while the process lives; return its first true value."""
    while not (value := reached()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return value


def command_line(process: psutil.Process) -> str:
    """The command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def one_line(said: str) -> str:
    """The one line that is no event and no useful command."""
    (line,) = [line for line in said.splitlines() if line and not re.match(r"\[|continue ", line)]
    return line
