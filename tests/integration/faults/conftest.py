from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rewards.task import Task
from rollout.proxy.server import ProxyServer
from tests.integration.fault_kit import Stand
from tests.integration.train_kit import warm_start

__all__ = ["warm_start"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="cc-") as directory:
        yield Path(directory)


@pytest.fixture
async def stand(task: Task, scratch: Path) -> AsyncIterator[Stand]:
    server = ProxyServer(ping_s=0.3)
    await server.start()
    yield Stand(task, server, scratch)
    await server.stop()
