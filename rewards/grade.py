"""Grade one patch: apply what the rules leave of it in a fresh box, and run the hidden tests.

swebench judges the log of the tests. The policy's failures (no patch, one that does not apply, failing or endless
tests, a log that makes no sense) are unresolved. Only what the policy cannot cause is an infrastructure failure. In
particular, swebench's search of the log for signs of a broken environment is not used, because the tested code could
print such signs to escape a reward of 0.

The tests run in the same process as the code that they test, as in every SWE-bench set, so code that is written to
deceive its own test run can print test results. This module catches marker lines that the eval script did not print,
results that contradict the exit status of the test command or each other (`rewards.contradiction`), and an eval script
that was killed. `rewards.statuses` has what swebench leaves open. `rewards.second` asks whether the tests can fail at
all; `rewards.rules` keeps hooks of the test runner out and flags the rest; docs/rewards.md has the whole table.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from rewards import second, statuses
from rewards.contradiction import contradicted
from rewards.patch import APPLY, FileDiff, PatchError, read_the_same, split
from rewards.rules import DECIDES, Rules, ScreenedPatch
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
# Seconds for what a grading does besides applying the patch and running the tests: booting a box, reading the log.
_SPARE_S = 300.0
_CLOSE_S = 60.0  # seconds to wait until the box is closed
_TAIL = 4000  # characters of the log that the verdict keeps
_MOST_LINES = 1_000_000  # of a log that are parsed, which takes a minute at most; the rest is cut out of its middle
_RUNS = 6  # of the tests in one grading with a second opinion, at most: two patches, each three times
_NO_RULES = Rules()


async def grade(
    task: Task,
    patch: bytes | None,
    boot: Callable[[], Awaitable[Sandbox]],
    *,
    timeout_s: float,
    rules: Rules = _NO_RULES,
    second_opinion: bool = False,
    spare_s: float = _SPARE_S,
) -> Verdict:
    """Grade `patch` in a sandbox from `boot`, which must make a fresh one of the task's snapshot each time.

    An empty patch is unresolved at once. None runs the tests on the untouched snapshot, which shows whether they fail
    there. timeout_s: seconds for `git apply` and the eval script. rules: what of the patch is graded, and what is
    flagged. second_opinion: a task that is resolved is graded once more, with tests that must fail. spare_s: seconds
    for everything else; a grading that takes longer than both together (for each run of the tests) is GRADER_HUNG.
    Raises nothing except on cancellation, and always closes the sandbox.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout((spare_s + timeout_s) * (_RUNS if second_opinion else 1)) as deadline:
            verdict = await _screened(_Grading(task, boot, timeout_s, rules, second_opinion), patch)
    except SandboxError as error:
        verdict = Verdict.infra(error.cause, str(error))
    except Exception as error:  # a bug in the grader or in swebench must not become a reward of 0
        if deadline.expired():
            verdict = Verdict(Reason.GRADER_HUNG, f"no verdict after {time.monotonic() - started:.0f} s")
        else:
            verdict = Verdict(Reason.GRADER_CRASHED, f"{type(error).__name__}: {error}")
    return replace(verdict, seconds=time.monotonic() - started)


def warm_up() -> None:
    """Import swebench, which takes seconds; call this in a thread before the first grading."""
    _harness()


async def _screened(grading: _Grading, patch: bytes | None) -> Verdict:
    if patch is None:
        return await grading.verdict(ScreenedPatch([], (), ()))
    if not patch.strip():
        return Verdict(Reason.EMPTY_PATCH)
    try:
        found = await asyncio.to_thread(grading.rules.screen, grading.task, patch)
    except PatchError as error:
        return Verdict(Reason.PATCH_APPLY_FAILED, str(error))
    if found.files:
        verdict = await grading.verdict(found)
        found = grading.left
    else:
        verdict = Verdict(Reason.FORBIDDEN_PATH_ONLY, "the rules drop every file of the patch")
    verdict = replace(verdict, dropped=found.dropped, flags=tuple(sorted({*found.flags, *verdict.flags})))
    open_ = verdict.reason in (Reason.TESTS_FAILED, Reason.FORBIDDEN_PATH_ONLY, Reason.LOG_UNPARSABLE)
    if grading.second_opinion and found.unsure and open_:
        # The files may be a part of a solution. Nothing but a second opinion tells them from an attack.
        whole = await grading.verdict(replace(found, files=[*found.files, *found.unsure], modules={}))
        if whole.reason is None and not {second.NONE, second.PARTIAL}.intersection(whole.flags):
            kept = {path for file in found.unsure for path in file.paths}
            dropped = tuple(path for path in found.dropped if path not in kept)
            return replace(whole, dropped=dropped, flags=tuple(sorted({*found.flags, *whole.flags, DECIDES})))
    return verdict


