"""The Python tasks of examples/harbor, each of another shape: admitted or refused, and played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.task import Task
from rollout.sandbox.docker.engine import get_engine
from tests.docker_kit import base_image, left
from tests.integration.harbor_plays import admitted, check_plays

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.claude, pytest.mark.timeout(900)]
NAMES = ("python", "steps", "separate", "json", "fraction")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Task]]:
    assert base_image()
    found, refused = admitted(tmp_path_factory.mktemp("shapes"), *NAMES, "broken")
    assert set(found) == set(NAMES), refused
    assert refused == {"broken": "gold patch: tests_failed 1x (reward 0)"}
    yield found
    assert left(get_engine()) == []


@pytest.mark.parametrize("name", NAMES)
async def test_claude_code_plays_a_task_of_another_shape(tasks: dict[str, Task], name: str, tmp_path: Path) -> None:
    await check_plays(tasks[name], name, tmp_path)
