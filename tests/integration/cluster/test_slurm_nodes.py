"""A real SLURM of two nodes tests them before a job trains, or unpacks their Python; no job gets to rl.train."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rl.quickstart.tasks import make_tasks
from tests.packed_kit import small_environment
from tests.slurm_kit import Slurm

pytestmark = [pytest.mark.slurm]

ROOT = Path(__file__).parents[3]
SCRIPT = "scripts/slurm/train.sbatch"
OURS = ["+experiment=quickstart", "prepare=null", "~quickstart", "data.train_batch_size=2"]
OURS += ["actor_rollout_ref.actor.ppo_mini_batch_size=1"]
ENDS = ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED")


def model(cluster: Slurm, *nodes: str, broken: str = "") -> str:
    """The path of a model, as each node knows it, that is on the disks of some; one cannot be read there."""
    for node in ("n1", "n2"):
        shutil.rmtree(cluster.disk(node) / "model", ignore_errors=True)
    for node in nodes:
        directory = cluster.disk(node) / "model"
        directory.mkdir()
        (directory / "config.json").write_text('{"model_type": "qwen3"}')
        if node == broken:
            (directory / "model.safetensors").mkdir()
        else:
            (directory / "model.safetensors").write_bytes(bytes(1 << 22))
    return "actor_rollout_ref.model.path='${oc.env:NODE_DISK}/model'"


def run(cluster: Slurm, out: Path, nodes: int, *arguments: str, env: str = "") -> tuple[dict[str, str], str]:
    """Run a job; return what became of it, and its output."""
    tasks = out.parent / "tasks"
    make_tasks(tasks, seed=5, n_train=2, n_heldout=1)
    arguments = (f"data.train_files={tasks}/train.parquet", f"data.val_files={tasks}/heldout.parquet", *arguments)
    options = ["--parsable", "--gpus-per-node=0", f"--nodes={nodes}", f"--output={out}", f"--export=ALL{env}"]
    job = cluster.run("sbatch", *options, SCRIPT, *OURS, f"run.root={out.parent}", *arguments, cwd=ROOT).strip()
    return cluster.wait(job, *ENDS, seconds=300), out.read_text()


@pytest.mark.timeout(900)
def test_two_nodes_are_tested_and_their_figures_said(cluster: Slurm, tmp_path: Path) -> None:
    """The job is ended by what comes after the tests: there is no place for copies of the model."""
    keys = ["trainer.nnodes=2", "cluster.interface=lo", "actor_rollout_ref.rollout.agent.num_workers=2"]
    ended, text = run(
        cluster, tmp_path / "out.txt", 2, *keys, "cluster.stage_dir=/proc/none", model(cluster, "n1", "n2")
    )
    assert re.search(r"cluster: node n[12]: cluster\.stage_dir: ", text), text
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "69:0")
    for node in ("n1", "n2"):
        (said,) = [line for line in text.splitlines() if line.startswith(f"cluster: {node}: gloo")]
        assert "GB/s; run directory" in said and "MB/s read" in said
    (figures,) = tmp_path.rglob("preflight.json")
    assert json.loads(figures.read_text())["links"]["gloo"]["n1 - n2"]["gbs"] > 0


@pytest.mark.timeout(900)
def test_a_node_with_a_broken_disk_is_excluded_and_the_job_goes_on_without_it(cluster: Slurm, tmp_path: Path) -> None:
    """The job has one node; without the first one it gets the other, where it ends for another reason."""
    key = model(cluster, "n1", broken="n1")
    ended, text = run(cluster, tmp_path / "out.txt", 1, key, "cluster.exclude_bad_nodes=true")
    assert "cluster: node n1: storage: " in text and "Is a directory" in text, text
    assert "train.sbatch: requeued without n1\n" in text
    assert (ended["Restarts"], ended["ExcNodeList"], ended["BatchHost"]) == ("1", "n1", "n2"), ended
    assert f"{cluster.disk('n2')}/model is no model directory" in text


@pytest.mark.timeout(900)
def test_without_the_key_the_job_ends_and_names_the_node(cluster: Slurm, tmp_path: Path) -> None:
    ended, text = run(cluster, tmp_path / "out.txt", 1, model(cluster, "n1", broken="n1"))
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "69:0", "0"), text
    assert "cluster: node n1: storage: " in text


@pytest.mark.timeout(900)
def test_both_nodes_run_a_packed_python_from_their_own_disk(cluster: Slurm, tmp_path: Path) -> None:
    """The environment is small, and its originals are gone when the job runs, which says what it runs in."""
    clone, base, out = tmp_path / "clone", tmp_path / "python", tmp_path / "out.txt"
    scripts = clone / "scripts" / "slurm"
    scripts.mkdir(parents=True)
    for name in ("common.sh", "packed_env.sh"):
        shutil.copy(ROOT / "scripts" / "slurm" / name, scripts)
    # All nodes are one machine, so that each needs a name of its own for its disk; else RL_LOCAL is the same on all.
    (scripts / "site.sh").write_text(f"export BASH_ENV={tmp_path}/node.sh\n")
    (tmp_path / "node.sh").write_text('[ -z "${NODE_DISK:-}" ] || export RL_LOCAL=$NODE_DISK\n')
    (clone / "rl" / "cluster").mkdir(parents=True)
    (clone / "rl" / "cluster" / "__main__.py").write_text(
        "import os, sys, ours\nprint('ran', os.environ['SLURMD_NODENAME'], sys.executable, ours.NAME, *sys.argv[1:])\n"
    )
    version = small_environment(clone, base)
    packed = subprocess.run([scripts / "packed_env.sh", "pack", tmp_path], cwd=clone, capture_output=True, text=True)
    file = Path(packed.stdout.strip())
    assert packed.returncode == 0 and file.is_file(), packed.stderr
    for gone in (clone / ".venv", base):
        shutil.rmtree(gone)
    options = ["--parsable", "--gpus-per-node=0", "--nodes=2", f"--output={out}"]
    options += [f"--export=ALL,RL_ENV=packed,RL_IMAGE={file}"]
    job = cluster.run("sbatch", *options, str(ROOT / SCRIPT), "a=b", cwd=clone).strip()
    ended = cluster.wait(job, *ENDS, seconds=300)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    for node in ("n1", "n2"):
        place = cluster.disk(node) / f"claude-code-rl-{os.getuid()}" / file.name.removesuffix(".tar.zst") / "venv"
        ours = place / "lib" / version / "site-packages" / "ours.py"
        assert f"ran {node} {place}/bin/python {ours} a=b\n" in text