@dataclass
class _Grading:
    """A grading runs the tests of one task, each time in a fresh box. left: what was graded of the last patch;
    installed: those of the modules that it adds which the box has."""

    task: Task
    boot: Callable[[], Awaitable[Sandbox]]
    timeout_s: float
    rules: Rules
    second_opinion: bool
    left: ScreenedPatch = field(default_factory=lambda: ScreenedPatch([], (), ()))
    installed: list[str] | None = None

    async def verdict(self, found: ScreenedPatch) -> Verdict:
        """Return the verdict on what the rules leave of a patch. Raises SandboxError."""
        self.left = found
        harness = await asyncio.to_thread(_harness)
        if self.task.log_parser not in harness.parsers:
            return Verdict(Reason.TASK_INVALID, f"swebench has no parser {self.task.log_parser!r}")
        spec = harness.make_test_spec(self.task.to_row())
        # swebench's markers go to stderr (they are lines of the shell's trace) and the results to stdout; in one
        # stream they stay in order.
        script = spec.eval_script.replace("\n", "\nexec 2>&1\n", 1)
        rewriting = second.Rewriting(self.task)
        if not self.second_opinion or not rewriting.possible:
            verdict = (await self._run(harness, spec, script, "")).verdict
            if verdict.reason is None and self.second_opinion:
                return self._alone(verdict, "the tests are no functions of Python files")
            return verdict
        script = rewriting.script(script)
        verdict = (await self._run(harness, spec, script, rewriting.program(wrong=False))).verdict
        if verdict.reason is not None:
            return verdict
        wrong = rewriting.program(wrong=True)
        run, gold = await self._run(harness, spec, script, wrong), None
        if rewriting.changed(run.log) and second.suspicious(rewriting, run) and self.task.patch:
            with contextlib.suppress(PatchError):  # a gold patch that cannot be read was never applied
                gold = await self._run(harness, spec, script, wrong, split(self.task.patch.encode()))
        disagrees, alone = second.compared(rewriting, run, gold)
        if disagrees or alone:
            return disagrees or self._alone(verdict, alone)
        return replace(verdict, flags=(second.PARTIAL,)) if rewriting.unchanged(run.log, gold) else verdict

    def _alone(self, verdict: Verdict, why: str) -> Verdict:
        reason = Reason.NO_SECOND_OPINION if self.rules.needs_second_opinion else None
        return replace(verdict, reason=reason, detail=f"no second opinion: {why}", flags=(second.NONE,))

    async def _run(
        self, harness: _Harness, spec: Any, script: str, program: str, files: list[FileDiff] | None = None
    ) -> second.SuiteRun:
        """Run the tests once, with these files instead of the patch's if there are any."""
        box = await self.boot()
        try:
            if files is None:
                if self.left.modules:
                    if self.installed is None:
                        self.installed = await _installed(box, [*self.left.modules])
                    self.left = self.left.without(self.installed)
                files = self.left.files
                if not files and self.left.dropped:
                    verdict = Verdict(Reason.FORBIDDEN_PATH_ONLY, "the rules drop every file of the patch")
                    return second.SuiteRun(verdict, "", ())
            run = await _run(box, script, program, files, self.timeout_s)
        finally:
            await _close(box)
        if isinstance(run, Verdict):
            return second.SuiteRun(run, "", ())
        log = run.stdout.decode(errors="replace")
        verdict, passed = await asyncio.to_thread(
            _judge, harness, spec, script, run, log, self.timeout_s, self.task.not_passing
        )
        return second.SuiteRun(verdict, log, passed)


async def _installed(box: Sandbox, names: list[str]) -> list[str]:
    """Return those of the modules that are installed in the box. Nothing of a patch is there yet."""
    run = await box.exec(["bash", "-c", _INSTALLED, "installed", *names], env={}, timeout_s=60)
    return [name for name in names if name in run.stdout.decode(errors="replace").splitlines()]


async def _close(box: Sandbox) -> None:
    """Close the box, but do not wait for ever: the verdict is known."""
    _, late = await asyncio.wait({asyncio.ensure_future(box.close())}, timeout=_CLOSE_S)
    if late:
        logger.warning("a grading box was still not closed after %.0f s", _CLOSE_S)


