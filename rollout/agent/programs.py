"""Programs of agents: pinned packages of npm and PyPI, each in a directory of its own in the user's cache.

``rl.agents`` is the command that installs them. Boxes show the directory, read-only, under its own path; so nothing is
installed in a box, and what its image has does not matter.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollout.agent.forward import cache
from rollout.files import making

MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""This machine's architecture, as npm's packages name it."""

NODE = f"node-linux-{MACHINE}@22.23.5"
"""The package that brings Node, for programs that are written for it."""

NODE_PROGRAM = f"node_modules/node-linux-{MACHINE}/bin/node"

_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints"
_TOLD = "import importlib.metadata; print(importlib.metadata.version({!r}))"
_WHICH = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Program:
    """A program is one version of an agent's.

    npm: its package and others that it needs, with versions. pip: its distribution of PyPI and others; these and what
    they need have the versions in constraints/NAME.txt. main: the beginning of its command line, files in its
    directory.
    """

    name: str
    version: str
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    main: tuple[str, ...] = ("bin/python",)
    pythons: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Return where it is, or will be."""
        return cache() / f"{self.name}-{self.version}"

    @property
    def argv(self) -> list[str]:
        """Return the beginning of its command line."""
        return [str(self.directory / file) for file in self.main]

    def found(self) -> Path:
        """Return its directory. Raises FileNotFoundError, which says how to install it."""
        if not self.directory.is_dir():
            command = f".venv/bin/python -m rl.agents install {self.name}"
            raise FileNotFoundError(f"{self.name} {self.version} is not installed: {command}")
        return self.directory

    def python(self) -> str:
        """Return the Python to install it with: this one, or one on PATH or of pyenv's. Raises FileNotFoundError."""
        versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
        candidates = [os.path.realpath(sys.executable)]
        for version in self.pythons:
            candidates += [f"python{version}", *map(str, sorted(versions.glob(f"{version}*/bin/python{version}")))]
        for one in candidates:
            # A program of that name may refuse to run (pyenv's do).
            with contextlib.suppress(OSError, RuntimeError):
                if _run([one, "-c", _WHICH], "/").strip() in self.pythons or not self.pythons:
                    return one
        wanted = " or ".join(self.pythons)
        raise FileNotFoundError(f"it needs Python {wanted} with venv: install one of them, on PATH or with pyenv")

    def install(self) -> None:
        """Install it in one step, and see that it starts. Raises RuntimeError or OSError if that does not work."""
        with tempfile.TemporaryDirectory() as home, making(self.directory, overwrite=True) as new:
            if self.npm:
                if (npm := shutil.which("npm")) is None:
                    raise FileNotFoundError("this needs npm, which is not on PATH")
                # No package runs anything while it is installed. None has to be compiled: that is optional.
                options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--no-package-lock"]
                _run([npm, "install", *options, "--prefix", str(new), *self.npm], home)
            else:
                _run([self.python(), "-m", "venv", str(new)], home)
                pip = [str(new / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
                _run([*pip, "-c", str(_CONSTRAINTS / f"{self.name}.txt"), *self.pip], home)
            ask = ["--version"] if self.npm else ["-c", _TOLD.format(self.pip[0])]
            said = _run([*(str(new / file) for file in self.main), *ask], home)
            if self.version not in said:
                raise RuntimeError(f"{self.name} says that its version is {said.strip()[:200]!r}, not {self.version}")


def _run(argv: list[str], home: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=home)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:4])} ...: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout
