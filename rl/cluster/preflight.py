"""Tests of a job's nodes before anything is loaded: their disks, and all-reduces between them.

The head orders, and every node does what is ordered (``Prober``): it writes and reads a file in the run directory,
reads a part of the model, and takes part in all-reduces (``rl.cluster.probe``) with gloo and, on GPUs, with NCCL. The
nodes stand in a ring, and all links of the ring are tested, half of them at a time. A node without a good link is
tested once more, together with a node that has one: so no node is blamed for its neighbour's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.checks.model import local_model
from rl.cluster.link import Link, Listener, NodeError
from rl.cluster.network import node_address
from rl.config.compose import CPU_ENVIRONMENT
from rl.run.programs import tied
from rollout import files

Order = Mapping[str, Any]
Result = dict[str, Any]
Pair = tuple[str, str]
Ask = Callable[[Mapping[str, Order]], Awaitable[dict[str, Result]]]

SLOWER = 3.0
"""A node that is so many times slower than the median of the nodes is a finding."""

_MIB = 1 << 20
_WRITE = 64 * _MIB
_READ = 256 * _MIB
_DISK_S = 120.0
_ROUND_S = 30.0
_START_S = 120.0  # to import torch from a busy shared disk
_SIZES = {"gloo": 16, "nccl": 256}  # MiB


class BadNodes(NodeError):
    """Nodes failed the preflight; ``names`` are those without which the job may be tried again, and may be empty."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        super().__init__(text)
        self.names = sorted(names)


@dataclass(frozen=True)
class NodeFinding:
    """A node finding is what is wrong with a node. It ends the job if it ``fails``; else the node is only slow."""

    node: str
    what: str
    fails: bool


# --- what every node does


