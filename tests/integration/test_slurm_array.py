"""An array job on a real SLURM of two nodes admits the tasks of a file, a shard per task of the array."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.task import load_tasks
from rl.batch import read_journal
from rl.data.admit import main
from rl.quickstart.tasks import make_tasks
from tests.slurm_kit import Slurm

pytestmark = [pytest.mark.long, pytest.mark.slurm]

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_an_array_job_admits_a_task_file(cluster: Slurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tasks(tmp_path, seed=5, n_train=4, n_heldout=1)
    tasks, out = tmp_path / "train.parquet", tmp_path / "admitted.parquet"
    command = [str(tasks), "--out", str(out), "--tries", "1", "--jobs", "2", "sandbox.isolation=none"]

    def submit(array: str) -> str:
        options = [f"--array={array}", f"--output={tmp_path}/%a.txt", "--parsable"]
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
