"""This plugin of pytest writes what each test costs in CPU seconds, with everything that it starts, daemons included.

    .venv/bin/python -m pytest -p tests.cpu_seconds --cpu-seconds=FILE ...
    .venv/bin/python tests/cpu_seconds.py FILE [20]     # the dearest tests and the dearest files

As root, each worker of pytest-xdist goes into a cgroup of its own (version 1 or 2), which children inherit, and whose
counter has the time of those that have ended, too. Containers are not in it: an engine's daemon starts them. For others
than root, what no process has waited for is missing.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

_V1 = Path("/sys/fs/cgroup/cpuacct")
_V2 = Path("/sys/fs/cgroup")
WORKER = "(a worker's start and end)"


class Group:
    """This is a cgroup with this process in it."""

    def __init__(self) -> None:
        self.place = (_V1 if _V1.exists() else _V2) / f"pytest-{os.getpid()}"
        self.place.mkdir()
        (self.place / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Return the CPU seconds of all that was ever in it."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.place / "cpuacct.usage").read_text()) / 1e9
        return int((self.place / "cpu.stat").read_text().split()[1]) / 1e6

    def leave(self) -> None:
        """Leave it; it goes when it is empty."""
        (self.place.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self.place.rmdir()


class _Children:
    def seconds(self) -> float:
        """Return the CPU seconds of this process and of those that were waited for."""
        return sum(os.times()[:4])

    def leave(self) -> None:
        pass


class _Costs:
    def __init__(self, file: str) -> None:
        self.file, self.tests, self.first = file, 0.0, sum(os.times()[:4])
        try:
            self.group: Group | _Children = Group()
        except OSError:
            self.group, self.first = _Children(), 0.0

    def write(self, test: str, cpu: float, wall: float) -> None:
        with open(self.file, "a") as out:
            out.write(json.dumps({"test": test, "cpu": round(cpu, 2), "wall": round(wall, 2)}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Append a line for the test, with its fixtures: those of a module are paid by its first test."""
        before, began = self.group.seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            spent = self.group.seconds() - before
            self.tests += spent
            self.write(item.nodeid, spent, time.monotonic() - began)

    def pytest_unconfigure(self) -> None:
        self.write(WORKER, self.first + self.group.seconds() - self.tests, 0)
        self.group.leave()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="append each test's CPU and wall seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    distributes = getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if (file := config.getoption("--cpu-seconds")) and not distributes:
        config.pluginmanager.register(_Costs(os.path.abspath(file)))


def _print(file: str, number: int) -> None:
    tests = [json.loads(line) for line in Path(file).read_text().splitlines()]
    files: collections.Counter[str] = collections.Counter()
    for test in tests:
        files[test["test"].partition("::")[0]] += test["cpu"]
    print(f"{len(tests)} tests, {sum(files.values()):.0f} CPU seconds\n")
    for test in sorted(tests, key=lambda test: -test["cpu"])[:number]:
        print(f"{test['cpu']:8.1f} {test['wall']:8.1f}  {test['test']}")
    print()
    for name, seconds in files.most_common(number):
        print(f"{seconds:8.1f}           {name}")


if __name__ == "__main__":
    _print(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
