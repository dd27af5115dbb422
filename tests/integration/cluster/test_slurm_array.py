"""Array jobs run on a real SLURM of two nodes: each task of the array admits the tasks of a shard, or pulls images."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.task import load_tasks
from rl.data.admit import main
from rl.quickstart.tasks import make_tasks
from rl.run.journal import read_journal
from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import get_engine
from tests.check_kit import write
from tests.datasets import snapshot_row
from tests.docker_kit import registry, small_image
from tests.slurm_kit import Slurm

pytestmark = [pytest.mark.slurm]

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(600)
def test_an_array_job_admits_a_task_file(cluster: Slurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tasks(tmp_path, seed=5, n_train=4, n_heldout=1)
    tasks, out = tmp_path / "train.parquet", tmp_path / "admitted.parquet"
    command = [str(tasks), "--out", str(out), "--tries", "1", "--jobs", "2", "sandbox.isolation=none"]

    def submit(array: str) -> str:
        options = [f"--array={array}", f"--output={tmp_path}/%a.txt", "--parsable", "--export=NONE"]
        return cluster.run(
            "sbatch", *options, "scripts/slurm/array.sbatch", "rl.data.admit", *command, cwd=ROOT
        ).strip()

    job = submit("1-2")
    for number in (1, 2):
        ended = cluster.wait(f"{job}_{number}", "COMPLETED", "FAILED", seconds=300)
        text = (tmp_path / f"{number}.txt").read_text()
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
        assert "2 pass, 0 flaky, 0 broken, 0 undecided" in text
        assert len(read_journal(tmp_path / f"admitted.{number}-of-2.admission.jsonl")[0]) == 4
    assert not out.exists()
    capfd.readouterr()
    assert main([*command, "--merge"]) == 0
    assert capfd.readouterr().out.startswith("4 pass,") and len(load_tasks(out)) == 4
    job = submit("2")  # a part of an array does not tell how many shards there are
    ended = cluster.wait(f"{job}_2", "COMPLETED", "FAILED", seconds=120)
    assert (
        ended["ExitCode"] == "2:0"
        and "--array is not 1-1; give 1-N, or set RL_SHARDS" in (tmp_path / "2.txt").read_text()
    )


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_an_array_job_pulls_the_images_of_a_task_file(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes are one machine, so both shards end in the same engine. What is pulled is noted in a cache of ours."""
    cache = str(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(images, "_known", {})
    with registry("shard/one", image=small_image()) as (one, asked):
        names = [one, one.replace("one", "two")]
        write(tmp_path / "tasks.parquet", [snapshot_row(name[-3:], image=name) for name in names])
        options = ["--array=1-2", f"--output={tmp_path}/%a.txt", "--parsable", "--cpus-per-task=2"]
        command = ["scripts/slurm/images.sbatch", str(tmp_path / "tasks.parquet"), "sandbox=docker"]
        try:
            job = cluster.run("sbatch", *options, f"--export=ALL,XDG_CACHE_HOME={cache}", *command, cwd=ROOT).strip()
            for number, name in enumerate(names, 1):
                ended = cluster.wait(f"{job}_{number}", "COMPLETED", "FAILED", seconds=400)
                text = (tmp_path / f"{number}.txt").read_text()
                assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
                assert "images: 1 to pull; about" in text and text.endswith(
                    f"images: 1 of 1 ready\n{name[-3:]}: no residue\n"
                )
                assert any(path.startswith(f"/v2/shard/{name[-3:]}/manifests/") for path in asked)
                assert images.missing(get_engine(), [name]) == []
        finally:
            images.evict(get_engine(), 0)
    assert images.missing(get_engine(), names) == names
