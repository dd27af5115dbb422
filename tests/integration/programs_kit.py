"""This module has programs that play episodes (rl.evaluate, rollout.collect), started and killed by tests, and a script
that solves every task.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from rl.quickstart.tasks import CANDIDATES
from rollout.sandbox import directory
from tests.integration.claude_kit import answers, call
from tests.integration.process_kit import read_until

ROOT = Path(__file__).parents[2]
AGENT = ["agent.bare=true", "agent.tools=[Edit,Read]", "agent.system_prompt=Repair.", "sandbox.concurrency=2"]
STATEMENT = re.compile(r"in (\S+\.py) must return the (\w+) of a and b")


def gold(prompt: str) -> str:
    """Return the reply that solves the task in a prompt."""
    asked = STATEMENT.search(prompt)
    if asked is None:
        return "Hello."
    if answers(prompt) == 0:
        return call("Read", file_path=asked[1])
    if answers(prompt) > 1:
        return "Done."
    (bug,) = re.findall(r"\d\t    return (.+)", prompt)
    new = CANDIDATES[asked[2]]
    return call("Edit", file_path=asked[1], old_string=f"return {bug}", new_string=f"return {new}")


def start(*arguments: str, program: str = "rl.evaluate", **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_after(words: str, *arguments: str, **options: str) -> None:
    """Start, kill with -9 when ``words`` appear on the screen, and wait until all its processes have ended."""
    process = start(*arguments, **options)
    read_until(process, words)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    directory.sweep()  # a bwrap that was just starting outlives it
    _, alive = psutil.wait_procs(started, 60)
    assert not alive, [one.cmdline()[:4] for one in alive]
