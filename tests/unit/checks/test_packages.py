"""This module tests what is installed from a wheel."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PACKAGES = ("rl", "rollout", "rewards")


def files(place: Path) -> set[Path]:
    return {path.relative_to(place) for name in PACKAGES for path in (place / name).rglob("*") if path.is_file()}


def test_packages_carry_their_files(tmp_path: Path) -> None:
    """Templates and scripts too, not only modules."""
    source, built = tmp_path / "source", tmp_path / "built"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    assert files(built) == files(source)


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0"])
def test_the_pins_do_for_both_pythons(python: str) -> None:
    """What each installed package requires, with the markers of that Python. The GPU's pins are checked where they are
    installed."""
    extra = "cpu" if "+cpu" in importlib.metadata.version("torch") else "gpu"
    pins = dict(re.split("==", line) for line in lines(ROOT / "constraints" / f"{extra}.txt"))
    replaced = {
        canonicalize_name(Requirement(line).name) for line in lines(ROOT / f"constraints/{extra}-overrides.txt")
    }
    environment = {"python_version": python[:4], "python_full_version": python, "extra": ""}
    wrong, checked = [], 0
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if pins.get(name) != distribution.version:
            continue
        for requirement in map(Requirement, distribution.requires or ()):
            needed = canonicalize_name(requirement.name)
            if needed in replaced or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            checked += 1
            if needed == "vllm" and extra == "cpu":  # the stand-in in packaging/
                continue
            if needed not in pins or not requirement.specifier.contains(pins[needed], prereleases=True):
                wrong.append(f"{name}: {requirement}, but {pins.get(needed)}")
    assert not wrong and checked > 500
