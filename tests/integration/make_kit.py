"""What tests need that make tasks of packages: source distributions, and wheels for pip without an index."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path


def write_sdist(path: Path, files: Mapping[str, str]) -> Path:
    """Write a source distribution, as a build would. ``path``: NAME-VERSION.tar.gz."""
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def write_wheels(directory: Path) -> None:
    """Write wheels of pytest and what it needs, of what is installed here."""
    for name in ("pytest", "iniconfig", "pluggy", "packaging", "pygments"):
        found = distribution(name)
        with zipfile.ZipFile(directory / f"{name}-{found.version}-py3-none-any.whl", "w") as wheel:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    wheel.write(file.locate(), str(file))