class Prober:
    """A prober does on its node what the head orders. ``logs``: the node's directory in the run directory."""

    def __init__(self, config: DictConfig, logs: Path) -> None:
        self._config, self._logs = config, logs
        self._probes: dict[str, list[asyncio.subprocess.Process]] = {}

    async def do(self, order: Order) -> Result:
        """Return the figures of one order, or {"error": a line}."""
        if order["kind"] == "disk":
            try:
                figures = await asyncio.wait_for(asyncio.to_thread(disk, self._logs, _weights(self._config)), _DISK_S)
            except TimeoutError:
                return {"error": f"the disk of {self._logs} or of the model did not answer in {_DISK_S:.0f} s"}
            except OSError as error:
                return {"error": str(error)}
            return {**figures, "gpus": _gpus()}
        return await self._all_reduce(order)

    async def _all_reduce(self, order: Order) -> Result:
        backend = order["kind"]
        local = self._config.trainer.n_gpus_per_node if backend == "nccl" else 1
        try:
            async with asyncio.timeout(_START_S):
                if backend not in self._probes:
                    self._probes[backend] = [await self._start(backend, str(number)) for number in range(local)]
                    await asyncio.gather(*map(_line, self._probes[backend]))  # torch is imported
            if "world" not in order:
                return {}
            ranks, world = range(order["rank"] * local, (order["rank"] + 1) * local), order["world"] * local
            orders = [{**order, "rank": rank, "world": world} for rank in ranks]
            async with asyncio.timeout(_ROUND_S * 2):
                answers = await asyncio.gather(*map(_answer, self._probes[backend], orders))
        except TimeoutError:
            answers = [{"error": "no answer"}]
        except (OSError, ValueError):
            answers = [{"error": f"its process has ended; see {self._logs / 'preflight.log'}"}]
        problem = next((answer["error"] for answer in answers if "error" in answer), None)
        if problem is None:
            return {"gbs": min(answer["gbs"] for answer in answers)}
        await self._end(self._probes.pop(backend, []))  # the next all-reduce begins with new processes
        return {"error": problem}

    async def store(self) -> int:
        """Start the store at which the processes of an all-reduce meet, and return its port. Raises RuntimeError."""
        self._probes["store"] = [await self._start("store", "")]
        try:
            return json.loads(await asyncio.wait_for(_line(self._probes["store"][0]), _START_S))["port"]
        except (TimeoutError, ValueError) as error:
            log = self._logs / "preflight.log"
            raise RuntimeError(f"the store at which all-reduces meet has not started; see {log}") from error

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        own = CPU_ENVIRONMENT if self._config.trainer.device == "cpu" else {}
        with open(self._logs / "preflight.log", "ab") as log:
            return await asyncio.create_subprocess_exec(
                *tied(sys.executable, "-m", "rl.cluster.probe", *arguments),
                env={**own, **os.environ},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    async def _end(self, processes: Iterable[asyncio.subprocess.Process]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """End its processes."""
        for processes in self._probes.values():
            await self._end(processes)


async def _answer(probe: asyncio.subprocess.Process, order: Order) -> Result:
    assert probe.stdin is not None
    probe.stdin.write(json.dumps(order).encode() + b"\n")
    await probe.stdin.drain()
    return json.loads(await _line(probe))


async def _line(probe: asyncio.subprocess.Process) -> bytes:
    assert probe.stdout is not None
    return await probe.stdout.readline()


def disk(directory: Path, weights: Sequence[Path]) -> Result:
    """Return MB/s (10^6 bytes) of "write" and "read" in a directory, and of reading the "model" if it has weights.

    What is read comes from the disk and not from this machine's memory. Raises OSError.
    """
    file, block = directory / f".preflight-{os.getpid()}", os.urandom(_MIB)
    try:
        began = time.perf_counter()
        with open(file, "wb") as out:
            for _ in range(_WRITE // _MIB):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        figures = {"write": _WRITE / 1e6 / (time.perf_counter() - began), "read": _read([file])}
    finally:
        file.unlink(missing_ok=True)
    return figures | ({"model": _read(weights)} if weights else {})


def _read(paths: Sequence[Path]) -> float:
    """Return the MB/s of reading the files one after the other, until enough was read."""
    done, seconds = 0, 0.0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while done < _READ and (data := file.read(_MIB)):
                done += len(data)
            seconds += time.perf_counter() - began
    return done / 1e6 / max(seconds, 1e-6)


def _weights(config: DictConfig) -> list[Path]:
    model = None if config.prepare else local_model(config)
    return sorted(model.glob("*.safetensors")) if model else []


def _gpus() -> int:
    """Return how many GPUs this job may use on this node, without loading CUDA."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(filter(None, named.split(","))))
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    return 0


async def answer(link: Link, config: DictConfig, logs: Path) -> bool:
    """Do on this node what the head orders until it has no more orders; return False if it has hung up."""
    prober = Prober(config, logs)
    try:
        while (message := await link.receive()) is not None:
            if not message["test"]:
                return True
            await link.send(tested=await prober.do(message["test"]))
        return False
    finally:
        await prober.close()


# --- what the head makes of it


async def preflight(nodes: Listener, config: DictConfig, logs: Path, say: Callable[[str], None]) -> None:
    """Test all nodes of the job, say the figures of each, and write them to preflight.json.

    Raises:
        BadNodes: nodes failed, or with ``cluster.exclude_bad_nodes`` are far slower than the others.
    """
    own, place = Prober(config, logs), nodes.place

    async def ask(orders: Mapping[str, Order]) -> dict[str, Result]:
        asked = (own.do(one) if name == place.node else nodes.peers[name].ask(one) for name, one in orders.items())
        return dict(zip(orders, await asyncio.gather(*asked), strict=True))

    names = [place.node, *sorted(nodes.peers)]
    try:
        disks = await ask({name: {"kind": "disk"} for name in names})
        findings = judge_disks(disks, config.cluster.min_storage_mbs)
        rings: dict[str, Ring] = {}
        wanted = config.trainer.n_gpus_per_node if config.trainer.device == "cuda" else sys.maxsize
        with_gpus = [name for name in names if disks[name].get("gpus", 0) >= wanted]
        if len(names) > 1:
            store = {"host": node_address(config, nodes.address), "port": await own.store()}
            for backend, members in (("gloo", names), ("nccl", with_gpus)):
                least = config.cluster.min_network_gbs if backend == "nccl" or len(with_gpus) < 2 else None
                if len(members) > 1:
                    rings[backend] = await probe_ring(ask, members, backend, store, least)
                    findings += rings[backend].findings
                    if rings[backend].findings:
                        break  # NCCL would meet the same nodes, and take longer to fail
        figures = {"disks": disks, "links": {backend: tested.plain() for backend, tested in rings.items()}}
        files.write(logs.parents[1] / "preflight.json", json.dumps(figures, indent=1) + "\n")
        for name in names:
            say(line(name, disks[name], rings))
        finish(findings, names, config.cluster.exclude_bad_nodes, say)
    finally:
        await own.close()
        for peer in nodes.peers.values():
            await peer.send(test=None)


@dataclass(frozen=True)
class Ring:
    """A ring is what the all-reduces of some nodes gave: of pairs, and of all together if they were tested."""

    links: dict[Pair, Result]
    together: Result
    findings: list[NodeFinding]

    def plain(self) -> dict[str, Result]:
        """Return the figures by name, for a file."""
        pairs = {" - ".join(pair): one for pair, one in self.links.items()}
        return pairs | ({"all": self.together} if self.together else {})


async def probe_ring(ask: Ask, names: Sequence[str], backend: str, store: Order, least: float | None) -> Ring:
    """Test the links of a ring of nodes and, if that finds nothing, all nodes together.

    ``least``: the bandwidth below which a link is bad, in GB/s; None: a link is bad only if it does not work, or is far
    slower than the others.
    """
    links: dict[Pair, Result] = {}
    meetings = itertools.count()

    async def test(groups: Sequence[Sequence[str]]) -> list[Result]:
        orders: dict[str, Order] = {}
        for group in groups:
            common = {"kind": backend, **store, "name": f"{backend}-{next(meetings)}", "world": len(group)}
            common |= {"mib": _SIZES[backend], "timeout_s": _ROUND_S}
            orders |= {name: {**common, "rank": rank} for rank, name in enumerate(group)}
        results = await ask(orders)
        return [min((results[name] for name in group), key=lambda one: one.get("gbs", 0.0)) for group in groups]

    await ask({name: {"kind": backend} for name in names})  # they start, each in its own time
    for pairs in rounds(names):
        links |= zip(pairs, await test(pairs), strict=True)
    suspects = without_good_link(names, links, least)
    good = [name for name in names if name not in suspects]
    while good and suspects:
        pairs = list(zip(good, suspects, strict=False))
        links |= zip(pairs, await test(pairs), strict=True)
        suspects = suspects[len(pairs) :]
    findings = judge_links(names, links, backend, least)
    together: Result = {}
    if len(names) > 2 and not findings:
        (together,) = await test([names])
        if "error" in together:
            told = f"the all-reduce over all nodes fails ({backend}): {together['error']}"
            findings.append(NodeFinding(", ".join(names), told, True))
    return Ring(links, together, findings)


def rounds(names: Sequence[str]) -> list[list[Pair]]:
    """Return the links of a ring in rounds, in each of which a node has one link at most."""
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    if len(names) == 2:
        return [pairs[:1]]
    even = len(names) // 2 * 2
    return [group for group in (pairs[0:even:2], pairs[1:even:2], pairs[even:]) if group]


def _limit(values: Iterable[float], least: float | None) -> float:
    """Return what a figure must reach: a third of the median of those that work, and the user's minimum."""
    known = [value for value in values if value > 0]
    return max(least or 0.0, statistics.median(known) / SLOWER if known else 0.0)


def without_good_link(names: Sequence[str], links: Mapping[Pair, Result], least: float | None) -> list[str]:
    """Return the nodes none of whose links works and is fast enough."""
    limit = _limit((one.get("gbs", 0.0) for one in links.values()), least)
    good = {name for pair, one in links.items() if one.get("gbs", 0.0) >= max(limit, 1e-9) for name in pair}
    return [name for name in names if name not in good]


def judge_links(
    names: Sequence[str], links: Mapping[Pair, Result], backend: str, least: float | None
) -> list[NodeFinding]:
    """Return a finding for each node that has no good link.

    If no node has a good link, the cause cannot be told: there is one finding, whose node is "n1, n2".
    """
    speeds = [one["gbs"] for one in links.values() if "gbs" in one]
    others = f"the others have {statistics.median(speeds or [0]):.3g}"
    limit = f"cluster.min_network_gbs is {least}" if least else others

    def told(one: Result) -> str:
        return one.get("error") or f"{one['gbs']:.3g} GB/s; {limit}"

    bad = without_good_link(names, links, least)
    if len(bad) == len(names):
        what = f"no all-reduce between them is good ({backend}): {told(next(iter(links.values())))}"
        return [NodeFinding(", ".join(bad), what, True)]
    findings = []
    for name in bad:
        own = [(pair, one) for pair, one in links.items() if name in pair]
        pair, one = max(own, key=lambda item: item[1].get("gbs", 0.0))
        other = pair[0] if pair[1] == name else pair[1]
        fails = one.get("gbs", 0.0) < (least or 1e-9)
        findings.append(NodeFinding(name, f"all-reduce with {other} ({backend}): {told(one)}", fails))
    return findings


def judge_disks(disks: Mapping[str, Result], least: float | None) -> list[NodeFinding]:
    """Return the findings about the disks of nodes, whose figures are in MB/s."""
    findings = [NodeFinding(name, f"storage: {one['error']}", True) for name, one in disks.items() if "error" in one]
    for what, where in (("write", "the run directory"), ("read", "the run directory"), ("model", "the model")):
        speeds = {name: one[what] for name, one in disks.items() if what in one}
        for name, speed in speeds.items():
            how = "writes to" if what == "write" else "reads"
            if least and speed < least:
                told = f"{how} {where} at {speed:.0f} MB/s; cluster.min_storage_mbs is {least}"
                findings.append(NodeFinding(name, told, True))
            elif speed < _limit(speeds.values(), None):
                median = statistics.median(speeds.values())
                told = f"{how} {where} at {speed:.0f} MB/s; the others at {median:.0f}"
                findings.append(NodeFinding(name, told, False))
    return findings


def line(name: str, one: Result, rings: Mapping[str, Ring]) -> str:
    """Return the figures of a node for the screen; that of the network is the best of its links."""
    parts = []
    for backend, tested in rings.items():
        if speeds := [link.get("gbs", 0.0) for pair, link in tested.links.items() if name in pair]:
            together = f" ({tested.together['gbs']:.3g} over all nodes)" if "gbs" in tested.together else ""
            parts.append(f"{backend} {max(speeds):.3g} GB/s{together}")
    parts += [f"run directory {one['write']:.0f} MB/s written, {one['read']:.0f} read"] if "write" in one else []
    parts += [f"model {one['model']:.0f} MB/s read"] if "model" in one else []
    return f"{name}: {'; '.join(parts) or 'no figures'}"


def finish(findings: Sequence[NodeFinding], names: Sequence[str], exclude: bool, say: Callable[[str], None]) -> None:
    """Say what was found, and raise BadNodes if the job must not go on.

    If more than half of several nodes are bad, the cause is not in the nodes, and none is to be excluded.
    """
    ending = [one for one in findings if one.fails or (exclude and one.node in names)]
    for one in findings:
        if one not in ending:
            say(f"node {one.node} is slow: {one.what}")
    if ending:
        bad = {one.node for one in ending} & set(names)
        most = len(names) > 1 and 2 * len(bad) > len(names)
        raise BadNodes("; ".join(f"{one.node}: {one.what}" for one in ending), [] if most else bad)


def leave_out(names: Sequence[str]) -> None:
    """Tell the batch script, by the file that RL_EXCLUDE names, to requeue the job without these nodes."""
    if note := os.environ.get("RL_EXCLUDE"):
        files.write(Path(note), ",".join(names))
