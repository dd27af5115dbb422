"""Skips by what the machine has (the marks are declared in pyproject.toml); what tests of all boxes share."""

import functools
import os
import random
import shutil
import subprocess

import hypothesis
import pytest

from rollout.sandbox import SandboxError
from tests import slurm_kit

# A timing is never a test.
hypothesis.settings.register_profile("timeless", deadline=None)
hypothesis.settings.load_profile("timeless")


@functools.cache
def _works(*argv: str) -> bool:
    """Return whether the command exists and succeeds."""
    return shutil.which(argv[0]) is not None and subprocess.run(argv, capture_output=True).returncode == 0


TRAINERS = ("trainers-1", "trainers-2")
NEEDS = {
    "bwrap": ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"),
    "gpu": ("nvidia-smi", "-L"),
    "podman": ("sh", "-c", "command -v podman && test $(id -u) = 0"),
}


@functools.cache
def _engine_problem() -> str:
    """Why no container engine can be used, "" if one can."""
    from rollout.sandbox.docker.engine import get_engine

    try:
        get_engine()
    except SandboxError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, problem in (("docker", _engine_problem), ("slurm", slurm_kit.problem)):
        if item.get_closest_marker(mark) and (words := problem()):
            # Continuous integration brings an engine and SLURM: there, a skip would hide that it has none.
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(words)
    for mark, command in NEEDS.items():
        if item.get_closest_marker(mark) and not _works(*command):
            pytest.skip(f"`{' '.join(command)}` does not work here")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Share the tests out to workers (pytest-xdist, ``--dist loadgroup``) file by file.

    Files that start trainers are in two groups of about the same length: there is no memory for three at a time.
    """
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that take longest first."""

    def rank(item: pytest.Item) -> int:
        group = item.get_closest_marker("xdist_group")
        if item.get_closest_marker("last"):
            return 3
        return 0 if group and group.args[0] in TRAINERS else 1 if item.get_closest_marker("engine") else 2

    items.sort(key=rank)


@pytest.fixture
def nap() -> str:
    """A duration for `sleep` that no other process has."""
    return f"{random.randrange(10**4, 10**5)}.{random.randrange(10**6, 10**7)}"
