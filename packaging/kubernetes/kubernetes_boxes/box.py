"""Boxes that are pods: one container for programs, and one that keeps the box's files. See the package's README."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import secrets
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from kubernetes_boxes import relay
from kubernetes_boxes.cluster import Cluster, Stream
from kubernetes_boxes.stages import stage
from kubernetes_boxes.tree import Part, PodTree
from rollout.agent.forward import compiled
from rollout.sandbox import PATCH_CAP, ExecResult, Limits, PatchTooLarge, SandboxError, failed, infrastructure, sealing
from rollout.sandbox import files as box_files
from rollout.sandbox.base import BaseSandbox, mounts_of
from rollout.sandbox.directory import ulimits
from rollout.sandbox.ignored import RULES, IgnoredPaths
from rollout.sandbox.process import Command, Output
from rollout.sandbox.sealing import Source
from rollout.sandbox.treediff import Directory, patch_between

_KILLED = 137
_GRACE_S = 10.0
_KILLS, _DRAIN_S, _LOOKS = 3, 5.0, 20
_PULL_FAILED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_START_FAILED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_POD = Path(__file__).with_name("pod.yaml")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pods:
    """Pods says how pods are made: in which cluster, and what its administrators want of them.

    kubeconfig, context: see `Cluster.connect`. requests: what a node must have free for a box ({"cpu", "memory"}).
    more: fields of every pod's spec (nodeSelector, tolerations, imagePullSecrets, runtimeClassName). lifetime_s: when a
    pod is ended, whatever it does. boot_s: how long a pod may wait for a node.
    """

    namespace: str
    kubeconfig: str | None = None
    context: str | None = None
    requests: Mapping[str, str] | None = None
    more: Mapping[str, Any] | None = None
    lifetime_s: int = 14400
    boot_s: float = 600.0


_known: set[tuple[int, str]] = set()  # namespaces that this process has looked at


@infrastructure("boot_failed")
async def boot_pod(
    source: Source,
    pods: Pods,
    *,
    snapshot: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
    run: str = "",
) -> PodSandbox:
    """Return a fresh sandbox on the image of `source`, which a node pulls, or on a copy of a snapshot in that image.

    binds: path on the nodes -> path inside, read-only. The other parameters are those of all kinds. The caller closes
    the sandbox. Raises SandboxError: no_engine, missing_image, missing_snapshot, seal_failed, boot_failed.
    """
    if snapshot is None:
        sealing.check_source(source)
        if outside := [path for path in source.hide if path.startswith("/")]:
            raise SandboxError("seal_failed", f"{source.image}: boxes in pods cannot hide {outside}")
    mounts = await asyncio.to_thread(mounts_of, snapshot, binds, socket_dir)
    sockets = mounts.pop()[0] if socket_dir else None
    cluster = await Cluster.connect(pods.kubeconfig, pods.context, pods.namespace)
    name = f"box-{secrets.token_hex(6)}"  # chosen here, so that a pod whose creation is not answered can be deleted
    try:
        known = (os.getpid(), pods.namespace)
        if known not in _known:
            await cluster.reap()
        await cluster.create(name, run, _spec(source.image, pods, limits, mounts, sockets))
        await _until_running(cluster, name, pods.boot_s)
        box = PodSandbox(cluster, name, limits, snapshot, sockets)
        await box.fill(source, known not in _known)
        _known.add(known)
        return box
    except BaseException:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(cluster.delete(name))
        await cluster.close()
        raise


def _spec(
    image: str, pods: Pods, limits: Limits, mounts: list[tuple[Path, str]], sockets: Path | None
) -> dict[str, Any]:
    """Return the spec of a box's pod."""
    spec = yaml.safe_load(_POD.read_text())
    box, keeper = spec["containers"]
    disk = str(limits.disk_bytes)
    most = {"memory": str(limits.memory_bytes), "cpu": f"{int(limits.cpus * 1000)}m", "ephemeral-storage": disk}
    box |= {"image": image, "command": ["bash", "-c", stage("first")]}
    box["resources"] = {"limits": most, "requests": {"ephemeral-storage": "0", **(pods.requests or {})}}
    keeper |= {"image": image, "command": ["bash", "-c", stage("keep")]}
    spec["volumes"][0]["emptyDir"] = {"sizeLimit": disk}
    if sockets is not None:
        own = {"name": "box", "mountPath": str(sockets), "subPath": "sockets", "readOnly": True}
        box["volumeMounts"].append(own)
    for i, (path, inside) in enumerate(mounts):
        host = {"path": str(path), "type": "Directory" if path.is_dir() else "File"}
        spec["volumes"].append({"name": f"host-{i}", "hostPath": host})
        box["volumeMounts"].append({"name": f"host-{i}", "mountPath": inside, "readOnly": True})
    return {**spec, **(pods.more or {}), "activeDeadlineSeconds": pods.lifetime_s}


