"""A run joins a Ray cluster that somebody else has started, on two nodes, and leaves it as it was.

It is one of on-policy distillation, with verl's own teacher: a second engine that scores what the policy samples. And
it logs to wandb online.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl import dashboard
from rl.cluster.ray import reachable
from rl.run.programs import free_port
from tests.integration.process_kit import ROOT, command_line, plain_environment
from tests.integration.train_kit import TINY, WarmStart
from tests.wandb_kit import KEY, Wandb, wandb_server

# What another program of the cluster's users would ask: which nodes are there.
ASK = """
import json, ray
ray.init(log_to_driver=False, logging_level=40)
print(json.dumps({node["NodeName"]: node["Resources"] for node in ray.nodes() if node["Alive"]}))
"""


@dataclass
class Ray:
    """A cluster: its address, its directory, the environment of its user, and its nodes' processes, by name."""

    address: str
    directory: Path
    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen[bytes]]

    def add(self, name: str, *how: str) -> None:
        """Start a node as its admin does, from another directory than ours, and wait until the cluster has it."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-name={name}", *how]
        # CPUs are what Ray counts, not real ones: each actor of a run asks for one.
        command += ["--num-cpus=32", "--object-store-memory=200000000", "--min-worker-port=0", "--max-worker-port=0"]
        with open(self.directory / f"{name}.log", "wb") as out:
            self.nodes[name] = subprocess.Popen(
                [*command, f"--dashboard-agent-listen-port={free_port()}"],
                cwd=self.directory, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        end, log = time.monotonic() + 120, self.directory / f"{name}.log"
        while "Ray runtime started" not in log.read_text() or set(self.ask()) != set(self.nodes):
            assert time.monotonic() < end and self.nodes[name].poll() is None, log.read_text()
            time.sleep(0.1)

    def ask(self) -> dict[str, dict[str, float]]:
        """Return the resources of the nodes that are there; {} if the cluster does not answer."""
        asked = self.environment | {"RAY_ADDRESS": self.address}
        done = subprocess.run([sys.executable, "-c", ASK], env=asked, text=True, capture_output=True)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}

    def processes(self) -> set[psutil.Process]:
        alive = [psutil.Process(node.pid) for node in self.nodes.values() if node.poll() is None]
        return {child for node in alive for child in node.children(recursive=True)}

    def agents_during(self, process: subprocess.Popen[str]) -> set[str]:
        """Return the nodes that Claude Code is seen on until the process ends."""
        where = set()
        while process.poll() is None:
            for name, node in self.nodes.items():
                below = psutil.Process(node.pid).children(recursive=True)
                where |= {name for child in below if "/claude" in command_line(child)}
            time.sleep(0.3)
        return where


@pytest.fixture
def joined() -> Iterator[Ray]:
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets are below it: not a long path
    # With a token, which a user of the cluster has in the home directory.
    environment = plain_environment() | {"HOME": str(directory), "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    generate = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    subprocess.run(generate, env=environment, check=True, capture_output=True)
    port = free_port()
    ray = Ray(f"{reachable('127.0.0.1')}:{port}", directory, environment, {})
    try:
        how = [f"--temp-dir={directory}/ray", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        # The places of the trainer and of the teacher are GPUs to verl, also on a CPU.
        ray.add("head", "--head", f"--port={port}", "--num-gpus=2", *how)
        ray.add("plays", f"--address={ray.address}", '--resources={"episodes": 1}')
        yield ray
    finally:
        started = ray.processes()
        for node in reversed(ray.nodes.values()):
            node.terminate()
        for node in ray.nodes.values():
            node.wait(60)
        _, left = psutil.wait_procs(started, 20)
        for process in left:
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
    assert not left, "the cluster did not end"


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(1500)
async def test_a_run_joins_a_ray_cluster_plays_on_its_other_node_and_leaves_it_alone(
    joined: Ray, warm_start: WarmStart, tmp_path: Path
) -> None:
    """The teacher is the policy itself. Its log-probabilities are those of the right tokens, so they are the policy's
    in the first step, before which the weights are equal."""
    before, at_rest = joined.ask(), joined.processes()
    tiny, given = [argument for argument in TINY if not argument.startswith("quickstart.")], warm_start.given()
    (policy,) = [word.partition("=")[2] for word in given if word.startswith("actor_rollout_ref.model.path=")]
    changed = ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    changed += ["cluster.episode_resource=episodes", "actor_rollout_ref.rollout.agent.num_workers=1"]
    changed += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=1"]
    teacher = f"distillation.teacher_models.teacher_model.model_path={policy}"
    run = tmp_path / "run"
    arguments = ["+experiment=quickstart", "+distill=on_policy", *tiny, *changed, *given, teacher, f"run.dir={run}"]
    async with wandb_server() as server:
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "rl.train", *arguments],
            cwd=ROOT, env=joined.environment | online | {"RAY_ADDRESS": joined.address}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        seen = asyncio.create_task(asyncio.to_thread(joined.agents_during, process))
        said, _ = await asyncio.to_thread(process.communicate)
        where = await seen
    log = run / "run.log"
    assert process.returncode == 0, said + (log.read_text()[-3000:] if log.exists() else "")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in metrics:
        assert record["episode/count"] == 8 and record["infra/failures"] == 0
        assert record["training/rollout_actor_probs_pearson_corr"] >= 0.999
    assert metrics[0]["actor/distillation/abs_loss"] < 1e-4 and metrics[0]["response_length/mean"] > 0
    check_arrived(server, run.name, metrics)
    assert where == {"plays"}, "the episodes were played on the node that has the resource"
    assert joined.ask() == before, "the cluster is as it was"
    assert all(node.poll() is None for node in joined.nodes.values())
    assert all(one.is_running() for one in at_rest if "ray::IDLE" not in command_line(one))
    end = time.monotonic() + 60
    ours = []
    while time.monotonic() < end and (
        ours := [
            line
            for one in joined.processes() - at_rest
            if "ray::" in (line := command_line(one)) and "IDLE" not in line
        ]
    ):
        time.sleep(0.5)
    assert ours == [], "actors of the run live on"
    assert os.listdir(run / "episode_metrics")


def check_arrived(server: Wandb, name: str, metrics: list[dict[str, Any]]) -> None:
    """Check that wandb has each figure of metrics.jsonl once, at its step, and a table of episodes."""
    assert server.unknown == [] and server.refused == []
    run = server.runs.pop(name)
    assert server.runs == {} and run.ended == [0]
    assert run.config["trainer"]["value"]["total_training_steps"] == 2
    assert [row["_step"] for row in run.rows] == [record["step"] for record in metrics] == [1, 2]
    for row, record in zip(run.rows, metrics, strict=True):
        logged = {key: value for key, value in record.items() if key not in ("step", "time") and value is not None}
        assert {key: row.get(key) for key in logged} == logged
    tables = [row[dashboard.SAMPLES] for row in run.rows if dashboard.SAMPLES in row]
    stored = [json.loads(server.stored[f"{name}/{table['path']}"]) for table in tables]
    assert stored and all(one["data"] and "reward" in one["columns"] for one in stored)
