"""This module tests a real SLURM of two nodes, the batch script, and the quickstart at its smallest on both of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from rl.quickstart.tasks import make_tasks
from rl.run.lease import RunLease
from rollout import audit
from tests.integration.train_kit import WarmStart
from tests.slurm_kit import KILL_WAIT_S, Slurm

# Two nodes on one machine take 10 GiB: beside one other trainer, never beside two.
pytestmark = [pytest.mark.slurm]

ROOT = Path(__file__).parents[3]
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
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    # The only checkpoint is the one that the signal asks for.
    "trainer.save_freq=100",
    # A gradient whatever the rewards are.
    "actor_rollout_ref.actor.entropy_coeff=0.05",
]
SPLITS = (("train", "train"), ("val", "heldout"))
# Model and tasks are there, and are not made.
GIVEN = ["prepare=null", "~quickstart"]


def submit(cluster: Slurm, out: Path, *arguments: str, cwd: Path = ROOT) -> str:
    """The job's number. There is no GPU to ask for."""
    options = ["--gpus-per-node=0", f"--output={out}", "--signal=B:USR1@60"]
    return cluster.run("sbatch", "--parsable", *options, *arguments, cwd=cwd).strip()


def until_trapped(cluster: Slurm, job: str) -> None:
    """Wait until the batch script handles signals. Before that it is a shell that starts, and dies of one."""
    end = time.monotonic() + 100
    while True:
        for process in cluster.processes(SLURM_JOB_ID=job):
            with contextlib.suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
                if "slurm_script" in " ".join(process.cmdline()) and caught >> (signal.SIGUSR1 - 1) & 1:
                    return
        assert time.monotonic() < end and cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), cluster.job(job)
        time.sleep(0.05)


def read_until(cluster: Slurm, job: str, out: Path, pattern: str, seconds: float, *ends: str) -> str:
    """The job's output when it has the pattern, which the job may only have in one of the states ``ends``."""
    end = time.monotonic() + seconds
    while True:
        text = out.read_text() if out.exists() else ""
        if re.search(pattern, text):
            return text
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING", *ends), text
        assert time.monotonic() < end, text
        time.sleep(0.5)


def loop_workers(cluster: Slurm, job: str) -> list[psutil.Process]:
    """The job's two agent loop workers. A process may have the name of one for a moment before it is idle."""
    end = time.monotonic() + 100
    while True:
        found = [
            one for one in cluster.processes(SLURM_JOB_ID=job) if "ray::AgentLoopWorker" in " ".join(one.cmdline())
        ]
        if len(found) == 2:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


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
def test_the_first_node_is_named_too_and_its_job_needs_nothing_of_the_submitting_shell(
    cluster: Slurm, tmp_path: Path
) -> None:
    """The nodes of the test above change places, and the environment is that of SBATCH_EXPORT=NONE."""
    disk, model, out = cluster.disk("n2") / "other", tmp_path / "model", tmp_path / "out.txt"
    make_tasks(disk, seed=5, n_train=2, n_heldout=1)
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    files = [f"data.{split}_files='${{oc.env:NODE_DISK}}/other/{name}.parquet'" for split, name in SPLITS]
    more = [f"run.root={tmp_path}", *GIVEN, f"actor_rollout_ref.model.path={model}", *files]
    job = submit(cluster, out, "--nodes=2", "--export=NONE", SCRIPT, *TWO_NODES, *more)
    ended = cluster.wait(job, "COMPLETED", "FAILED", seconds=300)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "69:0"), text
    assert f"cluster: node n1: data.train_files: no file {cluster.disk('n1')}/other/train.parquet\n" in text


@pytest.mark.timeout(900)
def test_nodes_without_the_environment_are_named(cluster: Slurm, tmp_path: Path) -> None:
    """The first node is so slow that its shell dies of SLURM's SIGTERM before it can handle it."""
    clone, out = tmp_path / "clone", tmp_path / "out.txt"
    (clone / "rl" / "cluster").mkdir(parents=True)
    (clone / "rl" / "cluster" / "__main__.py").touch()
    slow = tmp_path / "slow.sh"
    slow.write_text('[ "${SLURM_PROCID:-}" != 0 ] || sleep 600\n')
    (clone / "scripts" / "slurm").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "slurm" / "common.sh", clone / "scripts" / "slurm")
    (clone / "scripts" / "slurm" / "site.sh").write_text(f"export BASH_ENV={slow}\n")
    job = submit(cluster, out, "--nodes=2", str(ROOT / SCRIPT), "+experiment=quickstart", cwd=clone)
    ended = cluster.wait(job, "COMPLETED", "FAILED", seconds=300)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "69:0"), text
    assert re.search(rf"cluster: node n2: no {clone}/\.venv/bin/python; run scripts/setup\.sh", text)


