"""This module tests what only boxes on other machines can do: lose their host, and find another one."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.sandbox import SandboxError
from rollout.sandbox.docker import fleet as fleets
from rollout.sandbox.docker import images, link
from rollout.sandbox.docker.engine import OWNER, get_engine
from rollout.sandbox.docker.fleet import Fleet, boot_elsewhere
from rollout.sandbox.sealing import Source
from tests.docker_kit import left, small_image
from tests.own_engine import OwnEngine, OwnPodman, running
from tests.sandboxes import REPOSITORY, alive, sh
from tests.ssh_kit import Sshd, close, fleet_of, servers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sshd]]:
    monkeypatch.setattr(link, "ALIVE_S", 1)
    monkeypatch.setattr(link, "TTL_S", 6)
    monkeypatch.setattr(fleets, "RETRY_S", 3.0)
    with servers(2) as started:
        yield started
    until(lambda: left(get_engine()) == [])


def until(reached: Callable[[], bool]) -> None:
    while not reached():
        time.sleep(0.05)


async def test_a_key_that_is_revoked(hosts: list[Sshd]) -> None:
    """Who is connected goes on. A new connection is refused, and others have its boxes, until it is accepted again."""
    revoked, other = hosts
    with fleet_of(revoked, other) as fleet:
        first, second = fleet.hosts
        assert fleet.problems() == []
        on_first = await boot_elsewhere(_only(fleet, first), Source(small_image()))
        revoked.accept(False)
        assert (await sh(on_first, "echo works")).stdout == b"works\n"
        on_second = await boot_elsewhere(_only(fleet, second), Source(small_image()))
        running = asyncio.ensure_future(sh(on_first, "sleep 60"))
        await asyncio.sleep(0)
        first.engine().link._process.kill()
        with pytest.raises(SandboxError, match=rf"{revoked.name}.*: the host is lost") as failure:
            await running
        assert failure.value.cause == "no_engine"
        await on_first.close()
        until(lambda: bool(fleet.connected() and first.error))
        assert re.search(rf"{revoked.name}.*: it accepts no key of this user.*Permission denied", first.error)
        third = await boot_elsewhere(fleet, Source(small_image()))
        assert third in second.boxes and (await sh(on_second, "echo works")).stdout == b"works\n"
        await third.close()
        await on_second.close()
        revoked.accept()
        until(lambda: len(fleet.connected()) == 2)
        assert fleet.problems() == []


async def test_a_temporary_directory_whose_path_is_too_long_for_sockets(
    hosts: list[Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setattr(link, "make_root", lambda fill: Path(tempfile.mkdtemp(dir=long)))
    with fleet_of(hosts[0]) as fleet:
        box = await boot_elsewhere(fleet, Source(small_image()))
        assert (await sh(box, "echo works")).stdout == b"works\n"
        await box.close()
    assert list(long.iterdir()) == []


def test_a_connection_that_has_ended_is_closed_with_what_was_not_sent(hosts: list[Sshd]) -> None:
    ended = link.Link(hosts[0].name, hosts[0].config)
    ended._process.kill()
    ended._process.wait()
    with pytest.raises(SandboxError):
        ended.run(":")
    ended.close()
    assert not ended.directory.exists()


@pytest.mark.podman
@pytest.mark.xdist_group("podman")
async def test_a_host_with_podman(hosts: list[Sshd], own_podman: OwnPodman, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("shown\n")
    with fleet_of(hosts[0], sockets=(own_podman.url.removeprefix("unix://"),)) as fleet:
        assert fleet.problems() == [] and fleet.hosts[0].engine().podman
        box = await boot_elsewhere(fleet, Source(small_image()), binds={tmp_path / "program": "/opt/program"})
        assert (await sh(box, "cat /opt/program; echo new > made")).stdout == b"shown\n"
        assert b"+new\n" in await box.diff()
        await box.close()
        assert left(fleet.hosts[0].engine()) == []


def _only(fleet: Fleet, host: fleets.Host) -> Fleet:
    """Return a fleet that has one of the hosts of another."""
    one = Fleet([], None, 16)
    one.hosts = [host]
    return one


def test_what_is_wrong_with_a_host_is_one_line(hosts: list[Sshd], tmp_path: Path) -> None:
    good, refusing = hosts
    refusing.accept(False)
    with servers(1) as strangers:
        (stranger,) = strangers
        lines = {
            "host:a:b": "is no",
            "-oProxyCommand=x": "is no",
            f"{stranger.name}": "its host key is unknown or has changed",
            f"{refusing.name}": "it accepts no key of this user",
            "127.0.0.1:1": "Connection refused",
            f"{good.name}{tmp_path}/none.sock": f"it has no socket of a container engine at {tmp_path}/none.sock",
        }
        with_problems = Fleet(list(lines), good.config, 16)
        problems = with_problems.problems()
        assert len(problems) == len(lines) and not any("\n" in line for line in problems)
        for problem, (name, words) in zip(problems, lines.items(), strict=True):
            assert name in problem and words in problem
        with pytest.raises(SandboxError, match="no host answers") as failure:
            with_problems.choose("image")
        assert failure.value.cause == "no_engine"
        close(with_problems)


@pytest.mark.parametrize("keeper_too", [False, True])
def test_boxes_of_a_killed_process_are_removed_by_the_host(hosts: list[Sshd], nap: str, keeper_too: bool) -> None:
    """Nobody has to come for that. If the host's own keeper was killed too, the next connection to the host does it."""
    socket = get_engine().url.removeprefix("unix://")
    program = f"""
        import asyncio
        from pathlib import Path
        from rollout.sandbox.docker import link
        from rollout.sandbox.docker.fleet import Fleet, boot_elsewhere
        from rollout.sandbox.sealing import Source
        link.TTL_S = 6
        fleet = Fleet([{hosts[0].name + socket!r}], Path({str(hosts[0].config)!r}), 16)
        async def work():
            box = await boot_elsewhere(fleet, Source({small_image()!r}))
            await box.exec(["sleep", {nap!r}], env={{}}, timeout_s=600)
        asyncio.run(work())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as worker:
        until(lambda: alive(nap) or worker.poll() is not None)
        if keeper_too:
            hosts[0].end()
        worker.kill()
    with fleet_of(hosts[1]) as fleet:
        if keeper_too:
            fleet.connected()
        until(lambda: not [one for one in get_engine().client.containers(all=True) if worker_is(one, worker.pid)])
    assert not alive(nap)


async def test_a_connection_is_kept_for_its_own_time(hosts: list[Sshd], monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that would be kept for less time leaves it alone, with its boxes."""
    monkeypatch.setattr(link, "TTL_S", 600)
    with fleet_of(hosts[0]) as kept:
        box = await boot_elsewhere(kept, Source(small_image()))
        lease = Path(kept.hosts[0].engine().link.lease)
        dead = lease.with_name("z")  # it is looked at after the other
        dead.mkdir()
        for directory in (lease, dead):
            os.utime(directory, (time.time() - 60,) * 2)
        monkeypatch.setattr(link, "TTL_S", 6)
        with fleet_of(hosts[1]) as other:
            assert other.connected()
            until(lambda: not dead.exists())
            assert lease.is_dir() and (await sh(box, "echo works")).stdout == b"works\n"
        await box.close()


