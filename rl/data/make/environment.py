"""The environment in which a package's tests run: a virtual environment of wheels, beside the source.

It is the directory `.venv` of each task's snapshot. pip installs wheels only, which runs nothing of theirs. The package
itself is not installed: a `.pth` file names the work tree, so there is no second copy of its code to read the answer
from. The environment ignores itself (`.gitignore`), so that no patch has a part of it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

from rl.data.make.sources import MakeError, Package
from rollout import files

VENV = ".venv"
"""Where the environment is in a task's work tree."""

PYTHON = f"{VENV}/bin/python"
"""Its Python, relative to the work tree."""

BASES = tuple(map(Path, sorted({sys.base_prefix, "/usr/lib/python3"})))
"""What a local box shows of this machine's Pythons."""


def build(package: Package, directory: Path) -> dict[str, str]:
    """Make the environment as a directory that does not exist yet, and return the versions in it by name.

    Raises MakeError.
    """
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (directory / "bin").mkdir(parents=True)
    for name in ("python", "python3", base.name):
        (directory / "bin" / name).symlink_to(base)
    files.write(
        directory / "pyvenv.cfg",
        f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n",
    )
    files.write(directory / ".gitignore", "*\n")
    _install([*package.requires, "pytest"], site, package)
    up = "/".join([".."] * 4)
    files.write(site / "_work_tree.pth", f"{up}/{package.root}\n")
    versions: dict[str, str] = {
        canonicalize_name(one.metadata["Name"]): one.version
        for one in importlib.metadata.distributions(path=[str(site)])
    }
    if package.name in versions:
        raise MakeError(
            f"{package.name}: its own tests need another copy of it ({versions[package.name]}, by way of "
            "pytest or a plugin), which an agent could read; choose another package"
        )
    about = site / f"{package.name.replace('-', '_')}-{package.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(package.metadata)
    for entry in package.tree.glob(f"{package.root}/*.egg-info/entry_points.txt"):
        (about / "entry_points.txt").write_bytes(entry.read_bytes())
    return versions


def _install(requirements: Iterable[str], site: Path, package: Package) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary", ":all:", "--target", str(site), *requirements]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    why = said[-1].removeprefix("ERROR: ") if said else f"exit status {done.returncode}"
    raise MakeError(
        f"{package.name}=={package.version}: what its tests need cannot be installed from wheels: {why}; "
        "name what they need with --requires"
    )


def copies(package: Package, place: Path) -> list[Path]:
    """Return other copies of the package's modules below a directory that a box shows to an agent.

    Copies that other packages bring along (`_vendor`) count, too; a module that only has the same name does not.
    """
    files, found = _python_files(place), []
    for name in package.modules:
        found += [path for path in files.get(f"{name}.py", ()) if _alike(package, f"{name}.py", path)]
        inits = [path for path in files.get("__init__.py", ()) if path.parent.name == name]
        found += [path.parent for path in inits if _alike(package, name, path.parent)]
    return sorted(set(found))


@functools.cache
def _python_files(place: Path) -> dict[str, list[Path]]:
    """Return the Python files below a directory, by their last name."""
    found: dict[str, list[Path]] = {}
    for directory, inner, names in os.walk(place):
        if place in BASES:  # boxes do not show what is installed there
            inner[:] = [one for one in inner if one != "site-packages"]
        for name in names:
            if name.endswith(".py"):
                found.setdefault(name, []).append(Path(directory, name))
    return found


def _alike(package: Package, name: str, path: Path) -> bool:
    """Tell whether a module has at least half of its words in common with the package's module of this name."""
    mine, other = _words(package.tree / package.root / name), _words(path)
    return bool(mine) and 2 * len(mine & other) >= max(len(mine), len(other))


def _words(path: Path) -> set[str]:
    files = path.rglob("*.py") if path.is_dir() else [path] * path.is_file()
    return {word for file in files for word in re.findall(r"\w{4,}", file.read_text(errors="replace"))}
