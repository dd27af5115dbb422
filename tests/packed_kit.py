"""This module makes a small environment to pack: a Python with the standard library's use, and one module of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_UNUSED = ("__pycache__", "site-packages", "test", "config-*", "idlelib", "lib2to3", "ensurepip", "tkinter")


def small_environment(clone: Path, base: Path) -> str:
    """Make ``clone``/.venv, whose Python is in ``base`` as one in a home directory is, and return its version's name.

    It has the module ``ours``, whose NAME is its file.
    """
    version = f"python3.{sys.version_info.minor}"
    original = Path(sys.base_prefix)
    (base / "bin").mkdir(parents=True)
    (base / "lib").mkdir()
    (base / "bin" / version).write_bytes((original / "bin" / version).read_bytes())
    (base / "bin" / version).chmod(0o755)
    copy = 'tar -c -C "$0" "${@:3}" "$1" | tar -x -C "$2"'
    exclude = [f"--exclude={name}" for name in _UNUSED]
    subprocess.run(["bash", "-c", copy, original / "lib", version, base / "lib", *exclude], check=True)
    for shared in (original / "lib").glob("libpython3*"):
        (base / "lib" / shared.name).write_bytes(shared.read_bytes())
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / version).symlink_to(base / "bin" / version)
    (clone / ".venv" / "bin" / "python").symlink_to(version)
    (clone / ".venv" / "pyvenv.cfg").write_text(f"home = {base}/bin\ninclude-system-site-packages = false\n")
    site = clone / ".venv" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "ours.py").write_text("NAME = __file__\n")
    return version
