"""Run a package's tests in boxes, and read what they did.

The code of a package and of its tests is hostile: it runs in bubblewrap's boxes only, which have no network and see
the package's own tree and environment. What comes back is checked before it is used.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.data.make.environment import PYTHON, VENV
from rl.data.make.sources import MakeError
from rollout.sandbox import WORKDIR, Limits, SandboxError
from rollout.sandbox.local.box import LocalSandbox, boot_local

PYTEST = f"{PYTHON} -m pytest --rootdir=. -o addopts= -p no:cacheprovider"
"""How the tests are run: by the package's settings, without its options, which may need plugins or run other tests."""

_LIMITS = Limits(disk_bytes=2**30, file_bytes=128 * 2**20)
_TOOLS = "/tools"
_TEXT = 4000


@dataclass(frozen=True)
class Failure:
    """A failure is how one test failed.

    type, message: of the exception. frames: (file, line, function) in the work tree, the test's first. values: texts
    of the test's own variables that are literals.
    """

    test: str
    when: str
    type: str
    message: str
    frames: tuple[tuple[str, int, str], ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteResult:
    """This is what the tests did. tests: passed, failed or other, by name. broken: what could not be collected.

    lines: bits of the tests (in the order of `tests`) that run a line, by file and line. seconds: of the whole box.
    calls: (file, function, call, result) of watched functions, the last two as source. reasons: why tests did not pass.
    """

    tests: Mapping[str, str]
    failures: tuple[Failure, ...]
    broken: tuple[tuple[str, str], ...]
    lines: Mapping[str, Mapping[int, int]]
    seconds: float
    calls: tuple[tuple[str, str, str, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> frozenset[str]:
        """Return the names of the tests that failed."""
        return frozenset(test for test, outcome in self.tests.items() if outcome == "failed")


class NoResultError(Exception):
    """The tests came to no result: they hung, were killed, or could not start. The message says which."""


class Bench:
    """A bench runs tests on variants of one tree.

    tree: the package's source, with an empty directory where the environment goes. venv: the environment.
    """

    def __init__(self, tree: Path, venv: Path) -> None:
        self._tree = tree
        coverage = importlib.util.find_spec("coverage")
        if coverage is None or not coverage.submodule_search_locations:
            raise MakeError("the package coverage is not installed; run make setup")
        self._binds = {
            venv: f"{WORKDIR}/{VENV}",
            Path(__file__).with_name("recorder.py"): f"{_TOOLS}/rl_make_recorder.py",
            Path(coverage.submodule_search_locations[0]): f"{_TOOLS}/coverage",
        }

    async def boot(self, changed: Mapping[str, str]) -> LocalSandbox:
        """Return a box with the tree and these files of it changed. Raises SandboxError; MakeError without bwrap."""
        try:
            box = await boot_local(self._tree, isolation="bwrap", limits=_LIMITS, binds=self._binds)
        except SandboxError as error:
            if error.cause == "no_bwrap":
                raise MakeError(f"other people's tests run in boxes only: {error}") from error
            raise
        try:
            for path, text in changed.items():
                await box.put(path, text.encode())
        except BaseException:
            await box.close()
            raise
        return box

    async def tests(
        self,
        changed: Mapping[str, str],
        *,
        timeout_s: float,
        only: Sequence[str] | None = None,
        sources: Sequence[str] = (),
        calls: Mapping[str, Sequence[str]] | None = None,
        most: int = 0,
    ) -> SuiteResult:
        """Run the tests on the tree with these files changed.

        only: the names of the tests; None runs all. sources: files whose lines are recorded. calls: functions whose
        calls are recorded, by file. most: stop after so many failures, 0 for no limit. Raises NoResultError,
        SandboxError, MakeError.
        """
        box = await self.boot(changed)
        try:
            plan = {"only": only, "sources": sources, "calls": calls}
            await box.put(f"{box.tmpdir}/plan.json", json.dumps(plan).encode())
            paths = sorted({name.partition("::")[0] for name in only or ()})
            options = ["-p", "rl_make_recorder", "-q", "--tb=no", "--no-header", "--continue-on-collection-errors"]
            done = await box.exec(
                ["/bin/sh", "-c", f"exec {PYTEST} {shlex.join([*options, f'--maxfail={most}', *paths])}"],
                env={"PYTHONPATH": _TOOLS, "PYTHONDONTWRITEBYTECODE": "1"},
                timeout_s=timeout_s,
                output_cap=2**16,
            )
            if done.timed_out:
                raise NoResultError(f"no end within {timeout_s:.0f} s")
            try:
                content = await box.get(f"{box.tmpdir}/result.json")
                return _checked(json.loads(content), done.wall_s)
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                said = (done.stderr or done.stdout)[-_TEXT:].decode(errors="replace").strip().split("\n")
                raise NoResultError(f"exit status {done.returncode}: {said[-1][:300]}") from None
        finally:
            await box.close()

    async def scripts(self, changed: Mapping[str, str], programs: Sequence[str], *, timeout_s: float) -> list[str]:
        """Return what Python programs print in the tree with these files changed, "" for one that does not end."""
        box = await self.boot(changed)
        said = []
        try:
            env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
            for program in programs:
                one = await box.exec(
                    [PYTHON, "-"], env=env, timeout_s=timeout_s, stdin=program.encode(), output_cap=2**16
                )
                said.append("" if one.timed_out or one.returncode else one.stdout.decode(errors="replace"))
        finally:
            await box.close()
        return said


def _checked(result: Any, seconds: float) -> SuiteResult:
    """Return a result that a box has written, with every value of the right type. Raises what wrong ones raise."""
    tests = {_name(test): _one_of(outcome) for test, outcome in result["tests"].items()}
    failures = tuple(
        Failure(
            test=_name(one["test"]),
            when=_name(one["when"]),
            type=_name(one["type"]),
            message=_name(one["message"]),
            frames=tuple((_name(path), int(line), _name(function)) for path, line, function in one["frames"]),
            values={_name(name): _name(text) for name, text in one["values"].items()},
        )
        for one in result["failures"]
    )
    broken = tuple((_name(where), _name(why)) for where, why in result["broken"])
    lines = {
        _name(path): {int(line): int(bits, 16) for line, bits in found.items()}
        for path, found in result["lines"].items()
    }
    calls = tuple((_name(path), _name(name), _name(call), _name(said)) for path, name, call, said in result["calls"])
    reasons = {_name(test): _name(why) for test, why in result["reasons"].items()}
    return SuiteResult(tests, failures, broken, lines, seconds, calls, reasons)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__}, not text")
    return value[:_TEXT].replace("\0", "").encode(errors="backslashreplace").decode()


def _one_of(outcome: Any) -> str:
    if outcome not in ("passed", "failed", "other"):
        raise ValueError("no outcome of a test")
    return outcome


def slow(seconds: float) -> float:
    """Return how many seconds tests may take that took ``seconds`` before."""
    return 20 + 5 * seconds
