"""This module sets up the stand-in for the `apptainer` program, and looks at what it was told."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from apptainer_boxes import cli

IMAGE = "swe/one:latest"


class Stub:
    """An `apptainer` program in a directory of its own, with a registry that has `IMAGE` (see apptainer_stub.py)."""

    def __init__(self, directory: Path, repository: Path) -> None:
        self.directory = directory
        (directory / "registry").mkdir(parents=True)
        program = shutil.copy(Path(__file__).with_name("apptainer_stub.py"), directory / "apptainer")
        os.chmod(program, 0o755)
        self.cannot()
        self.push(IMAGE, repository)

    def cannot(self, **what: object) -> None:
        """Say what the program cannot do from now on; no arguments: it can do everything."""
        (self.directory / "options.json").write_text(json.dumps(what))
        _forget()

    @contextlib.contextmanager
    def first(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Have the program first on the PATH."""
        monkeypatch.setenv("PATH", str(self.directory), prepend=":")
        _forget()
        yield
        _forget()

    def calls(self, verb: str) -> list[dict]:
        """Return what the program was called with: {"argv", "env"} of each call with this verb."""
        return [call for call in self._notes() if verb in call.get("argv", ())[:2]]

    def cleaned_up(self) -> int:
        """Return how many boxes ended before the program that ran them did."""
        return sum("cleaned up" in note for note in self._notes())

    def _notes(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "calls.jsonl").read_text().splitlines()]

    def push(self, name: str, repository: Path) -> Path:
        """Add an image with a repository in /testbed and an answer in /opt/hints; returns the image's archive."""
        archive = self.directory / "registry" / f"{name.replace('/', '_')}.tar"
        with tempfile.TemporaryDirectory() as made:
            root = Path(made)
            for place in ("usr", "proc", "dev", "sys", "tmp", "var", "etc", "opt/hints", "home"):
                (root / place).mkdir(parents=True)
            for link in ("bin", "lib", "lib64", "sbin"):
                (root / link).symlink_to(f"usr/{link}")
            (root / "etc" / "passwd").write_text("agent:x:1000:1000::/home/agent:/bin/sh\n")
            (root / "opt" / "hints" / "answer").write_text("the answer\n")
            shutil.copytree(repository, root / "testbed", symlinks=True)
            with tarfile.open(archive, "w") as tar:
                tar.add(root, ".")
        return archive


def _forget() -> None:
    """Let the next boot look for the program, and try again what it can do."""
    cli.program.cache_clear()
    cli._features.clear()