def worker_is(container: dict[str, Any], pid: int) -> bool:
    """Return whether a process has made a container."""
    return f"/{pid}/" in container["Labels"].get(OWNER, "")


# --- engines of the test's own


@pytest.fixture(scope="module")
def own() -> Iterator[OwnEngine]:
    with running(OwnEngine, data_mb=900) as started:
        yield started


async def test_images_and_files_get_to_a_host_once(hosts: list[Sshd], own: OwnEngine, tmp_path: Path) -> None:
    """A host that has an image is preferred, up to `per_host` boxes; what boxes show is copied."""
    here = get_engine().url.removeprefix("unix://")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho shown\n")
    program.chmod(0o755)
    with fleet_of(*hosts, sockets=(here, own.url.removeprefix("unix://")), per_host=2) as fleet:
        near, far = fleet.hosts
        with pytest.raises(SandboxError) as failure:
            await boot_elsewhere(fleet, Source("localhost:1/no/such:1"))
        assert failure.value.cause == "missing_image" and len(fleet.connected()) == 2
        assert fleet.missing([small_image(), "localhost:1/no/such:1"]) == ["localhost:1/no/such:1"]
        binds = {program: "/opt/program"}
        boxes = [await boot_elsewhere(fleet, Source(small_image()), binds=binds) for _ in range(2)]
        assert all(box in near.boxes for box in boxes)
        boxes += await asyncio.gather(
            *(boot_elsewhere(fleet, Source(small_image()), binds=binds) for _ in range(2)),
        )
        assert all(box in far.boxes for box in boxes[2:])
        assert images.missing(far.engine(), [small_image()]) == []
        copies = {far.engine().link.run(f"ls -1di {far.engine().link.shown(program)}")}
        for box in boxes:
            assert (await sh(box, "/opt/program; echo > /opt/program")).stdout == b"shown\n"
            await box.close()
        assert {far.engine().link.run(f"ls -1di {far.engine().link.shown(program)}")} == copies


async def test_a_host_whose_disk_is_full(hosts: list[Sshd], own: OwnEngine) -> None:
    here = get_engine().url.removeprefix("unix://")
    with fleet_of(*hosts, sockets=(here, own.url.removeprefix("unix://"))) as fleet:
        near, far = fleet.hosts
        fleet.connected()
        images.sealed(far.engine(), Source(small_image()))
        box = await boot_elsewhere(_only(fleet, far), Source(small_image()))
        own.fill()
        try:
            with pytest.raises(SandboxError) as failure:
                await box.put("large", bytes(1 << 20))
            assert failure.value.cause == "no_space" and far.name in str(failure.value)
            await box.close()
            elsewhere = await boot_elsewhere(fleet, Source(small_image()))
            assert elsewhere in near.boxes
            await elsewhere.close()
        finally:
            own.make_room()
        until(far.usable)
        again = await boot_elsewhere(_only(fleet, far), Source(small_image()))
        await again.put("large", bytes(1 << 20))
        await again.close()


async def test_a_host_whose_engine_has_ended(hosts: list[Sshd], own: OwnEngine) -> None:
    """The connection lives; the host is left out until its engine answers."""
    here = get_engine().url.removeprefix("unix://")
    with fleet_of(*hosts, sockets=(here, own.url.removeprefix("unix://"))) as fleet:
        near, far = fleet.hosts
        fleet.connected()
        box = await boot_elsewhere(_only(fleet, far), Source(small_image()))
        own.stop()
        with pytest.raises(SandboxError) as failure:
            await sh(box, "true")
        assert failure.value.cause == "no_engine" and far.name in str(failure.value)
        assert not far.usable() and far.up() is not None
        elsewhere = await boot_elsewhere(fleet, Source(small_image()))
        assert elsewhere in near.boxes
        await elsewhere.close()
        own.start()
        until(far.usable)
        await box.close()
        await (await boot_elsewhere(_only(fleet, far), Source(small_image()))).close()
