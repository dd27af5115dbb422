"""What is installed from a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