async def _run(
    box: Sandbox, script: str, program: str, files: list[FileDiff], timeout_s: float
) -> ExecResult | Verdict:
    """Apply the patch without fuzz and run the eval script, which finds the program in a variable.

    Returns how the script ended, or a verdict if the patch is refused. Raises SandboxError.
    """
    word, text, more = secrets.token_hex(), script.encode(), program.encode()
    apply = ["git", "apply", *APPLY] if files else []
    run = await box.exec(
        ["bash", "-c", _STAGES, "grading", word, str(len(text)), str(len(more)), *apply],
        env={},
        timeout_s=timeout_s,
        stdin=b"".join([text, more, *(file.data for file in files)]),
    )
    said = run.stderr[:_TAIL].decode(errors="replace").strip()
    _, *stages = run.stdout.split(word.encode(), 2)
    if not stages:
        raise failed("exec_failed", f"the box did not take the patch and the tests: {said or run.returncode}")
    if len(stages) == 2:
        if files and not read_the_same(files, stages[0]):
            return Verdict(Reason.PATCH_APPLY_FAILED, "git finds other files in the patch than the rules do")
        return replace(run, stdout=stages[1])
    if run.returncode in (126, 127):
        raise SandboxError("no_git", "the box has no git to apply the patch with")
    if word.encode() in run.stderr:
        raise SandboxError("no_space", said.removesuffix(word))
    if run.timed_out or (run.returncode or 0) > 128:  # none of the policy's code has run, and its patch is small
        how = "was not done in time" if run.timed_out else f"was killed (signal {(run.returncode or 0) - 128})"
        raise SandboxError("exec_failed", f"git apply {how}: {said}")
    return Verdict(Reason.PATCH_APPLY_FAILED, said)


def _judge(
    harness: _Harness,
    spec: Any,
    script: str,
    run: ExecResult,
    log: str,
    timeout_s: float,
    not_passing: Collection[str] | None,
) -> tuple[Verdict, set[str]]:
    """Return the verdict on a log, and the tests in it that did not fail."""
    tail = log[-_TAIL:]
    if run.timed_out:
        return Verdict(Reason.TEST_TIMEOUT, f"the tests did not end within {timeout_s:.0f} s", log_tail=tail), set()
    if (run.returncode or 0) > 128:  # 128 itself is a status of git, which may be the script's last command
        detail = f"the eval script was killed (signal {(run.returncode or 0) - 128})"
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail), set()
    for marker in harness.markers:
        if log.count(marker) > _prints(script, marker):
            detail = f"the eval script does not print {marker!r} so often"
            return Verdict(Reason.LOG_FORGED, detail, log_tail=tail), set()
    log = statuses.shortened(log, _MOST_LINES)
    expected = (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS)
    parse = functools.partial(harness.parsers[spec.log_parser], test_spec=spec)
    if torn := contradicted(log, expected, parse):
        return Verdict(Reason.RESULTS_DISAGREE, f"{torn} failed and passed", log_tail=tail), set()
    with tempfile.NamedTemporaryFile("w", suffix=".log", errors="replace") as file:
        file.write(log)
        file.flush()
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": "-"}
        report = harness.get_eval_report(spec, prediction, file.name, True)[spec.instance_id]
        found, _ = harness.get_logs_eval(spec, file.name)
    if not report["patch_successfully_applied"]:  # swebench's name for "the log has test results"
        detail = "the log was cut at the output limit" if run.truncated else ""
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail), set()
    tests = {name: report["tests_status"][name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    passed = {name for name, status in found.items() if status == "PASSED"}
    odd: list[str] = []
    if spec.eval_type == "pass_and_fail":
        tests, odd = statuses.without_skipped(tests, passed, not_passing)
    passed = {name for name, status in found.items() if status not in ("FAILED", "ERROR")}
    verdict = Verdict(None, tests=tests, log_tail=tail, not_passing=odd)
    if report["resolved"] and not any(kind["failure"] for kind in tests.values()):
        if spec.eval_type == "pass_and_fail" or statuses.something_passed(log):
            return verdict, passed
        return replace(verdict, reason=Reason.TESTS_FAILED, detail="no test passed: all were skipped"), passed
    failed = sum(len(kind["failure"]) for kind in tests.values())
    total = failed + sum(len(kind["success"]) for kind in tests.values())
    return replace(verdict, reason=Reason.TESTS_FAILED, detail=f"{failed} of {total} tests failed"), passed


def _prints(script: str, marker: str) -> int:
    """Count how often an honest run prints the marker: once for each line that has it if the script is traced (set -x),
    and once more for each `echo` of it."""
    traced = re.search(r"^set -[a-z]*x", script, re.MULTILINE) is not None
    lines = [line.strip() for line in script.splitlines() if marker in line]
    return sum(traced + line.startswith("echo") for line in lines)


class _Harness:
    """This holds the parts of swebench that are used here; importing it takes seconds."""

    def __init__(self) -> None:
        from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT, TEST_EXIT_CODE
        from swebench.harness.grading import get_eval_report, get_logs_eval
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.harness.utils import make_test_spec

        self.markers = (START_TEST_OUTPUT, END_TEST_OUTPUT, TEST_EXIT_CODE)
        self.parsers = PARSER_REGISTRY
        self.get_eval_report, self.get_logs_eval = get_eval_report, get_logs_eval
        self.make_test_spec = make_test_spec


@functools.cache
def _harness() -> _Harness:
    return _Harness()
