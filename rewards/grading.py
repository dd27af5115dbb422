"""A grading: fresh boxes with what the rules leave of one patch, for a grader to run its tests in.

The patch is applied without fuzz, before any code of the policy runs. What goes wrong with it is the policy's failure
(``RefusedError``); what goes wrong with a box is a SandboxError.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rewards import second
from rewards.patch import APPLY, FileDiff, read_the_same
from rewards.rules import Rules, ScreenedPatch
from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.sandbox import ExecResult, Sandbox, SandboxError, failed

logger = logging.getLogger(__name__)

# All stages are one exec, because each exec costs a container engine 50 ms, or a new container. Standard input
# is the eval script, of $2 bytes, a program for it, of $3 bytes, and the patch, which "$@" applies. The word $1 is
# printed when all have arrived in the box and again when the patch is applied, before any code of the policy runs. It
# is printed to standard error if the patch cannot be applied and the disk is full. A box's diff is made from raw
# bytes, so it is applied with a git directory whose attributes switch all conversions off: with the repository's own
# attributes, git would compare it with the file as the commit stores it (`$Id$` without the id, another encoding). A
# gold patch is made from commits and may need the repository's attributes, so these are tried second. The eval script
# is read as a whole before any of it runs: bash reads a script file line by line as it goes, so the tested code could
# change what follows. Nor is a file left that would tell the tested code which script runs, and the program is in a
# variable until the script has used it.
_STAGES = """
word=$1 length=$2 more=$3 input=$TMPDIR/input; shift 3
cat >"$input" && head -c "$length" "$input" >"$TMPDIR/eval.sh" || exit
tail -c +$((length + 1)) "$input" | head -c "$more" >"$TMPDIR/program" || exit
length=$((length + more))
printf %s "$word"
apply() { tail -c +$((length + 1)) "$input" | "$@"; }
if [ $# -gt 0 ]; then
    git=$TMPDIR/git; mkdir -p "$git/objects" "$git/refs" "$git/info"
    echo 'ref: refs/heads/none' >"$git/HEAD"
    echo '* -text !eol -ident !filter !working-tree-encoding' >"$git/info/attributes"
    GIT_DIR=$git GIT_WORK_TREE=$PWD apply "$@" 2>/dev/null || apply "$@" || {
        code=$?; head -c 1000000 /dev/zero >"$TMPDIR/space" || printf %s "$word" >&2; exit $code
    }
    rm -r "$git"
fi
rm -f "$input"
printf %s "$word"
exec bash -c 'script=$(cat "$1" && printf x) && rewriting=$(cat "$2") && rm -f "$1" "$2" && set -- &&
    eval "${script%x}"' bash "$TMPDIR/eval.sh" "$TMPDIR/program" </dev/null
"""
# Prints those of the names "$@" that are modules of a Python of the image: Python's own, or installed ones.
_INSTALLED = """
places=$(for python in python python3; do
    "$python" -I -c 'import sys; print("\\n".join(path for path in sys.path if path))' 2>/dev/null
done; for at in /opt/*conda*/envs/* /opt/*conda* /usr /usr/local "$HOME/.local" .venv venv; do
    for place in "$at"/lib/python3*/site-packages "$at"/lib/python3*/dist-packages "$at"/lib/python3*; do
        [ -d "$place" ] && printf '%s\\n' "$place"
    done
done)
for name; do
    printf '%s\\n' "$places" | sort -u | while IFS= read -r place; do
        case $place in "$PWD"|"$PWD"/src) continue;; esac
        for found in "$place/$name.py" "$place/$name"/*.py "$place/$name".*.so "$place/$name.so" "$place/$name.pyc"; do
            [ -e "$found" ] && printf '%s\\n' "$name" && break 2
        done
    done
done
exit 0
"""
_CLOSE_S = 60.0  # seconds to wait until the box is closed
TAIL = 4000
"""Characters of a log that a verdict keeps."""


class RefusedError(Exception):
    """A patch cannot be graded, which is the policy's doing; ``verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


@dataclass
class Grading:
    """A grading is one patch to one task, which is tested each time in a fresh box.

    timeout_s: seconds for `git apply` and one run of tests. second_opinion: whether a task that is resolved is to be
    tested once more, with tests that must fail. left: what the rules leave of the patch; installed: those of the
    modules that it adds which the box has. own: the agent's own box, if the tests are to run there, in which all of the
    agent's processes have ended; nothing is applied in it.
    """

    task: Task
    boot: Callable[[], Awaitable[Sandbox]]
    timeout_s: float
    rules: Rules
    second_opinion: bool
    left: ScreenedPatch = field(default_factory=lambda: ScreenedPatch([], (), ()))
    installed: list[str] | None = None
    own: Sandbox | None = None

    async def run(self, script: str, program: str = "", files: Sequence[FileDiff] | None = None) -> ExecResult:
        """Run a bash script in the work tree of a fresh box with the patch, and return how it ended.

        The script is not left in the box, and finds ``program`` in the variable ``rewriting``. files: these instead of
        the patch's. A script that takes longer than ``timeout_s`` is ended. Raises RefusedError and SandboxError.
        """
        async with self._fresh(files) as (box, left):
            return await _run(box, script, program, left, self.timeout_s)

    @asynccontextmanager
    async def patched(self) -> AsyncGenerator[Sandbox]:
        """Boot a fresh box with the patch, and close it at the end; the agent's own box is left to its episode.

        Raises RefusedError and SandboxError.
        """
        if self.own is not None:
            yield self.own
            return
        async with self._fresh(None) as (box, files):
            if files:
                await _run(box, "", "", files, self.timeout_s)
            yield box

    @asynccontextmanager
    async def _fresh(self, files: Sequence[FileDiff] | None) -> AsyncGenerator[tuple[Sandbox, Sequence[FileDiff]]]:
        box = await self.boot()
        try:
            if files is None:
                if self.left.modules:
                    if self.installed is None:
                        self.installed = await _installed(box, [*self.left.modules])
                    self.left = self.left.without(self.installed)
                files = self.left.files
                if not files and self.left.dropped:
                    raise RefusedError(Verdict(Reason.FORBIDDEN_PATH_ONLY, "the rules drop every file of the patch"))
            yield box, files
        finally:
            await _close(box)

    def alone(self, verdict: Verdict, why: str) -> Verdict:
        """Return the verdict on a task that is resolved, but without the second opinion that was asked for."""
        reason = Reason.NO_SECOND_OPINION if self.rules.needs_second_opinion else None
        shaped = verdict.shaped if reason is None else None
        flags = (*verdict.flags, second.NONE)
        return replace(verdict, reason=reason, detail=f"no second opinion: {why}", flags=flags, shaped=shaped)


async def _installed(box: Sandbox, names: list[str]) -> list[str]:
    """Return those of the modules that are installed in the box. Nothing of a patch is there yet."""
    run = await box.exec(["bash", "-c", _INSTALLED, "installed", *names], env={}, timeout_s=60)
    return [name for name in names if name in run.stdout.decode(errors="replace").splitlines()]


async def _close(box: Sandbox) -> None:
    """Close the box, but do not wait for ever: the verdict is known."""
    _, late = await asyncio.wait({asyncio.ensure_future(box.close())}, timeout=_CLOSE_S)
    if late:
        logger.warning("a grading box was still not closed after %.0f s", _CLOSE_S)


async def _run(box: Sandbox, script: str, program: str, files: Sequence[FileDiff], timeout_s: float) -> ExecResult:
    """Apply the patch without fuzz and run the script, which finds the program in a variable.

    Returns how the script ended. Raises RefusedError and SandboxError.
    """
    word, text, more = secrets.token_hex(), script.encode(), program.encode()
    apply = ["git", "apply", *APPLY] if files else []
    run = await box.exec(
        ["bash", "-c", _STAGES, "grading", word, str(len(text)), str(len(more)), *apply],
        env={},
        timeout_s=timeout_s,
        stdin=b"".join([text, more, *(file.data for file in files)]),
    )
    said = run.stderr[:TAIL].decode(errors="replace").strip()
    _, *stages = run.stdout.split(word.encode(), 2)
    if not stages:
        raise failed("exec_failed", f"the box did not take the patch and the tests: {said or run.returncode}")
    if len(stages) == 2:
        if files and not read_the_same(files, stages[0]):
            raise RefusedError(
                Verdict(Reason.PATCH_APPLY_FAILED, "git finds other files in the patch than the rules do")
            )
        return replace(run, stdout=stages[1])
    if run.returncode in (126, 127):
        raise SandboxError("no_git", "the box has no git to apply the patch with")
    if word.encode() in run.stderr:
        raise SandboxError("no_space", said.removesuffix(word))
    if run.timed_out or (run.returncode or 0) > 128:  # none of the policy's code has run, and its patch is small
        how = "was not done in time" if run.timed_out else f"was killed (signal {(run.returncode or 0) - 128})"
        raise SandboxError("exec_failed", f"git apply {how}: {said}")
    raise RefusedError(Verdict(Reason.PATCH_APPLY_FAILED, said))
