"""Ray on a node of a job: it starts, is started again, ends, and lets the head wait for the others."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rl.cluster.link import JobPosition, NodeError
from rl.cluster.member import unless
from rl.cluster.ray import RayNode, check_gpus, joined
from rl.config.compose import compose
from tests.check_kit import composed


def test_enough_nodes_must_have_their_gpus() -> None:
    config = composed("+experiment=quickstart", trainer__nnodes=2, trainer__n_gpus_per_node=8)
    check_gpus(config, {"n1": 8, "n2": 8, "cpu1": 0})
    with pytest.raises(NodeError, match=r"^n2: 7 GPUs; trainer\.n_gpus_per_node is 8, on 2 nodes$"):
        check_gpus(config, {"n1": 8, "n2": 7})


async def test_a_node_that_does_not_join_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is a stand-in here: one of its two nodes is dead at first."""
    config = composed("+experiment=quickstart", trainer__nnodes=2, cluster__start_timeout_s=0)
    there = [
        {"NodeName": "n1", "Alive": True, "Resources": {"GPU": 1}},
        {"NodeName": "n2", "Alive": False, "Resources": {"GPU": 1}},
    ]
    said: list[str] = []

    def init(address: str, **_: Any) -> None:
        said.append(address)
        if address == "other:1":
            raise ConnectionError("wrong token")

    fake = types.SimpleNamespace(init=init, nodes=lambda: there, shutdown=lambda: said.append("shutdown"))
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(NodeError, match=r"^n2, n3: not in the Ray cluster in 0 s$"):
        await joined("head:1", ["n1", "n2", "n3"], config)
    with pytest.raises(NodeError, match=r"^n1: Ray does not let its own node in: wrong token$"):
        await joined("other:1", ["n1", "n2"], config)
    there[1]["Alive"] = True
    await joined("head:1", ["n1", "n2"], config)
    assert said == ["head:1", "shutdown", "other:1", "head:1", "shutdown"]


# What `ray start` prints: the node is too slow once, up, and then its raylet ends.
_RAY = """\
import pathlib, sys, time
first = pathlib.Path({flag!r})
if not first.exists():
    first.touch()
    raise Exception("The current node timed out during startup. This could happen because ...")
print("Ray runtime started.", flush=True)
time.sleep(1)
log = "\\x1b[2m2026-11-29 21:19:41,804 ERR scripts.py:87 --\\x1b[22m "
print(log + "Some Ray subprocesses exited unexpectedly:\\n" + log + "  \\x1b[1mraylet\\x1b[22m\\x1b[0m [exit code=-9]")
print(log + "Remaining processes will be killed.")
sys.exit(1)
"""


async def test_a_ray_that_is_too_slow_starts_again_and_one_that_ends_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["+experiment=quickstart"])
    config.trainer.device = "cuda"  # there, workers are not forked from a server
    scripts = tmp_path / "ray/scripts/scripts.py"
    scripts.parent.mkdir(parents=True)
    scripts.write_text(_RAY.format(flag=str(tmp_path / "first")))
    (tmp_path / "ray/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("RL_SOCKET_DIR", "RL_BOX_DIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    said: list[str] = []
    place = JobPosition(0, 1, [1], "n1", "7", 0, None, "127.0.0.1", [1], "secret")
    node = RayNode(place, config, tmp_path, said.append)
    try:
        ended = await node.start("127.0.0.1", "--head")
        await unless([ended], node.up())
        assert said == ["n1: Ray took over 30 s to start, which is its own limit; starting it again"]
        log = tmp_path / "ray-start.log"
        with pytest.raises(
            NodeError, match=rf"^n1: Ray has ended \(exit code 1: raylet \[exit code=-9\]\); see {log}$"
        ):
            await ended
    finally:
        await node.stop()
