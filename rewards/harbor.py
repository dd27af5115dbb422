"""The grader of Harbor tasks: it runs a task's tests/test.sh and reads the reward that this leaves in /logs/verifier.

A row names the task's directory and a hash of what is read in it. The tests get into a box when all of the agent's
processes have ended: into a fresh one with its patch (`separate`), or into its own one (`shared`). /tests and /logs are
made anew from outside before, and the reward is read from outside when test.sh and all that it started have ended.

In the agent's own box, whatever it has left there takes part in the tests, the shell included, so it can forge a reward
(docs/rewards.md). But it cannot make an infrastructure failure: if tests do not run there, twice, and a fresh box
works, that is the policy's doing. So is a missing or unreadable reward: the policy's code ran beside the verifier.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewards.graders import Grader
from rewards.grading import TAIL, Grading
from rewards.rules import Rules
from rewards.task import Task, TaskError
from rewards.verdict import Reason, Verdict
from rollout.sandbox import RENEWED_CAP, ExecResult, Sandbox, SandboxError

SHARED, SEPARATE = MODES = ("shared", "separate")
READ = ("tests", "solution", "steps")
"""The directories of a task that are read when it is graded, and hashed."""

_MOST = 256 * 2**20  # bytes of them
_LOGS = {"verifier/": b"", "agent/": b"", "artifacts/": b""}
_REWARDED = (None, Reason.TESTS_FAILED, Reason.EMPTY_PATCH, Reason.FORBIDDEN_PATH_ONLY, Reason.NOT_GRADED)
_SOLVE_S = 3600.0  # if the task does not say how long an agent may take
# What pytest and unittest say at the end: how many tests did what.
_PYTEST = re.compile(r"^=* ?((?:\d+ [a-z]+,? ?)+|no tests ran) in \d[\d.]*s\b", re.MULTILINE)
_UNITTEST = re.compile(r"^Ran (\d{1,9}) tests? in .*\n+OK(?: \(([^()\n]{0,200})\))?$", re.MULTILINE)
_SKIPPED = re.compile(r"\bskipped=(\d{1,9})")


class Harbor(Grader):
    """It grades tasks in the format of Harbor 1.4. `rl.data.harbor` writes their rows."""

    renews = True

    def check(self, task: Task) -> None:
        """Raise TaskError if a key of `grading` is wrong, or if the task's directory is not what was converted."""
        asked = task.asked
        for name in ("directory", "sha256", "reward"):
            if not isinstance(asked.get(name), str):
                raise TaskError(f"{name} is {asked.get(name)!r}")
        steps = asked.get("steps") or []
        if not isinstance(steps, list) or not all(isinstance(one, dict) and _named(one) for one in steps):
            raise TaskError("its steps are no list of objects with a name and a statement")
        for one in (asked, *({**asked, **step} for step in steps)):
            numbers = {name: one.get(name) for name in ("timeout_s", "threshold")}
            for name, value in (numbers | {"min_reward": one.get("min_reward") or 1}).items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                    raise TaskError(f"{name} is {value!r}")
            drop = one.get("drop") or []
            if not isinstance(drop, list) or not all(isinstance(it, str) and "[" not in it for it in drop):
                raise TaskError(f"drop is {drop!r}")
        if asked.get("mode") not in MODES:
            raise TaskError(f"mode is {asked.get('mode')!r}; it must be one of {', '.join(MODES)}")
        if steps and asked["mode"] == SHARED:
            raise TaskError("its steps cannot be graded in the agent's own box")
        if task.image.startswith("dir:"):
            raise TaskError("a Harbor task needs a container image, not a local snapshot")
        _files(task)

    def shares(self, task: Task) -> bool:
        """See Grader."""
        return task.asked["mode"] == SHARED

    def steps(self, task: Task) -> Sequence[Task]:
        """See Grader. A row has of each step what differs from the whole task."""
        asked = task.asked
        return [
            replace(task, problem_statement=one["statement"], grading=json.dumps({**asked, **one, "steps": None}))
            for one in asked.get("steps") or ()
        ] or [task]

    def goes_on(self, step: Task, verdict: Verdict) -> bool:
        """Return whether a step has a reward, as it has after any run of Harbor's verifier, and at least min_reward."""
        least = step.asked.get("min_reward")
        return verdict.reason in _REWARDED and (least is None or verdict.reward is None or verdict.reward >= least)

    def together(self, task: Task, verdicts: Sequence[Verdict]) -> Verdict:
        """Return the mean of the rewards of the steps that were played, or the last one of them, as Harbor does.

        Steps without a reward, which Harbor leaves out, have 0. Only a task whose steps were all played is resolved.
        """
        asked, last = task.asked, verdicts[-1]
        steps, rewards = asked.get("steps") or (), [one.reward or 0.0 for one in verdicts]
        if not steps or last.reason is Reason.NOT_GRADED:
            return last
        reward = last.reward or 0.0 if asked.get("strategy") == "final" else sum(rewards) / len(rewards)
        resolved = len(rewards) == len(steps) and reward >= asked["threshold"]
        failed = [one for one in verdicts if one.reason is not None]
        said = "; ".join(f"{one['name']}: {it.detail or it.reason}" for one, it in zip(steps, verdicts, strict=False))
        return replace(
            failed[-1] if failed else last,
            reason=None if resolved else failed[-1].reason if failed else Reason.TESTS_FAILED,
            detail=f"reward {reward:g} of {len(rewards)} of {len(steps)} steps ({said})",
            shaped=None if reward == float(resolved) else reward,
            dropped=tuple(sorted({path for one in verdicts for path in one.dropped})),
            flags=tuple(sorted({flag for one in verdicts for flag in one.flags})),
            seconds=sum(one.seconds for one in verdicts),
        )

    def timeout_s(self, task: Task, given: float) -> float:
        """Return the task's own limit for its tests."""
        return task.asked["timeout_s"]

    def solvable(self, task: Task) -> bool:
        """Return whether the task has a solution/solve.sh."""
        return bool(task.asked.get("solution"))

    async def solve(self, task: Task, box: Sandbox) -> None:
        """Run solution/solve.sh as an agent would run it. How it ends does not matter."""
        files, asked = await asyncio.to_thread(_files, task), task.asked
        await box.renew("/solution", files["solution"])
        await box.renew("/logs", _LOGS)
        limit = asked.get("agent_timeout_s") or _SOLVE_S
        await box.exec(["bash", "-c", "/solution/solve.sh"], env=asked.get("solution_env") or {}, timeout_s=limit)

    async def judge(self, grading: Grading) -> Verdict:
        """See Grader."""
        try:
            files = await asyncio.to_thread(_files, grading.task)
        except TaskError as error:
            return Verdict(Reason.TASK_INVALID, str(error))
        grading.left = grading.left.dropping(Rules(grading.task.asked.get("drop") or ()))
        async with grading.patched() as box:
            if grading.own is None:
                return await _tested(grading, box, files["tests"])
            return await _tested_beside_the_agent(grading, box, files["tests"])


