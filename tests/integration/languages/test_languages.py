"""Tasks in Go, JavaScript, Rust and Java, tested by the languages' own tools in containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.task import Task
from rollout.sandbox.docker.engine import get_engine
from tests.docker_kit import left, made, task_images
from tests.integration.harbor_plays import admitted, check_plays

# The first test may have to make the image with the tools.
pytestmark = [pytest.mark.docker, pytest.mark.claude, pytest.mark.timeout(1800)]
NAMES = ("go", "javascript", "rust", "java")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Task]]:
    made(task_images().toolchains_image, get_engine())
    found, refused = admitted(tmp_path_factory.mktemp("languages"), *NAMES)
    assert set(found) == set(NAMES), refused
    yield found
    assert left(get_engine()) == []


@pytest.mark.parametrize("name", NAMES)
async def test_claude_code_plays_a_task_of_another_language(tasks: dict[str, Task], name: str, tmp_path: Path) -> None:
    await check_plays(tasks[name], name, tmp_path)
