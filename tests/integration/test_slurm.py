"""A real SLURM of two nodes, the batch script, and the quickstart at its smallest on both of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.quickstart.tasks import make_tasks
from rollout import audit
from tests.integration.train_kit import WarmStart
from tests.slurm_kit import Slurm, slurm

# Two nodes on one machine take 10 GiB: beside one other trainer, never beside two.
pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.xdist_group("trainers-2")]

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/slurm/train.sbatch"
TWO_NODES = [
    "+experiment=quickstart",
    "trainer.nnodes=2",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
]
OVERRIDES = [
    *TWO_NODES,
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=3",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    # The only checkpoint is the one that the signal asks for.
    "trainer.save_freq=100",
    # A gradient whatever the rewards are.
    "actor_rollout_ref.actor.entropy_coeff=0.05",
]
# Model and tasks are there, and are not made.
GIVEN = ["prepare=null", "~quickstart"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made
    left = [process.cmdline()[:4] for process in made.processes()]
    assert left == [], "jobs have left processes"


def submit(cluster: Slurm, out: Path, *arguments: str) -> str:
    """The job's number. There is no GPU to ask for."""
    options = ["--gpus-per-node=0", f"--output={out}", "--signal=B:USR1@60"]
    return cluster.run("sbatch", "--parsable", *options, *arguments, cwd=ROOT).strip()


def read_until(cluster: Slurm, job: str, out: Path, pattern: str, seconds: float) -> str:
    """The job's output when it has the pattern."""
    end = time.monotonic() + seconds
    while True:
        text = out.read_text() if out.exists() else ""
        if re.search(pattern, text):
            return text
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), text
        assert time.monotonic() < end, text
        time.sleep(0.5)


@pytest.mark.timeout(900)
def test_a_node_that_cannot_read_the_data_is_named(cluster: Slurm, tmp_path: Path) -> None:
    disk, model, out = cluster.disk("n1"), tmp_path / "model", tmp_path / "out.txt"
    make_tasks(disk, seed=5, n_train=2, n_heldout=1)
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    files = [
        "data.train_files='${oc.env:NODE_DISK}/train.parquet'",
        "data.val_files='${oc.env:NODE_DISK}/heldout.parquet'",
    ]
    more = [f"run.root={tmp_path}", *GIVEN, f"actor_rollout_ref.model.path={model}", *files]
    ended = cluster.wait(
        submit(cluster, out, "--nodes=2", SCRIPT, *TWO_NODES, *more), "COMPLETED", "FAILED", seconds=300
    )
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "69:0"), text
    assert f"cluster: node n2: data.train_files: no file {cluster.disk('n2')}/train.parquet\n" in text
    assert not list(tmp_path.rglob("ray-start.log")), "Ray was started"


@pytest.mark.timeout(900)
def test_tasks_of_an_array_job_get_a_line_of_the_sweep_each(cluster: Slurm, tmp_path: Path) -> None:
    """To where the config is refused, which names the seed."""
    options = ["--array=1-2", "--nodes=1"]
    more = ["--sweep", "scripts/slurm/seeds.txt", "+experiment=quickstart", f"run.root={tmp_path}", *GIVEN]
    job = submit(
        cluster, tmp_path / "%a.txt", *options, SCRIPT, *more, "actor_rollout_ref.model.path=/no/policy-${seed}"
    )
    for seed in (1, 2):
        ended = cluster.wait(f"{job}_{seed}", "COMPLETED", "FAILED", seconds=300)
        text = (tmp_path / f"{seed}.txt").read_text()
        assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), text
        assert f"config: actor_rollout_ref.model.path: /no/policy-{seed} is no model directory" in text


@pytest.mark.timeout(900)
def test_a_node_that_is_lost_is_named(cluster: Slurm, warm_start: WarmStart, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    job = submit(cluster, out, "--nodes=2", SCRIPT, f"run.root={tmp_path}", *OVERRIDES, *warm_start.given())
    read_until(cluster, job, out, "all nodes are there; starting rl.train", 300)
    (raylet,) = [one for one in cluster.processes(SLURMD_NODENAME="n2") if one.name() == "raylet"]
    raylet.kill()
    read_until(
        cluster, job, out, r"cluster: node n2: Ray has ended \(exit code 1\); see .*/logs/n2/ray-start\.log", 200
    )
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED", seconds=200)
    logs = tmp_path / "quickstart" / f"slurm-{job}" / "logs"
    assert "raylet" in (logs / "n2" / "ray-start.log").read_text()
    end = time.monotonic() + 200
    while left := list(logs.glob("*/ray_dir*")):  # the notes of where Ray is: each node takes both along
        assert time.monotonic() < end, f"{left}: not ended in order"
        time.sleep(0.5)


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_run_on_two_nodes_is_preempted_requeued_and_finishes(
    cluster: Slurm, warm_start: WarmStart, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, root = tmp_path / "out.txt", tmp_path / "runs"
    job = submit(cluster, out, "--nodes=2", SCRIPT, f"run.root={root}", *OVERRIDES, *warm_start.given())
    read_until(cluster, job, out, r"step 1/3  resolved", 900)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # what SLURM does before the time limit
    text = read_until(cluster, job, out, r"continuing from step", 400)
    saved = re.search(r"stopped by SIGUSR1 after step (\d); the same command continues", text)
    assert saved, text
    assert f"continuing from step {saved[1]} in" in text
    ended = cluster.wait(job, "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED", seconds=900)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), text

    run = root / "quickstart" / f"slurm-{job}"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 2, 3]
    for record in metrics:
        assert record["training/rollout_actor_probs_pearson_corr"] >= 0.99
        assert record["actor/grad_norm"] > 0
        assert record["episode/count"] == 8 and record["infra/failures"] == 0
    # The weights are sharded over both nodes, and both start the episodes of their own agent loop worker.
    assert (
        len(list((run / "checkpoints" / f"global_step_{saved[1]}" / "actor").glob("model_world_size_2_rank_*.pt"))) == 2
    )
    played = {path.stem.rpartition("-")[2] for path in (run / "episode_metrics").glob("*.jsonl")}
    for node in ("n1", "n2"):
        for start in (0, 1):
            logs = (run / "logs" / node / f"ray-{start}").glob("worker-*.out")
            assert played & {path.stem.rpartition("-")[2] for path in logs}, f"{node}, start {start}"
    assert audit.main([str(run)]) == 0
    assert "ok:" in capsys.readouterr().out