async def _until_running(cluster: Cluster, name: str, boot_s: float) -> None:
    """Wait for both containers. Raises SandboxError missing_image or boot_failed."""
    end, pause = time.monotonic() + boot_s, 0.1
    while True:
        pod = await cluster.pod(name)
        if pod is None or pod.status.phase == "Failed":
            raise SandboxError("boot_failed", f"the pod is gone: {pod and pod.status.message}")
        states = [one.state for one in pod.status.container_statuses or []]
        if len(states) == 2 and all(state.running for state in states):
            return
        for waiting in filter(None, (state.waiting for state in states)):
            if waiting.reason in _PULL_FAILED:
                raise failed("missing_image", f"{waiting.reason}: {waiting.message}")
            if waiting.reason in _START_FAILED:
                raise failed("boot_failed", f"{waiting.reason}: {waiting.message}")
        if any(state.terminated for state in states):
            raise SandboxError("boot_failed", f"a container has ended: {states}")
        if time.monotonic() > end:
            said = [one.message for one in pod.status.conditions or [] if one.message]
            node = f"node {pod.spec.node_name} does not start" if pod.spec.node_name else "no node takes"
            raise SandboxError("boot_failed", f"{node} the pod within {boot_s:g} s: {'; '.join(said)}")
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 1.3)


