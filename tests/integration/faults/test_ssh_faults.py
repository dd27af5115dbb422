"""This module tests faults of hosts that are reached by SSH, in the middle of real episodes.

The servers are real, on this machine. A host that is lost loses its episodes, with the name of the failure, and what is
tried again goes to another one; it comes back when it can.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from rewards.verdict import Reason
from rollout.sandbox.docker import link
from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.docker.fleet import Fleet, fleet_for
from tests.docker_kit import left
from tests.integration.fault_kit import Stand, repairing
from tests.sandboxes import alive
from tests.ssh_kit import Sshd, close, fleet_of, servers

pytestmark = [pytest.mark.docker, pytest.mark.claude, pytest.mark.timeout(900)]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sshd]]:
    monkeypatch.setattr(link, "ALIVE_S", 1)
    monkeypatch.setattr(link, "TTL_S", 6)
    with servers(3) as started:
        yield started


@pytest.fixture
async def far(stand: Stand, hosts: list[Sshd]) -> AsyncIterator[tuple[Stand, tuple[str, ...], Fleet]]:
    """A stand, the options by which its boxes are on two hosts with this machine's engine, and their fleet."""
    socket = get_engine().url.removeprefix("unix://")
    names = tuple(f"{host.name}{socket}" for host in hosts[:2])
    stand.kind = "ssh"
    fleet = fleet_for(os.getpid(), names, hosts[0].config, 16)
    yield stand, (f"sandbox.hosts=[{','.join(names)}]", f"sandbox.ssh_config={hosts[0].config}"), fleet
    close(fleet)


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_host_that_is_lost_while_the_agent_works(far, hosts: list[Sshd], how: str) -> None:
    """The second attempt is on the other host, and solves the task; what the lost one has is removed there."""
    stand, options, fleet = far
    lost = []

    async def lose() -> None:
        box = stand.boxes["agent"][0]
        (host,) = (host for host in fleet.hosts if box in host.boxes)
        (server,) = (server for server in hosts if host.name.startswith(server.name))
        lost.append(server)
        if how == "dies":
            server.end()
        else:
            server.signal(signal.SIGSTOP)
        while host.up() is not None:
            await asyncio.sleep(0.05)
        if how == "hangs":
            server.signal(signal.SIGCONT)
            await stand.until(lambda: not alive(stand.nap), asyncio.get_running_loop().create_future())
            return
        with fleet_of(hosts[2]) as again:  # the host is back, under another port
            await asyncio.to_thread(again.connected)
            await stand.until(lambda: not alive(stand.nap), asyncio.get_running_loop().create_future())

    await stand.play(stand.setup(stand.sleeping(), repairing(stand.task), options=options), lose)
    while left(get_engine()):  # its programs have ended, and then it is removed
        await asyncio.sleep(0.05)
    stand.check(Reason.NO_ENGINE, None)
    assert lost[0].name in stand.kept[0].verdict.detail
    session = stand.kept[1].session
    assert session is not None and session.relayed and session.counters.unread_replies == 0 and stand.kept[1].rows
