"""What tests share that need a container engine: a small image, the tasks of scripts/task_images.py."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import OWNER, PROJECT, ContainerEngine, get_engine
from rollout.sandbox.owner import me
from tests.sandboxes import make_snapshot

REPOSITORY = Path(__file__).resolve().parents[1]


@functools.cache
def task_images() -> ModuleType:
    """scripts/task_images.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("task_images", REPOSITORY / "scripts" / "task_images.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["task_images"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(function: Any, *arguments: Any) -> Any:
    """What an image builder makes; a skip where it cannot work, which continuous integration does not accept."""
    try:
        return function(*arguments)
    except SystemExit as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


@functools.cache
def history(directory: Path) -> Path:
    """`make_snapshot`, with a later commit, a tag, a remote, a stash and a reflog to hide."""
    repo = make_snapshot(directory)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    (repo / "tracked.log").write_text("tracked, though it is ignored\n")
    for arguments in (["add", "-f", "tracked.log"], ["commit", "-qm", "second"], ["branch", "base"]):
        subprocess.run([*git, *arguments], cwd=repo, check=True)
    (repo / "README.md").write_text("the fix\n")
    for arguments in (
        ["commit", "-qam", "the fix"],
        ["tag", "-a", "v2", "-m", "fixed"],
        ["remote", "add", "origin", "https://example.com/x.git"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
        ["checkout", "-q", "base"],
    ):
        subprocess.run([*git, *arguments], cwd=repo, check=True)
    (repo / "README.md").write_text("stashed\n")
    subprocess.run([*git, "stash", "-q"], cwd=repo, check=True)
    (repo / ".git" / "hooks").mkdir(exist_ok=True)
    (repo / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\n")
    return repo


@functools.cache
def small_image() -> str:
    """The image of `history`, made once and kept."""
    kit = task_images()
    tag = f"{PROJECT}/test:{kit._key(kit._base_key(), Path(__file__).read_text())}"
    engine = get_engine()
    with images.locked(tag), tempfile.TemporaryDirectory() as name:
        if images.missing(engine, [tag]):
            made(kit.build_image, engine, history(Path(name, "repo")), tag)
    return tag


def left(engine: ContainerEngine) -> list[str]:
    """Containers of this process."""
    return [c["Id"] for c in engine.client.containers(all=True, filters={"label": f"{OWNER}={me()}"})]