async def _tested(grading: Grading, box: Sandbox, tests: Mapping[str, bytes]) -> Verdict:
    """Return the verdict of the tests in a box. Raises SandboxError."""
    asked = grading.task.asked
    await box.renew("/tests", tests)
    await box.renew("/logs", _LOGS)
    run = await box.exec(["bash", "-c", "/tests/test.sh 2>&1"], env=asked.get("env") or {}, timeout_s=grading.timeout_s)
    return await _verdict(box, run, asked, grading.timeout_s)


async def _tested_beside_the_agent(grading: Grading, box: Sandbox, tests: Mapping[str, bytes]) -> Verdict:
    """Return the verdict of the tests in the agent's own box, which it may have broken. Raises SandboxError.

    It cannot remove its box or stop the container engine; whatever else it can do fails again, but not in a fresh box.
    """
    said = ""
    for _ in range(2):
        try:
            return await _tested(grading, box, tests)
        except SandboxError as error:
            said = str(error)
    try:
        await box.renew("/logs", _LOGS)  # no program of the box has a part in this
    except SandboxError as error:
        if error.cause != "no_space":
            raise
    fresh = await grading.boot()
    try:
        await fresh.exec(["bash", "-c", "true"], env={}, timeout_s=60)
        await fresh.put(f"{fresh.tmpdir}/space", bytes(1 << 16))
    finally:
        await fresh.close()
    return Verdict(Reason.LOG_UNPARSABLE, f"no tests run in the box as the agent has left it: {said}")


