"""Skips by what the machine has; the marks are declared in pyproject.toml."""

import functools
import shutil
import subprocess

import pytest


@functools.cache
def _works(*argv: str) -> bool:
    """Whether the command exists and succeeds."""
    return shutil.which(argv[0]) is not None and subprocess.run(argv, capture_output=True).returncode == 0


NEEDS = {
    "docker": ("docker", "info"),
    "bwrap": ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"),
    "gpu": ("nvidia-smi", "-L"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, command in NEEDS.items():
        if item.get_closest_marker(mark) and not _works(*command):
            pytest.skip(f"`{' '.join(command)}` does not work here")
