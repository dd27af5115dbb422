"""This module tests warm boxes: a container that waits is as fresh as one that is started, and can only save time."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.docker import warm
from rollout.sandbox.docker.box import DockerSandbox, boot_docker
from rollout.sandbox.docker.engine import OWNER, ContainerEngine, get_engine
from rollout.sandbox.owner import me
from rollout.sandbox.sealing import Source
from tests.boxes.kinds import BoxKit, Ssh, kinds
from tests.docker_kit import left, ready, small_image
from tests.sandboxes import sh

pytestmark = kinds("docker", "podman", "ssh")

Boot = Callable[..., Any]


@pytest.fixture
def engine(kind: BoxKit) -> ContainerEngine:
    return kind.fleet.connected()[0].engine() if isinstance(kind, Ssh) else get_engine()


@pytest_asyncio.fixture
async def boot(engine: ContainerEngine, tmp_path: Path) -> AsyncIterator[Boot]:
    """Boot a box when the spares are there; whether it was one is in `hits`."""
    source = Source(await asyncio.to_thread(small_image))
    warm.told()

    async def booted(**options: Any) -> DockerSandbox:
        box = await boot_docker(source, engine=engine, **{"warm": 2, "scratch": str(tmp_path), **options})
        try:
            await ready(box)
        except asyncio.CancelledError:
            await box.close()
            raise
        return box

    yield booted
    assert await asyncio.to_thread(left, engine) == []


def hits() -> int:
    return int(warm.told()["warm_boots"])


def containers(engine: ContainerEngine) -> set[str]:
    """All containers of this process, those that wait, too."""
    return {c["Id"] for c in engine.client.containers(all=True, filters={"label": f"{OWNER}={me()}"})}


CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(9).decode())"


async def test_warm_boxes_are_fresh_and_private(boot: Boot, engine: ContainerEngine, tmp_path: Path) -> None:
    """A warm box has the same limits, its own sockets, and those of no other box; also when it was started again."""
    limits = Limits(memory_bytes=64 * 2**20)
    places, boxes, servers = [], [], []
    for name in ("a", "b", "c"):
        place = tmp_path / name
        place.mkdir()
        box = await boot(socket_dir=place, limits=limits)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / "s"))
            server.listen()
            servers.append(server.dup())
        places.append(place)
        boxes.append(box)
        await sh(box, f"echo {name} > pkg/mod.py; touch /tmp/{name} ~/{name}")
    assert hits() == 2

    async def answers(number: int, box: DockerSandbox) -> bool:
        asking = asyncio.ensure_future(
            box.exec(["python3", "-c", CONNECT, f"{places[number]}/s"], env={}, timeout_s=60)
        )
        servers[number].settimeout(0.01)
        while not asking.done():
            try:
                connection, _ = await asyncio.to_thread(servers[number].accept)
                connection.sendall(b"hello")
                connection.close()
            except TimeoutError:
                pass
        return (await asking).stdout == b"hello\n"

    for at, box in enumerate(boxes):
        assert [await answers(number, box) for number in range(3)] == [number == at for number in range(3)]
        assert (await sh(box, "cat pkg/mod.py; cd; ls")).stdout.split() == [b"abc"[at : at + 1]] * 2
        eat = "held = [bytearray(b'x' * 2**20) for _ in range(200)]"
        assert (await box.exec(["python3", "-c", eat], env={}, timeout_s=60)).returncode == 137
        assert await answers(at, box)
        assert (await sh(box, f"touch {places[at]}/x")).returncode != 0
    told = [engine.client.inspect_container(box.container) for box in boxes]
    for host in (one["HostConfig"] for one in told):
        host.pop("Mounts", None), host.pop("Binds", None)
    assert told[0]["HostConfig"] == told[1]["HostConfig"] == told[2]["HostConfig"]
    assert told[0]["Config"]["User"] == told[1]["Config"]["User"]
    for box, place, server in zip(boxes, places, servers, strict=True):
        await box.close()
        server.close()
        assert place.is_dir() and not place.is_symlink() and [path.name for path in place.iterdir()] == ["s"]
    await asyncio.to_thread(left, engine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["kill", "pause", "remove"])
async def test_a_spare_that_dies_is_nobodys_failure(boot: Boot, engine: ContainerEngine, how: str) -> None:
    first = await boot()
    (spare,) = containers(engine) - {first.container}
    work = {"remove": functools.partial(engine.client.remove_container, force=True)}.get(how)
    await asyncio.to_thread(work or getattr(engine.client, how), spare)
    second = await boot()
    assert hits() == 0 and second.container != spare and (await sh(second, "echo on")).stdout == b"on\n"
    third = await boot()
    assert hits() == 1
    for box in (first, second, third):
        await box.close()


async def test_spares_are_few_and_are_removed(
    boot: Boot, engine: ContainerEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There are at most as many as allowed, those that were asked for last. None lives for ever."""
    sorts = [Limits(memory_bytes=number << 20) for number in (64, 65, 66)]
    for limits in sorts:
        await (await boot(limits=limits)).close()
    while len(containers(engine)) > 2:
        await asyncio.sleep(0.05)
    await (await boot(limits=sorts[0], warm=3)).close()
    assert hits() == 0
    await (await boot(limits=sorts[2], warm=3)).close()
    assert hits() == 1
    await (await boot(limits=sorts[2], warm=0)).close()
    (tmp_path / "elsewhere" / "a").mkdir(parents=True)
    await (await boot(limits=sorts[2], socket_dir=tmp_path / "elsewhere" / "a")).close()
    assert warm.told() == {} and len(containers(engine)) == 3
    monkeypatch.setattr(warm, "IDLE_S", 0.0)
    await asyncio.to_thread(left, engine)
    await (await boot()).close()
    while containers(engine):
        await asyncio.sleep(0.05)


async def test_a_cancelled_boot_with_spares_leaves_nothing(boot: Boot, tmp_path: Path) -> None:
    for number, delay in enumerate((0, 0, 0.002, 0.005, 0.01, 0.05)):
        (place := tmp_path / str(number)).mkdir()
        booting = asyncio.ensure_future(boot(socket_dir=place))
        await asyncio.sleep(delay)
        if number:
            booting.cancel()
        await asyncio.wait([booting])
        if not booting.cancelled():
            await booting.result().close()
        assert place.is_dir() and not place.is_symlink()


async def test_a_box_that_cannot_be_booted_is_one_error(boot: Boot, engine: ContainerEngine) -> None:
    with pytest.raises(SandboxError) as failure:
        await boot(limits=Limits(memory_bytes=1))
    assert failure.value.cause == "boot_failed" and engine.spares._all == {} and warm.told() == {}
