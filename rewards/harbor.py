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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewards.graders import Grader
from rewards.grading import TAIL, Grading
from rewards.task import Task, TaskError
from rewards.verdict import Reason, Verdict
from rollout.sandbox import RENEWED_CAP, ExecResult, Sandbox, SandboxError

SHARED, SEPARATE = MODES = ("shared", "separate")
READ = ("tests", "solution")
"""The directories of a task that are read when it is graded, and hashed."""

_MOST = 256 * 2**20  # bytes of them
_LOGS = {"verifier/": b"", "agent/": b"", "artifacts/": b""}
_SOLVE_S = 3600.0  # if the task does not say how long an agent may take
# What pytest and unittest say at the end: how many tests did what.
_PYTEST = re.compile(r"^=* ?((?:\d+ [a-z]+,? ?)+|no tests ran) in \d[\d.]*s\b", re.MULTILINE)
_UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n+OK(?: \(.*?\bskipped=(\d+).*\))?$", re.MULTILINE)


class Harbor(Grader):
    """It grades tasks in the format of Harbor 1.4. `rl.data.harbor` writes their rows."""

    renews = True

    def check(self, task: Task) -> None:
        """Raise TaskError if a key of `grading` is wrong, or if the task's directory is not what was converted."""
        asked = task.asked
        for name in ("directory", "sha256", "reward"):
            if not isinstance(asked.get(name), str):
                raise TaskError(f"{name} is {asked.get(name)!r}")
        for name in ("timeout_s", "threshold"):
            value = asked.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise TaskError(f"{name} is {value!r}")
        if asked.get("mode") not in MODES:
            raise TaskError(f"mode is {asked.get('mode')!r}; it must be one of {', '.join(MODES)}")
        if task.image.startswith("dir:"):
            raise TaskError("a Harbor task needs a container image, not a local snapshot")
        _files(task)

    def shares(self, task: Task) -> bool:
        """See Grader."""
        return task.asked["mode"] == SHARED

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
    if any(int(ran) == int(skipped or 0) for ran, skipped in _UNITTEST.findall(log)):
        return True
    try:
        summary = json.loads(ctrf or b"{}")["results"]["summary"]
        return summary["passed"] == 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _files(task: Task) -> dict[str, dict[str, bytes]]:
    """Return the contents of a task's tests and solution by relative paths. Raises TaskError if they have changed."""
    directory = task.directory
    assert directory is not None
    files = {name: read_tree(directory / name) for name in READ}
    if digest(files) != task.asked["sha256"]:
        what = "have changed since the task was converted" if files["tests"] else "are not there"
        raise TaskError(f"the tests in {directory} {what}; convert it again")
    return files


def read_tree(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory by relative paths; {} if it does not exist.

    Raises TaskError for what is neither a file nor a directory, and if it is all too large.
    """
    files, size = {}, 0
    for path in sorted(directory.rglob("*")):
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
