"""This module tests what only boxes in pods have: a cluster between them and the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from omegaconf import OmegaConf

pytest.importorskip("kubernetes")
import kubernetes_boxes
from kubernetes_boxes import box as pods
from kubernetes_boxes import relay
from kubernetes_boxes.box import boot_pod
from kubernetes_boxes.cluster import Stream
from kubernetes_boxes.kind import Kubernetes
from rewards.task import load_tasks
from rl.config.compose import ConfigError
from rl.episodes import boxes
from rl.quickstart.tasks import make_tasks
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.agent.forward import compiled
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox import Limits, PatchTooLarge, SandboxError
from rollout.sandbox.sealing import Source
from tests.docker_kit import base_image, small_image
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.kube_kit import API_ADDRESS, Cluster
from tests.sandboxes import alive, begun, sh

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.xdist_group("kubernetes")]


def kind_of(cluster: Cluster, **keys: Any) -> Kubernetes:
    """Return the kind of box that its config names, with a test's cluster."""
    config = OmegaConf.load(Path(kubernetes_boxes.__file__).parent / "configs/sandbox/kubernetes.yaml")
    where = {"kubeconfig": str(cluster.config), "base_image": base_image(), "boot_s": 120}
    kind = boxes.kind_of(OmegaConf.merge(config, where, keys))
    assert isinstance(kind, Kubernetes)
    return kind


async def test_an_episode_of_the_real_claude_code(own_cluster: Cluster, tmp_path: Path) -> None:
    """The agent's box and the one for grading are pods; the proxy is outside of the cluster."""
    await asyncio.to_thread(make_tasks, tmp_path, seed=1, n_train=1, n_heldout=1)
    (task,) = load_tasks(tmp_path / "train.parquet")
    agent = ClaudeCode(find_binary(None), 8, 180, 2000, system_prompt="Do.", tools=("Bash",), bare=True)
    kind = kind_of(own_cluster, requests={"cpu": "20m", "memory": "64Mi"})
    kind.check_tasks([task])
    await asyncio.to_thread(kind.check)
    script = f"git apply <<'EOF'\n{task.patch}\nEOF"
    policy = char_policy(scripted(in_turn(call("Bash", command=script), "Done.")))
    proxy = ProxyServer()
    await proxy.start()
    try:
        episode = await run_episode(Setup(policy, proxy, kind.boot(agent), agent, 120), task, "e")
    finally:
        await proxy.stop()
    assert (episode.verdict.reason, episode.verdict.reward) == (None, 1.0), (episode.verdict, episode.agent)
    (row,) = check_record(episode, tmp_path / "records").rows
    assert len(row.nodes) == 2 and own_cluster.names() == []


async def test_what_is_wrong_is_said_in_one_line(own_cluster: Cluster) -> None:
    """A token that was revoked, a server that does not answer, a namespace that is not ours: before a run."""
    for keys, said in (
        ({"kubeconfig": own_cluster.kubeconfig("revoked", "none")}, "Unauthorized; see sandbox.kubeconfig"),
        ({"kubeconfig": own_cluster.kubeconfig("lost", "none", port=1)}, "no_engine: the cluster's API server: Cannot"),
        ({"kubeconfig": "/none"}, "no_engine: no config of a cluster"),
        ({"namespace": "others"}, 'cannot list resource "pods" .* in the namespace "others"'),
    ):
        with pytest.raises(ConfigError, match=f"sandbox=kubernetes: .*{said}") as failure:
            await asyncio.to_thread(kind_of(own_cluster, **keys).check)
        assert len(failure.value.lines) == 1 and "\n" not in str(failure.value)


async def test_a_pod_that_does_not_start_says_why(own_cluster: Cluster) -> None:
    """No node has room; no registry has the image; a node lacks the agent's program. Nothing is left of such a pod."""
    full = own_cluster.pods(requests={"cpu": "20m", "memory": "900Gi"}, boot_s=3)
    source, none = Source(small_image()), Source("127.0.0.1:1/none:1")
    for made, cause, said in (
        (boot_pod(source, full, limits=Limits(memory_bytes=2**40)), "boot_failed", "within 3 s: .*Insufficient memory"),
        (boot_pod(none, own_cluster.pods()), "missing_image", "ErrImagePull: .*127.0.0.1:1/none:1"),
    ):
        with pytest.raises(SandboxError, match=said) as failure:
            await made
        assert failure.value.cause == cause and own_cluster.names() == []


async def test_a_box_that_fills_its_disk_is_the_policys_doing(own_cluster: Cluster) -> None:
    """Its node ends it, also when nothing runs in it; its files are gone, so its patch is too large."""
    for then in ("sleep 1000", "true"):
        box = await boot_pod(Source(small_image()), own_cluster.pods(), limits=Limits(disk_bytes=32 * 2**20))
        try:
            done = await sh(box, f"head -c {64 * 2**20} /dev/zero >/tmp/big; {then}", timeout_s=300)
            assert done.returncode == (137 if then != "true" else 0)
            while (await box._cluster.pod(box.name)).status.phase != "Failed":
                await asyncio.sleep(0.5)
            assert (await sh(box, "true")).returncode == 137
            with pytest.raises(PatchTooLarge, match="filled its disk"):
                await box.diff()
            with pytest.raises(FileNotFoundError):
                await box.get("README.md")
            await box.put("x", b"x")
        finally:
            await box.close()


