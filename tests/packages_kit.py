"""Packages beside this project count as installed, without pip."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

APPTAINER = Path(__file__).parents[1] / "packaging" / "apptainer"


def note(directory: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write into a directory of Python's path what an installer writes of a package: its name and entry points."""
    about = directory / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    groups = (f"[{group}]\n" + "".join(f"{key} = {it[key]}\n" for key in it) for group, it in points.items())
    (about / "entry_points.txt").write_text("\n".join(groups))


def install(package: Path, directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a package of this repository count as installed. directory: is made, for what an installer writes."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    note(directory, project["name"].replace("-", "_"), project["entry-points"])
    patch.syspath_prepend(package)
    patch.syspath_prepend(directory)
