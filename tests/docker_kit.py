"""Tests that need a container engine share a small image and the tasks of scripts/task_images.py."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import OWNER, PROJECT, ContainerEngine, get_engine
from rollout.sandbox.owner import me
from tests.sandboxes import REPOSITORY, history, make_snapshot


@functools.cache
def task_images() -> ModuleType:
    """Import scripts/task_images.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("task_images", REPOSITORY / "scripts" / "task_images.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["task_images"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(function: Any, *arguments: Any) -> Any:
    """Return what an image builder makes; where it cannot work, skip, or fail in continuous integration."""
    try:
        return function(*arguments)
    except SystemExit as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


@functools.cache
def base_image() -> str:
    """Return the name of the base image; the first test that ever asks for it makes it, which takes minutes."""
    return made(task_images().base_image, get_engine())


@functools.cache
def small_image() -> str:
    """Return the name of an image with the repository of `history`, made once and kept."""
    kit, base = task_images(), base_image()
    tag = f"{PROJECT}/test:{kit._key(base, inspect.getsource(make_snapshot), inspect.getsource(history))}"
    with images.locked(tag), tempfile.TemporaryDirectory() as name:
        if images.missing(get_engine(), [tag]):
            kit.build_image(get_engine(), history(Path(name, "repo")), tag)
    return tag


def left(engine: ContainerEngine) -> list[str]:
    """Return the ids of this process's containers."""
    return [c["Id"] for c in engine.client.containers(all=True, filters={"label": f"{OWNER}={me()}"})]
