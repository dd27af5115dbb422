"""This module has what tests of several modules need: a proxy, and a CPU with units for bfloat16."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rl.config.compose import register_resolvers
from rollout.proxy.server import ProxyServer


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    proxy = ProxyServer(ping_s=0.05)
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.fixture
def bfloat16_units() -> Iterator[None]:
    """Let configs of CPU runs compute in bfloat16, whatever this machine is better at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.config.compose.cpu_dtype", lambda: "bfloat16")
        register_resolvers()
        yield
    register_resolvers()