class PodSandbox(BaseSandbox):
    """This sandbox is a pod; see `boot_pod`."""

    relays = True

    def __init__(
        self, cluster: Cluster, name: str, limits: Limits, snapshot: Path | None, sockets: Path | None
    ) -> None:
        super().__init__(in_turn=True)
        self.name, self._cluster, self._snapshot, self._sockets = name, cluster, snapshot, sockets
        self._stage = stage("run").replace("LIMITS", ulimits(limits, processes=False))
        self._owner = "0:0"
        self._relays: dict[Path, asyncio.Task[None]] = {}
        self._over = False  # its container for programs has ended, or does not end its programs
        self._busy = False  # a program was not seen to its end
        self._empty = False  # its node has ended it and removed its files, as there were too many

    async def fill(self, source: Source, probe: bool) -> None:
        """Give the box its files. probe: try whether it has a network, too. Raises SandboxError."""
        asked = ["bash", "-c", stage("ask", *["probe"] * probe)]
        code, said, error = await self._cluster.call(self.name, "box", asked)
        self._owner, *reached = said.decode().split() or [""]
        if code or reached:
            why = "reaches the API server: its namespace needs a NetworkPolicy that denies everything, and is enforced"
            raise failed("boot_failed", f"a box {why}" if reached else error.decode(errors="replace"))
        archive = await asyncio.to_thread(_packed, self._snapshot, self._sockets is not None)
        patch, work, more = b"", "", list[str]()
        if self._snapshot is None:
            patch, work, more = source.setup_patch.encode(), source.workdir, [source.base_commit, *source.hide]
        words = [str(len(archive)), str(len(patch)), self._owner, work, *more]
        code, out, error = await self._keeper(stage("list", "setup"), *words, stdin=archive + patch)
        if work:
            sealing.judged(source, code, out.decode(errors="replace"), error.decode(errors="replace"))
        if code:
            raise failed("boot_failed", f"setting up: {error.decode(errors='replace').strip()[-500:]}")

    # --- files

    async def write_file(self, base: str, relative: PurePosixPath, data: bytes) -> None:
        """Write a file; see `BaseSandbox.write_file`."""
        words = [str(len(data)), relative.name, self._at(base), self._owner, *relative.parts[:-1]]
        try:
            code, _, error = await self._keeper(stage("down", "put"), *words, stdin=data)
        except PatchTooLarge:  # no program will miss it
            return
        if code:
            raise failed("put_failed", f"{base}/{relative}: {error.decode(errors='replace').strip() or 'no directory'}")

    async def read_file(self, base: str, relative: PurePosixPath) -> bytes:
        """Read a file; see `BaseSandbox.read_file`."""
        try:
            code, out, error = await self._keeper(
                stage("down", "get"), relative.name, self._at(base), "", *relative.parts[:-1]
            )
        except PatchTooLarge as gone:
            raise FileNotFoundError(str(gone)) from gone
        if code == 3:
            raise FileNotFoundError(f"no regular file at {base}/{relative}")
        if code:
            raise failed("get_failed", error.decode(errors="replace"))
        return out

    async def changes(self) -> bytes:
        """End all programs, and compare what the keeper sees with what the box had at first."""
        await self._kill()
        first = await self._script("exec cat /box/kept/list")
        new = PodTree(await self._script(stage("list", "listed"), "/box/tree"), first)
        old = await self._sealed(first, new) if self._snapshot is None else Directory(os.fsencode(self._snapshot))
        paths = new.changed | old.files.keys() - new.files.keys()
        with tempfile.TemporaryDirectory(prefix="diff-") as name, IgnoredPaths(old, Path(name)) as ignored:
            wanted = new.wanted(old.files, ignored)
            new.unpack(await self._contents("/box/tree", wanted))
            parts = Part(old, paths), Part(new, paths)
            return await asyncio.to_thread(patch_between, *parts, Path(name, "patch"), PATCH_CAP, ignored)

    async def _sealed(self, first: bytes, new: PodTree) -> PodTree:
        """Return the sealed work tree, with the contents of what is not as it was, of rules, and of git's index."""
        old = PodTree(first)
        paths = {path for path in old.files if path in new.changed or path not in new.files}
        paths |= {path for path in old.files if os.path.basename(path) == RULES} | {b".git/index"}
        old.unpack(await self._contents("/box/kept/old", paths))
        return old

    async def _contents(self, tree: str, paths: set[bytes]) -> bytes:
        names = b"".join(path + b"\0" for path in paths)
        return await self._script(stage("pack"), tree, str(len(names)), stdin=names)

    def _at(self, base: str) -> str:
        return f"/box/{self._part(base)}"

    async def _keeper(self, script: str, *words: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Run a script in the keeper. Raises PatchTooLarge if the box has filled its disk: its files are gone."""
        try:
            return await self._cluster.call(self.name, "keeper", ["bash", "-c", script, "keeper", *words], stdin)
        except SandboxError as error:
            await self._fate(error, keeper=True)
            if self._empty:
                raise PatchTooLarge("the node has ended the box, which had filled its disk") from None
            raise

    async def _script(self, script: str, *words: str, stdin: bytes = b"") -> bytes:
        code, out, error = await self._keeper(script, *words, stdin=stdin)
        if code:
            raise failed("diff_failed", error.decode(errors="replace").strip()[-500:])
        return out

    # --- programs

    async def run_program(self, command: Command) -> ExecResult:
        """Run one program in the pod; see `BaseSandbox.run_program`."""
        started, output = time.monotonic(), Output(command.output_cap)
        if self._over:
            return output.result(_KILLED, False, started)
        variables = [f"{key}={value}" for key, value in command.env.items()]
        words = b"".join(os.fsencode(word) + b"\0" for word in (self.workdir, *variables, *command.argv))
        sizes = [str(len(words)), str(len(command.stdin)), str(len(variables))]
        try:
            await self._let_in()
            stream = await self._cluster.start(self.name, "box", ["bash", "-c", self._stage, "bash", *sizes])
        except SandboxError as error:
            await self._fate(error)
            return output.result(_KILLED, False, started)
        self._busy = True
        sending = asyncio.ensure_future(stream.send(words + command.stdin))
        receiving = asyncio.ensure_future(_take(stream, output))
        ends = {receiving, command.stop, *self._relays.values()}
        try:
            left = started + command.timeout_s - time.monotonic()
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            late = not any(end.done() for end in ends)
            killed = receiving.done()
            for _ in range(_KILLS):
                killed = killed or await self._kill()
            await asyncio.wait({receiving}, timeout=_DRAIN_S if killed else 0)  # what is on its way belongs to it
            self._over = not killed  # it fights its end: nothing more is run in it
            self._busy = False
        finally:
            sending.cancel()
            receiving.cancel()
            await stream.close()
        for path, carried in self._relays.items():
            if carried.done():
                broken = f"the stream of {path.name} broke: {carried.exception() or 'ended'}"
                await self._fate(SandboxError("exec_failed", broken))
                return output.result(_KILLED, False, started)
        if late:
            return output.result(None, True, started)
        return output.result(await self._code(stream), False, started)

    async def _code(self, stream: Stream) -> int:
        """Return the exit code of a program whose stream has ended. Raises SandboxError if its box has not ended it."""
        broken: SandboxError | None = None
        try:
            if (code := stream.status()) != _KILLED:
                return code
        except SandboxError as error:
            broken = error
        if not await self._kill():  # the stage may have been killed before it has ended what the program had started
            await self._fate(broken)
        elif broken:
            raise broken
        return _KILLED

    async def _fate(self, error: SandboxError | None, keeper: bool = False) -> None:
        """Find out why a box (or its keeper) does not answer, and return if it is the box's own doing.

        Raises SandboxError: what it was.
        """
        for _ in range(_LOOKS):
            pod = await self._cluster.pod(self.name)
            status = pod and pod.status
            if status is None or status.phase in ("Failed", "Unknown"):
                why = f"{status.reason}: {status.message}" if status else "deleted"
                if "limit" not in why or not why.startswith("Evicted"):  # the box's limit, not the node's shortage
                    raise SandboxError("box_killed", f"its pod is gone, {why}") from error
                self._over = self._empty = True
                return
            # Its container is ended by its own programs, or because they had no memory left.
            self._over |= any(one.name == "box" and one.state.terminated for one in status.container_statuses or [])
            if self._over and not keeper:
                return
            await asyncio.sleep(0.5)
        if error:
            raise error
        self._over = True  # it fights its end: nothing more is run in it

    async def _kill(self) -> bool:
        """End every program in the box; return whether it let us."""
        try:
            killing = self._cluster.call(self.name, "box", ["bash", "-c", stage("kill")])
            return b"ended" in (await asyncio.wait_for(killing, _GRACE_S))[1]
        except (SandboxError, TimeoutError):
            return False

    # --- the session

    async def _let_in(self) -> None:
        """Show the box the sockets that its directory has by now."""
        for path in self._sockets.iterdir() if self._sockets is not None else ():
            if path.is_socket() and path not in self._relays:
                command = ["/box/kept/relay", f"/box/sockets/{path.name}"]
                stream = await self._cluster.start(self.name, "keeper", command)
                ready = asyncio.get_running_loop().create_future()
                self._relays[path] = asyncio.ensure_future(relay.carry(stream, path, ready))
                await asyncio.wait({ready, self._relays[path]}, return_when=asyncio.FIRST_COMPLETED)

    async def remove(self) -> None:
        """Delete the pod; if that fails, another process will."""
        if self._busy:  # a node takes a moment to end what is deleted
            await self._kill()
        for carried in self._relays.values():
            carried.cancel()
        await asyncio.gather(*self._relays.values(), return_exceptions=True)
        for pause in (0.5, 2.0, 0.0):
            try:
                await self._cluster.delete(self.name)
                break
            except SandboxError as error:
                logger.warning("removing a pod: %s", error)
                await asyncio.sleep(pause)
        await self._cluster.close()


async def _take(stream: Stream, output: Output) -> None:
    async for channel, data in stream:
        output.take(channel, data)


def _packed(snapshot: Path | None, session: bool) -> bytes:
    """Return the archive that a box is set up from."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        if snapshot is not None:
            tar.add(snapshot, "tree", filter=box_files.unowned)
        else:
            member = tarfile.TarInfo("kept/seal.sh")
            member.size = len(sealing.SCRIPT.encode())
            tar.addfile(member, io.BytesIO(sealing.SCRIPT.encode()))
        if session:
            tar.add(compiled(relay.SOURCE), "kept/relay", filter=box_files.unowned)
    return buffer.getvalue()