@pytest.mark.timeout(900)
def test_a_node_that_is_lost_is_named(cluster: Slurm, warm_start: WarmStart, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    job = submit(cluster, out, "--nodes=2", SCRIPT, f"run.root={tmp_path}", *OVERRIDES, *warm_start.given())
    read_until(cluster, job, out, "all nodes are there; starting rl.train", 300)
    logs = tmp_path / "quickstart" / f"slurm-{job}" / "logs"
    for note in (logs / "n1" / "ray_dir", logs / "n2" / "ray_dir"):
        sockets = Path(note.read_text())
        assert (sockets / "ray").is_dir() and sockets.stat().st_mode & 0o077 == 0, "others could enter"
    (raylet,) = [one for one in cluster.processes(SLURMD_NODENAME="n2") if one.name() == "raylet"]
    raylet.kill()
    read_until(
        cluster, job, out, r"node n2: Ray has ended \(exit code 1: raylet \[.*\); see .*/logs/n2/ray-start\.log", 200
    )
    ended = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", seconds=300)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "69:0"), out.read_text()
    assert "raylet" in (logs / "n2" / "ray-start.log").read_text()
    end = time.monotonic() + 200
    while left := list(logs.glob("*/ray_dir*")):  # the notes of where Ray is: each node takes both along
        assert time.monotonic() < end, f"{left}: not ended in order"
        time.sleep(0.5)
    assert not (logs.parent / "run.lease").exists()


@pytest.mark.timeout(900)
def test_a_run_directory_in_use_is_left_alone(cluster: Slurm, tmp_path: Path) -> None:
    """The job asks for GPUs with a type, which no program uses."""
    run, out = tmp_path / "mine", tmp_path / "out.txt"
    run.mkdir()
    lease = RunLease(run)
    lease.take()
    options = ["--nodes=2", "--gpus-per-node=h100:2"]
    job = submit(cluster, out, *options, SCRIPT, *TWO_NODES, f"run.root={tmp_path}", f"run.dir={run}")
    ended = cluster.wait(job, "COMPLETED", "FAILED", seconds=300)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), text
    assert f"cluster: run directory {run} is in use by process {os.getpid()} on" in text
    assert [path.name for path in run.iterdir()] == ["run.lease"]
    assert ended["TresPerNode"] == "gres:gpu:h100:2"


@pytest.mark.timeout(900)
def test_of_two_jobs_with_one_run_directory_one_is_refused_and_names_the_other(cluster: Slurm, tmp_path: Path) -> None:
    """They start at the same time, on a node each."""
    run = tmp_path / "mine"
    arguments = ["--nodes=1", SCRIPT, "+experiment=quickstart", f"run.root={tmp_path}", f"run.dir={run}"]
    jobs = [submit(cluster, tmp_path / f"{number}.txt", *arguments) for number in (1, 2)]
    said = r"cluster: (all nodes are there|run directory .* is in use)"
    texts = [
        read_until(cluster, job, tmp_path / f"{number}.txt", said, 300, "FAILED") for number, job in enumerate(jobs, 1)
    ]
    (refused,) = [number for number, text in enumerate(texts) if "is in use" in text]
    held = jobs[1 - refused]
    assert re.search(rf"cluster: run directory {run} is in use by process \d+ on \S+ \(job {held}\);", texts[refused])
    assert "all nodes are there" not in texts[refused]
    ended = cluster.wait(jobs[refused], "COMPLETED", "FAILED", seconds=100)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    assert cluster.job(held)["JobState"] == "RUNNING" and f" {held} 0 " in (run / "run.lease").read_text()
    cluster.run("scancel", held)
    cluster.wait(held, "CANCELLED", seconds=200)


@pytest.mark.timeout(900)
def test_a_job_whose_time_is_shorter_than_its_grace_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    job = submit(cluster, out, "--nodes=1", "--time=10", SCRIPT, "+experiment=quickstart", f"run.root={tmp_path}")
    ended = cluster.wait(job, "COMPLETED", "FAILED", seconds=300)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), text
    assert re.search(r"config: run\.grace_s=1800 is not less than the \d+ s that the job has", text)


@pytest.mark.timeout(900)
def test_a_warning_at_the_start_requeues_the_job_and_the_nodes_are_free_at_once(cluster: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    job = submit(cluster, out, "--nodes=2", SCRIPT, *TWO_NODES, f"run.root={tmp_path}")
    until_trapped(cluster, job)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    cluster.wait(job, "PENDING", "COMPLETING", "FAILED", seconds=200)
    began = time.monotonic()
    ended = cluster.wait(job, "PENDING", "FAILED", seconds=200)
    assert time.monotonic() - began < KILL_WAIT_S, "the nodes were held until SLURM killed the job"
    assert (ended["JobState"], ended["Restarts"]) == ("PENDING", "1"), out.read_text()
    assert not list(tmp_path.rglob("ray-start.log"))
    cluster.run("scancel", job)


@pytest.mark.timeout(900)
def test_a_job_that_must_not_be_requeued_says_so(cluster: Slurm, tmp_path: Path) -> None:
    """With --gres instead of --gpus-per-node, and memory by number, for sites that want it so."""
    out = tmp_path / "out.txt"
    options = ["--nodes=1", "--no-requeue", "--gres=gpu:h100:1", "--mem=100M"]
    job = submit(cluster, out, *options, SCRIPT, "+experiment=quickstart", f"run.root={tmp_path}")
    until_trapped(cluster, job)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    ended = cluster.wait(job, "COMPLETED", "FAILED", seconds=200)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "75:0"), text
    assert "train.sbatch: SLURM will not requeue this job (Requeue=0)" in text
    assert f"train.sbatch: SLURM has not requeued job {job}; to continue" in text
    assert "gres:gpu:h100:1" in ended["TresPerNode"]


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


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_run_on_two_nodes_is_preempted_requeued_and_finishes(
    cluster: Slurm, warm_start: WarmStart, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, root = tmp_path / "out.txt", tmp_path / "runs"
    job = submit(cluster, out, "--nodes=2", SCRIPT, f"run.root={root}", *OVERRIDES, *warm_start.given())
    read_until(cluster, job, out, r"step 1/2  resolved", 900)
    workers = loop_workers(cluster, job)
    above = {one for worker in workers if (one := worker.parent()) and "serve" in one.cmdline()}
    assert len(workers) == len(above) == 2, "each is a fork of its node's server"
    assert {one.nice() for one in workers} == {psutil.Process().nice()}, "Ray lowers priorities"
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
    assert [record["step"] for record in metrics] == [1, 2]
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
