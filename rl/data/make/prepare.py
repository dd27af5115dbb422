"""Prepare a package once: its source, its environment, and what its tests do without any bug.

The result is a directory that appears whole or not at all, so that a command that was killed does not begin anew.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.make import environment, sources
from rl.data.make.edits import Edit
from rl.data.make.runs import Bench, NoResultError, SuiteResult
from rl.data.make.sources import MakeError, Package
from rollout import files

SUITE_S = 900.0
"""How long a package's whole suite may take, in seconds."""

_RUNS = 3  # of the untouched tree; a test with different outcomes is left out
_FORMAT = 2  # of what is kept


@dataclass(frozen=True)
class PreparedPackage:
    """A PreparedPackage is one from which tasks can be made.

    venv: its environment. order: its tests, in the order of the bits of `lines`. stable: those that passed each time.
    flaky: those with different outcomes. lines: bits of stable tests that run a line, by file and line. seconds: of
    one run of all tests. broken: what could not be collected, and why. unused: how many tests do not pass each time, by
    reason. versions: of the environment, by name.
    """

    package: Package
    venv: Path
    order: tuple[str, ...]
    stable: frozenset[str]
    flaky: tuple[str, ...]
    lines: dict[str, dict[int, int]]
    seconds: float
    broken: tuple[tuple[str, str], ...]
    unused: dict[str, int]
    versions: dict[str, str]

    def names(self, bits: int) -> list[str]:
        """Return the tests of these bits."""
        return [test for number, test in enumerate(self.order) if bits >> number & 1]

    def running(self, edit: Edit) -> int:
        """Return the bits of the stable tests that run the lines of an edit, or those beside what it inserts."""
        bits = 0
        for one in edit:
            for line in range(one.start + (one.end > one.start), one.end + 1 + (one.end == one.start)):
                bits |= self.lines.get(one.path, {}).get(line, 0)
        return bits


def prepare(
    spec: str,
    directory: Path,
    requires: Sequence[str] = (),
    copies: bool = False,
    tell: Callable[..., object] = lambda what, done=None, total=None: None,
) -> PreparedPackage:
    """Fetch a package, make its environment and run its tests; or read what an earlier call has left in `directory`.

    spec: NAME==VERSION, or the path of a source distribution. requires: what its tests need besides what it declares.
    copies: accept a package although a local box would show another copy of it. tell: is called with what is done now,
    and how far it is. Raises MakeError, SandboxError.
    """

    def check(package: Package, *places: Path) -> None:
        found = [] if copies else [copy for place in places for copy in environment.copies(package, place)]
        if found:
            raise MakeError(
                f"{package.name}: a local box would show an agent {len(found)} copies of its code, such as {found[0]}; "
                "choose another package, or --allow-copies for boxes without them"
            )

    tell("fetching it")
    archive, sha256 = sources.fetch(spec, directory / "sdists")
    home = directory / archive.name.removesuffix(".tar.gz")
    key = {"format": _FORMAT, "sha256": sha256, "requires": list(requires), "python": sys.version.split()[0]}
    key["base"] = sys.base_prefix
    try:
        kept = json.loads((home / "baseline.json").read_text())
    except (OSError, ValueError):
        kept = {}
    if kept.get("key") != key:
        building = home.with_name(f".{home.name}.new")
        shutil.rmtree(building, ignore_errors=True)
        sources.unpack(archive, building / "tree")
        package = sources.read(building / "tree", sha256, requires)
        check(package, *environment.BASES)  # before what takes minutes
        tell("installing what its tests need")
        versions = environment.build(package, building / "venv")
        check(package, building / "venv")
        (building / "tree" / environment.VENV).mkdir()
        measured = {"key": key, "versions": versions, **_measured(package, building, tell)}
        files.write(building / "baseline.json", json.dumps(measured))
        shutil.rmtree(home, ignore_errors=True)
        building.rename(home)
        kept = measured
    package = sources.read(home / "tree", sha256, requires)
    check(package, *environment.BASES, home / "venv")
    return _read(package, home, kept)


def _measured(package: Package, directory: Path, tell: Callable[..., object]) -> dict[str, Any]:
    """Run the tests of the untouched tree and return what is to be kept of it. Raises MakeError, SandboxError."""
    own = package.sources()

    async def runs() -> list[SuiteResult]:
        bench = Bench(directory / "tree", directory / "venv")
        done: list[SuiteResult] = []
        while len(done) < _RUNS:
            tell("running its tests", len(done), _RUNS)
            done.append(await bench.tests({}, timeout_s=SUITE_S, sources=[] if done else own))
        return done

    label = f"{package.name}=={package.version}"
    try:
        found = asyncio.run(runs())
    except NoResultError as error:
        raise MakeError(f"{label}: its tests come to no result: {error}") from None
    first = found[0]
    outcomes = {test: Counter(run.tests.get(test, "missing") for run in found) for run in found for test in run.tests}
    stable = [test for test, seen in outcomes.items() if seen["passed"] == _RUNS and test in first.tests]
    if not stable:
        raise MakeError(f"{label}: {_no_test(first)}")
    if not any(first.lines.values()):
        raise MakeError(f"{label}: its tests run no line of {', '.join(own[:3]) or 'it'}; there is nothing to break")
    unused = Counter(
        "not the same outcome each time" if len(seen) > 1 else first.reasons.get(test, *seen)
        for test, seen in outcomes.items()
        if seen["passed"] != _RUNS
    )
    return {
        "order": list(first.tests),
        "stable": stable,
        "flaky": sorted(test for test, seen in outcomes.items() if len(seen) > 1),
        "lines": {path: {line: f"{bits:x}" for line, bits in lines.items()} for path, lines in first.lines.items()},
        "seconds": round(max(run.seconds for run in found), 2),
        "broken": first.broken,
        "unused": dict(unused.most_common()),
    }


def _no_test(run: SuiteResult) -> str:
    """Return why no test of a package can be used, and what to do."""
    said = [why.strip().splitlines()[-1] for _, why in run.broken if why.strip()]
    reasons = Counter([*said, *run.reasons.values()])
    if missing := sorted(set(re.findall(r"No module named '([\w.]+)'", "\n".join(reasons)))):
        return f"its tests need {', '.join(missing)}; name the packages that have them with --requires"
    if not reasons:
        return "pytest finds no test in its source distribution; choose another package"
    worst = ", ".join(f"{why} ({count} times)" for why, count in reasons.most_common(2))
    return f"none of its {len(run.tests)} tests passes each time: {worst}; choose another package"


def _read(package: Package, home: Path, kept: dict[str, Any]) -> PreparedPackage:
    stable = frozenset(kept["stable"])
    usable = sum(1 << number for number, test in enumerate(kept["order"]) if test in stable)
    return PreparedPackage(
        package=package,
        venv=home / "venv",
        order=tuple(kept["order"]),
        stable=stable,
        flaky=tuple(kept["flaky"]),
        lines={
            path: {int(line): int(bits, 16) & usable for line, bits in lines.items()}
            for path, lines in kept["lines"].items()
        },
        seconds=kept["seconds"],
        broken=tuple((where, why) for where, why in kept["broken"]),
        unused=kept["unused"],
        versions=kept["versions"],
    )
