"""This module starts a proxy for the tests of several modules."""

from collections.abc import AsyncIterator

import pytest

from rollout.proxy.server import ProxyServer


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    proxy = ProxyServer(ping_s=0.05)
    await proxy.start()
    yield proxy
    await proxy.stop()
