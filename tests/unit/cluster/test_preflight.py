"""A job's nodes are tested before anything is loaded: disks, real all-reduces, and which node is
named.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rl.cluster.link import JobPosition, Link, Listener, NodeError
from rl.cluster.network import interface_address, node_address, use_interface
from rl.cluster.preflight import (
    BadNodes,
    NodeFinding,
    Prober,
    answer,
    disk,
    finish,
    judge_disks,
    leave_out,
    preflight,
    rounds,
)
from rl.cluster.preflight import probe_ring as ring
from rl.config.compose import ConfigError


def config(**cluster: Any) -> DictConfig:
    keys = {"interface": None, "ib_hca": None, "min_network_gbs": None, "min_storage_mbs": None}
    keys |= {"exclude_bad_nodes": False, "start_timeout_s": 60, **cluster}
    return OmegaConf.create(
        {
            "cluster": keys,
            "trainer": {"device": "cpu", "n_gpus_per_node": 1},
            "prepare": None,
            "actor_rollout_ref": {"model": {"path": "some/model"}},
        }
    )


# --- which node is named


@pytest.mark.parametrize("count", range(2, 10))
def test_a_ring_is_tested_in_rounds_in_which_no_node_is_busy_twice(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    tested = rounds(names)
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in tested)
    links = [frozenset(pair) for pairs in tested for pair in pairs]
    assert len(links) == len(set(links)) == (1 if count == 2 else count) and len(tested) <= 3
    assert {name for link in links for name in link} == set(names)


async def named(names: list[str], speeds: Mapping[str, float], least: float | None = None) -> list[NodeFinding]:
    """The findings about nodes of which each can do so many GB/s with any other; 0: it answers with an error."""

    async def ask(orders: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        groups: dict[str, list[str]] = {}
        for name, order in orders.items():
            if "world" in order:
                groups.setdefault(order["name"], []).append(name)
        found = {}
        for group in groups.values():
            assert [orders[name]["rank"] for name in group] == list(range(len(group)))
            slowest = min(speeds[name] for name in group)
            found |= {name: {"gbs": slowest} if slowest else {"error": "timed out"} for name in group}
        return found

    return (await ring(ask, names, "gloo", {"host": "h", "port": 1}, least)).findings


async def test_the_node_is_named_and_not_its_neighbours() -> None:
    names = [f"n{number}" for number in range(7)]
    good = dict.fromkeys(names, 10.0)
    assert await named(names, good) == []
    for count in (1, 2, 3):
        for bad in itertools.combinations(names, count):  # also around a good node, whose links are both bad then
            found = await named(names, good | dict.fromkeys(bad, 0.0))
            assert sorted(one.node for one in found) == sorted(bad)
            assert all(one.fails and "timed out" in one.what for one in found)
    (slow,) = await named(names, good | {"n3": 2.0})
    assert (slow.node, slow.fails) == ("n3", False) and "2 GB/s; the others have 10" in slow.what
    (below,) = await named(names, good | {"n3": 2.0}, least=5)
    assert below.fails and "2 GB/s; cluster.min_network_gbs is 5" in below.what
    (far,) = await named(names, good | {"n3": 2.0}, least=1)
    assert not far.fails, "it is over the minimum, and only slower than the others"


async def test_of_two_nodes_none_can_be_told_from_the_other() -> None:
    (found,) = await named(["n1", "n2"], {"n1": 0.0, "n2": 9.0})
    assert found.node == "n1, n2" and found.fails
    with pytest.raises(BadNodes, match=r"^n1, n2: no all-reduce between them is good \(gloo\): timed out$") as error:
        finish([found], ["n1", "n2"], True, print)
    assert error.value.names == []


def test_slow_nodes_end_the_job_only_where_they_are_excluded() -> None:
    names, said = ["n1", "n2", "n3"], list[str]()
    slow = NodeFinding("n3", "reads the model at 1 MB/s; the others at 900", False)
    finish([slow], names, False, said.append)
    assert said == ["node n3 is slow: reads the model at 1 MB/s; the others at 900"]
    with pytest.raises(BadNodes) as error:
        finish([slow], names, True, said.append)
    assert error.value.names == ["n3"] and str(error.value).startswith("n3: reads")
    with pytest.raises(BadNodes) as error:
        finish([NodeFinding(name, "broken", True) for name in names[:2]], names, True, said.append)
    assert error.value.names == [], "two of three: it is not the nodes"
    with pytest.raises(BadNodes) as error:
        finish([NodeFinding("n1", "broken", True)], ["n1"], True, said.append)
    assert error.value.names == ["n1"]


def test_slow_and_broken_disks_are_found() -> None:
    figures = {"write": 100.0, "read": 200.0}
    disks: dict[str, Any] = {"n1": figures, "n2": figures | {"write": 10.0}, "n3": {"error": "gone"}, "n4": figures}
    found = {(one.node, one.fails): one.what for one in judge_disks(disks, None)}
    assert found == {
        ("n3", True): "storage: gone",
        ("n2", False): "writes to the run directory at 10 MB/s; the others at 100",
    }
    assert [one.node for one in judge_disks(disks, 150) if one.fails and "150" in one.what] == ["n1", "n2", "n4"]


def test_the_disk_is_written_and_read(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(1 << 20))
    speeds = disk(tmp_path, [weights])
    assert set(speeds) == {"write", "read", "model"} and all(speed > 1 for speed in speeds.values())
    assert set(disk(tmp_path, [])) == {"write", "read"} and list(tmp_path.iterdir()) == [weights]
    with pytest.raises(OSError, match="none"):
        disk(tmp_path, [tmp_path / "none"])


# --- real processes


def place(rank: int, port: int) -> JobPosition:
    return JobPosition(rank, 2, [2], f"n{rank + 1}", "7", 0, None, "127.0.0.1", [port], "secret")


@pytest.mark.timeout(300)
async def test_the_head_tests_all_nodes_and_says_their_figures(tmp_path: Path, unused_tcp_port: int) -> None:
    logs = [tmp_path / "logs" / name for name in ("n1", "n2")]
    for directory in logs:
        directory.mkdir(parents=True)
    said: list[str] = []
    nodes = Listener(place(0, unused_tcp_port), said.append)
    await nodes.listen()
    link = await Link.open(place(1, unused_tcp_port), 60)
    await nodes.complete(60)
    answering = asyncio.ensure_future(answer(link, config(), logs[1]))
    await preflight(nodes, config(), logs[0], said.append)
    assert await answering is True
    assert [text.split(":")[0] for text in said] == ["n1", "n2"] and all("gloo" in text for text in said)
    figures = json.loads((tmp_path / "preflight.json").read_text())
    assert figures["links"]["gloo"]["n1 - n2"]["gbs"] > 0.001 and set(figures["disks"]) == {"n1", "n2"}

    answering = asyncio.ensure_future(answer(link, config(), logs[1]))
    with pytest.raises(NodeError, match=r"n1, n2: no all-reduce .* GB/s; cluster\.min_network_gbs is 1000"):
        await preflight(nodes, config(min_network_gbs=1000), logs[0], said.append)
    assert await answering is True
    await link.close()
    await nodes.close(10)


@pytest.mark.timeout(300)
async def test_a_process_that_dies_is_an_error_and_the_next_all_reduce_has_a_new_one(tmp_path: Path) -> None:
    probers = [Prober(config(), tmp_path), Prober(config(), tmp_path)]
    try:
        store = {"kind": "gloo", "host": "127.0.0.1", "port": await probers[0].store(), "mib": 1, "timeout_s": 3}
        assert await asyncio.gather(*(prober.do({"kind": "gloo"}) for prober in probers)) == [{}, {}]
        (probe,) = probers[1]._probes["gloo"]
        probe.kill()
        await probe.wait()

        async def together(name: str) -> list[dict[str, Any]]:
            orders = [{**store, "name": name, "rank": rank, "world": 2} for rank in (0, 1)]
            return list(await asyncio.gather(*(one.do(order) for one, order in zip(probers, orders, strict=True))))

        waited, died = await together("first")
        assert "error" in waited and died["error"].startswith("its process has ended; see")
        assert all(one["gbs"] > 0 for one in await together("second"))
    finally:
        await asyncio.gather(*(prober.close() for prober in probers))


async def test_a_store_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.cluster.preflight.tied", lambda *command: ["false"])
    prober = Prober(config(), tmp_path)
    with pytest.raises(RuntimeError, match=r"has not started; see .*preflight\.log"):
        await prober.store()
    await prober.close()


# --- the interface, and SLURM's commands


def test_the_interface_decides_addresses_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "old")
    use_interface(config())
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_IB_HCA"] == "old"
    assert node_address(config(), "10.1.2.3") == "10.1.2.3"
    use_interface(config(interface="lo", ib_hca="mlx5_0"))
    assert node_address(config(interface="lo"), "10.1.2.3") == interface_address("lo") == os.environ["VLLM_HOST_IP"]
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert os.environ["NCCL_IB_HCA"] == "mlx5_0"
    with pytest.raises(ConfigError, match=r"cluster\.interface: there is no ib0; here are .*lo \(127\.0\.0\.1\)"):
        use_interface(config(interface="ib0"))


def test_the_batch_script_requeues_the_job_without_the_bad_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script itself, with programs that write down what they are asked; test_slurm_nodes.py has a real SLURM."""
    monkeypatch.setenv("RL_EXCLUDE", str(tmp_path / "note"))
    leave_out(["n2", "n4"])
    srun = f"#!/bin/sh\ncp {tmp_path}/note $RL_EXCLUDE\nexit 69\n"
    asked = tmp_path / "asked"
    scontrol = f'#!/bin/sh\necho "$@" >>{asked}\necho JobId=12 ExcNodeList=n9 Requeue=1\n'
    for name, text in (("srun", srun), ("scontrol", scontrol), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "4"}
    done = subprocess.run(
        ["bash", "scripts/slurm/train.sbatch"],
        cwd=Path(__file__).parents[3],
        env=environment | {"SLURM_JOB_ID": "12", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "train.sbatch: requeued without n2,n4\n", done
    commands = ["requeue 12", "update JobId=12 ExcNodeList=n2,n4,n9"]
    assert [line for line in asked.read_text().splitlines() if "show" not in line] == commands
