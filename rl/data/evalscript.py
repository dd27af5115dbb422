"""Eval scripts in SWE-bench's format, for sets whose rows say how to test but have no script.

A script runs in a fresh box after the patch was applied. It restores the test files from the image, applies the hidden
test patch, and runs the tests between swebench's markers. It differs from the sets' own harnesses in two ways, because
boxes have no network and an agent may cheat: files that the test patch creates are removed first, so that an agent's
file cannot take their place; and a repository that is installed in place is not installed again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from rewards.task import MARKERS
from rl.data.patches import FileChange, changes
from rollout.sandbox import WORKDIR

# The images keep the repository's dependencies in a conda environment named testbed. Some of SWE-rebench's have conda
# in /opt/conda.
_ACTIVATE = ("source /opt/miniconda3/bin/activate || source /opt/conda/bin/activate", "conda activate testbed")
_END_OF_PATCH = "EOF_114329324912"  # as in swebench; no line of a patch begins like this
_EDITABLE = re.compile(r"(?:^|\s)(?:-\w*e|--editable|develop)(?:\s|=|$)")


def eval_script(test_commands: Sequence[str], test_patch: str = "", before: Iterable[str] = ()) -> str:
    """Return the script that applies `test_patch` and runs the commands; the last command's exit status counts.

    before: commands that prepare the shell once the environment is active. Raises PatchError.
    """
    return script([*_ACTIVATE, f"cd {WORKDIR}", *before, *_hidden_tests(test_patch, WORKDIR)], test_commands)


def bare_eval_script(
    test_commands: Sequence[str], before: Iterable[str] = (), test_patch: str = "", workdir: str = WORKDIR
) -> str:
    """Return a script that activates no environment. Raises PatchError."""
    return script([f"cd {workdir}", *before, *_hidden_tests(test_patch, workdir)], test_commands)


def unchecked(test_commands: Iterable[str], how: str) -> list[str]:
    """Return commands that run in a shell of their own with these options, and without those of the script."""
    return ["(", f"set +u +o pipefail {how}", *test_commands, ")"]


def here(text: str, command: str) -> str:
    """Return the command with a text as its standard input."""
    body = text if text.endswith("\n") else text + "\n"
    return f"{command} <<'{_END_OF_PATCH}'\n{body}{_END_OF_PATCH}"


def script(before: Sequence[str], test_commands: Sequence[str]) -> str:
    """Return a script that runs test commands between the markers, after others."""
    lines = ["#!/bin/bash", "set -uxo pipefail", *before, f": '{MARKERS[0]}'", *test_commands, f": '{MARKERS[1]}'"]
    return "\n".join(lines) + "\n"


def _hidden_tests(test_patch: str, workdir: str) -> list[str]:
    if not test_patch.strip():
        return []
    files = changes(test_patch)
    old = sorted({file.old for file in files if file.old is not None})
    made = sorted({file.new for file in files if file.new is not None} - set(old))
    return restored(old, made, test_patch, workdir)


def restored(old: Sequence[str], made: Sequence[str], test_patch: str, workdir: str) -> list[str]:
    """Return the commands that bring hidden tests back into a work tree.

    old: files that the patch changes, which are taken from HEAD first. made: files that it makes.
    """
    lines = [f"git config --global --add safe.directory {workdir}"]
    if old:
        lines.append(f"git checkout HEAD -- {shlex.join(old)}")
    if made:
        lines.append(f"rm -rf -- {shlex.join(made)}")
    return [*lines, here(test_patch, "git apply -v -")]


def test_files(files: Iterable[FileChange]) -> list[str]:
    """Return the files to pass to a test runner: those that exist after the patch and can contain tests."""
    from swebench.harness.constants import NON_TEST_EXTS

    return [file.new for file in files if file.new is not None and not file.new.endswith(tuple(NON_TEST_EXTS))]


def reinstall(commands: Iterable[str]) -> list[str]:
    """Return the install commands that must run again after a patch: all except installations in place.

    They run without a package index and with the environment's own build tools, since a box has no network.
    """
    again = [command for command in commands if command.strip() and not _EDITABLE.search(command)]
    # PIP_NO_BUILD_ISOLATION=0 is correct: pip reads the variable as the value of build_isolation.
    return ["export PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0", *again] if again else []