async def _verdict(box: Sandbox, run: ExecResult, asked: Mapping[str, Any], timeout_s: float) -> Verdict:
    log = run.stdout.decode(errors="replace")
    tail = log[-TAIL:]
    if run.timed_out:
        return Verdict(Reason.TEST_TIMEOUT, f"the tests did not end within {timeout_s:.0f} s", log_tail=tail)
    if (run.returncode or 0) > 128:
        detail = f"test.sh was killed, or ended as if it were (exit status {run.returncode})"
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail)
    found: dict[str, float] = {}
    try:
        for name in ("reward.json", "reward.txt"):
            data = await _read(box, name)
            if data is not None:
                found[name] = reward_in(name, data, asked["reward"])
    except ValueError as error:
        return Verdict(Reason.LOG_UNPARSABLE, str(error), log_tail=tail)
    if not found:
        detail = f"the tests left no reward in /logs/verifier (exit status {run.returncode})"
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail)
    if len({*found.values()}) > 1:  # test.sh writes one of them
        detail = "; ".join(f"{name} says {value:g}" for name, value in found.items())
        return Verdict(Reason.RESULTS_DISAGREE, detail, log_tail=tail)
    reward = next(iter(found.values()))
    resolved = reward >= asked["threshold"]
    if resolved and nothing_passed(log, await _read(box, "ctrf.json")):
        return Verdict(Reason.TESTS_FAILED, "no test passed: all were skipped", log_tail=tail)
    shaped = None if reward == float(resolved) else reward
    return Verdict(None if resolved else Reason.TESTS_FAILED, f"reward {reward:g}", log_tail=tail, shaped=shaped)


async def _read(box: Sandbox, name: str) -> bytes | None:
    try:
        return await box.get(f"/logs/verifier/{name}")
    except FileNotFoundError:
        return None


def reward_in(name: str, data: bytes, key: str) -> float:
    """Return the reward in a file, reward.txt or reward.json, of which `key` counts. Raises ValueError: it has none."""
    if len(data) >= RENEWED_CAP:
        raise ValueError(f"{name} is too large")
    try:
        if name == "reward.txt":
            values = {"reward": float(data.decode())}
        else:
            values = json.loads(data)
            if not isinstance(values, dict):
                raise ValueError("no object")
            values = {one: float(it) if isinstance(it, int | float) else math.nan for one, it in values.items()}
        if not all(math.isfinite(value) for value in values.values()):
            raise ValueError("not all values are numbers")
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {str(error)[:200]}") from error
    if key not in values:
        raise ValueError(f"{name} has no {key!r}")
    if not 0 <= values[key] <= 1:
        raise ValueError(f"{name}: {values[key]:g} is not between 0 and 1")
    return values[key]


def nothing_passed(log: str, ctrf: bytes | None = None) -> bool:
    """Tell whether a run of tests says that none of them passed. Of an unknown runner's log that cannot be told.

    ctrf: a report in the Common Test Report Format, if there is one.
    """
    said = _PYTEST.findall(log)
    if said and not any("passed" in one for one in said):
        return True
    if any(int(ran) == sum(map(int, _SKIPPED.findall(rest))) for ran, rest in _UNITTEST.findall(log)):
        return True
    try:
        summary = json.loads(ctrf or b"{}")["results"]["summary"]
        return summary["passed"] == 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _named(step: Mapping[str, Any]) -> bool:
    """Tell whether a step has a statement, and a name that is one of a directory."""
    name, statement = step.get("name"), step.get("statement")
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and isinstance(statement, str)


def _files(task: Task) -> dict[str, dict[str, bytes]]:
    """Return the contents of a task's tests and solution by relative paths. Raises TaskError if they have changed.

    A step's tests are the task's with its own over them; its solution, if it has one, stands in place of the task's.
    """
    directory = task.directory
    assert directory is not None
    files = {name: read_tree(directory / name) for name in READ}
    if digest(files) != task.asked["sha256"]:
        what = "have changed since the task was converted" if any(files.values()) else "are not there"
        raise TaskError(f"the tests in {directory} {what}; convert it again")
    own = within(files["steps"], task.asked.get("name") or "")
    tests = {**files["tests"], **within(own, "tests")}
    return {"tests": tests, "solution": within(own, "solution") or files["solution"]}


def within(files: Mapping[str, bytes], directory: str) -> dict[str, bytes]:
    """Return those of the files that are in a directory, by their paths in there."""
    return {path.removeprefix(start): data for path, data in files.items() if path.startswith(start := f"{directory}/")}


def read_tree(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory by relative paths; {} if it does not exist.

    Raises TaskError for what is neither a file nor a directory, and if it is all too large.
    """
    files, size = {}, 0
    for path in [directory] if directory.is_symlink() else sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise TaskError(f"{path} is neither a file nor a directory")
        if path.is_file():
            size += path.stat().st_size
            if size > _MOST:
                raise TaskError(f"{directory} has more than {_MOST >> 20} MiB")
            files[path.relative_to(directory).as_posix()] = path.read_bytes()
    return files


def digest(files: Mapping[str, Mapping[str, bytes]]) -> str:
    """Return the SHA-256 of directories of files: of their names, and of the names and contents of their files."""
    whole = hashlib.sha256()
    for name, tree in files.items():
        for path, data in tree.items():
            whole.update(json.dumps([name, path, hashlib.sha256(data).hexdigest()]).encode())
    return whole.hexdigest()