async def test_a_box_with_a_network_does_not_boot(own_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a process tries to reach the address of the API server that it is told."""
    monkeypatch.setattr(pods, "_known", set())
    networked = own_cluster.pods(more={"hostNetwork": True})
    with socket.create_server((API_ADDRESS, 443)), pytest.raises(SandboxError) as failure:
        await boot_pod(Source(small_image()), networked)
    assert failure.value.cause == "boot_failed" and "reaches the API server" in str(failure.value)
    assert own_cluster.names() == [] and pods._known == set()


class Local(Stream):
    """A relay of this machine in place of one in a pod."""

    def __init__(self, program: asyncio.subprocess.Process) -> None:
        self.program = program

    async def send(self, data: bytes) -> None:
        self.program.stdin.write(data)
        await self.program.stdin.drain()

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        while data := await self.program.stdout.read(1 << 15):
            yield 1, data

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.program.kill()
        await self.program.wait()


async def test_a_connection_that_nobody_reads_stops_no_other() -> None:
    """Else an agent could break its own stream, which is a failure of the infrastructure. What waits is bounded."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int(await reader.readline())
        with contextlib.suppress(ConnectionError):
            writer.write(bytes(size))
            await writer.drain()
            writer.close()
        if size == 30 << 20:
            sent.set()

    sent = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="cc-") as name:
        there, here = Path(name, "there"), Path(name, "here")
        await asyncio.start_unix_server(answer, here)
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(compiled(relay.SOURCE), there, stdin=pipe, stdout=pipe)
        ready = asyncio.get_running_loop().create_future()
        carried = asyncio.ensure_future(relay.carry(Local(program), here, ready))
        await ready
        kept = list[asyncio.StreamWriter]()  # what nobody holds is closed

        async def ask(size: int) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_unix_connection(there, limit=1000)
            writer.write(b"%d\n" % size)
            kept.append(writer)
            return reader

        waiting, many = [await ask(1 << 20) for _ in range(3)], await ask(30 << 20)
        assert len(await (await ask(1000)).read()) == 1000
        await sent.wait()
        assert len(await many.read()) < 30 << 20
        assert [len(await reader.read()) for reader in waiting] == [1 << 20] * 3
        carried.cancel()
        await asyncio.wait({carried})


def test_sending_on_to_a_connection_that_is_closed_stops_no_other(tmp_path: Path) -> None:
    """Ray's workers have uvloop, which raises a RuntimeError for it."""
    frame, closed = struct.Struct("!II"), threading.Event()

    class Frames:
        async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
            yield 1, frame.pack(0, 0) + frame.pack(1, 3) + b"bad"
            while not closed.is_set():
                await asyncio.sleep(0.01)
            for _ in range(20):
                await asyncio.sleep(0.01)
                yield 1, frame.pack(1, 1) + b"x"
            yield 1, frame.pack(1, 0)

        async def send(self, *_: Any) -> None: ...

        async def close(self) -> None: ...

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        closed.set()

    async def play() -> None:
        await asyncio.start_unix_server(answer, tmp_path / "s")
        ready = asyncio.get_running_loop().create_future()
        await relay.carry(Frames(), tmp_path / "s", ready)  # type: ignore[arg-type]
        assert ready.done()

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        closed.clear()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(play())


HUNGRY = "python3 -c 'x = bytearray(600 * 2**20)'; echo $?"
FIGHTING = """
import os, signal
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        break
while True:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


async def test_what_a_box_does_to_itself_is_no_infrastructure_failure(own_cluster: Cluster) -> None:
    """Its first process can be neither ended nor traced; no memory, and a program that fights its end, are results."""
    box = await boot_pod(Source(small_image()), own_cluster.pods(), limits=Limits(memory_bytes=256 * 2**20))
    try:
        done = await sh(
            box, "kill -9 1; echo x >/proc/1/fd/1; cat /proc/1/environ /kept/sleep; touch /kept/x; echo alive"
        )
        assert done.stdout == b"alive\n" and done.stderr.count(b"ermission denied") == 3, done.stderr
        assert (await sh(box, HUNGRY)).stdout in (b"137\n", b"")
        await sh(box, "echo changed >README.md; (setsid sleep 1234567 &) ; kill -9 $PPID $$", timeout_s=5)
        assert not alive("1234567")
        done = await box.exec(["python3", "-c", FIGHTING], env={}, timeout_s=3)
        assert done.timed_out or done.returncode == 137
        assert b"+changed" in await box.diff()
    finally:
        await box.close()
    assert own_cluster.names() == []


async def test_a_stream_of_the_session_that_breaks(own_cluster: Cluster, nap: str) -> None:
    """It is an infrastructure failure, though a program was running."""
    with tempfile.TemporaryDirectory(prefix="cc-") as name:
        sockets = Path(name)
        await asyncio.start_unix_server(lambda *_: None, sockets / "s")
        box = await boot_pod(Source(small_image()), own_cluster.pods(), socket_dir=sockets)
        running = asyncio.ensure_future(sh(box, f"sleep {nap}"))
        await begun(nap, running)
        await _ended(box._cluster, box.name, "relay")
        with pytest.raises(SandboxError, match="the stream of s broke"):
            await running
        await box.close()


async def _ended(cluster: Any, pod: str, name: str) -> None:
    """End a program of a pod's keeper."""
    find = "for p in /proc/[0-9]*; do [ $(readlink $p/exe) = /box/kept/$1 ] && kill -9 ${p#/proc/}; done; :"
    await cluster.call(pod, "keeper", ["bash", "-c", find, "sh", name])
