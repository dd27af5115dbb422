"""One run at a time writes to a run directory, and a dead one does not keep it for long."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.run import lease
from rl.run.lease import InUse, RunLease
from rollout.sandbox.owner import me

HOLD = """
import sys
from pathlib import Path
from rl.run.lease import RunLease
held = RunLease(Path(sys.argv[1]))
held.take()
print(held.token, flush=True)
sys.stdin.read()
"""
ELSEWHERE = "other/boot/pid:[1]/17/1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "RL_RUN_LEASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lease, "POLL_S", 0.002)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease, until it is killed or its stdin ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def token(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_directory_in_use_is_refused_at_once_and_its_holder_named(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    assert token(other)
    with pytest.raises(InUse, match=rf"run directory {tmp_path} is in use by process {other.pid} on "):
        RunLease(tmp_path).tried()
    other.kill()
    other.wait()
    taken = RunLease(tmp_path, pytest.fail)
    taken.take()  # without waiting for it to be stale
    taken.release()
    assert list(tmp_path.iterdir()) == []


def test_many_processes_get_the_lease_one_after_another(tmp_path: Path) -> None:
    work = "x = Path(sys.argv[1], 'x')\nx.touch(exist_ok=False)\nx.unlink()\nheld.release()"
    script = HOLD.replace("sys.stdin.read()", work)
    script = script.replace(
        "held.take()",
        "while True:\n    try:\n        held.take()\n        break\n    except RuntimeError:\n        pass",
    )
    running = [subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_of_a_job_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a machine that is lost, of which nothing can be known here."""
    (tmp_path / "run.lease").write_text(f"{ELSEWHERE} 42 0 abc")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    mine = RunLease(tmp_path, pytest.fail)
    mine.take()
    assert (tmp_path / "run.lease").read_text() == f"{me()} 42 1 {mine.token}"


def test_the_next_start_of_a_job_waits_for_processes_of_the_last_one(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM has told them to end; a trainer may still be saving."""
    text = (tmp_path / "run.lease", token(other))[0]
    text.write_text(text.read_text().replace(" - 0 ", " 42 0 "))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    said: list[str] = []
    mine = RunLease(tmp_path, said.append)
    assert not mine.tried() and not mine.tried()
    assert len(said) == 1 and f"was in use by process {other.pid} on" in said[0] and "waiting for it to end" in said[0]
    other.kill()
    other.wait()
    mine.take()


def test_a_lease_that_nobody_renews_is_taken_over_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.lease").write_text(f"{ELSEWHERE} 41 0 abc")
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None))
    monkeypatch.setattr(lease, "STALE_S", 20)
    said: list[str] = []
    RunLease(tmp_path, said.append).take()
    assert said == [
        f"{tmp_path} was in use by process 17 on other (job 41); it is taken over if it does not answer for 20 s"
    ]


def test_a_lease_that_is_renewed_elsewhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.lease"
    file.write_text(f"{ELSEWHERE} 41 0 abc")
    mine = RunLease(tmp_path, lambda _: None)
    assert not mine.tried()
    os.utime(file, ns=(1, 1))  # whatever the other machine's clock says
    with pytest.raises(InUse, match=r"process 17 on other \(job 41\)"):
        mine.tried()


def test_a_trainer_holds_the_lease_together_with_the_job_that_started_it(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_RUN_LEASE", token(other))
    trainer = RunLease(tmp_path, pytest.fail)
    trainer.take()
    other.kill()
    other.wait()
    monkeypatch.delenv("RL_RUN_LEASE")
    with pytest.raises(InUse):  # the trainer lives
        RunLease(tmp_path).tried()
    trainer.release()
    assert list(tmp_path.iterdir()) == []


def test_the_trainers_end_leaves_the_lease_to_the_job(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_RUN_LEASE", token(other))
    trainer = RunLease(tmp_path)
    trainer.take()
    trainer.release()
    monkeypatch.delenv("RL_RUN_LEASE")
    with pytest.raises(InUse, match=f"process {other.pid}"):
        RunLease(tmp_path).tried()


def test_a_lease_is_renewed_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    renewed = threading.Event()
    monkeypatch.setattr(lease, "os", SimpleNamespace(**{**vars(os), "utime": lambda _: renewed.set()}))
    mine = RunLease(tmp_path)
    mine.take()
    mine.renew(pytest.fail)
    assert renewed.wait(60)
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_whose_lease_was_taken_over_ends(tmp_path: Path) -> None:
    script = HOLD.replace(
        "print(",
        "from rl.run import lease\nlease.BEAT_S = 0.01\nheld.renew(lambda text: print(text, flush=True))\nprint(",
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert token(process)
        file = tmp_path / "run.lease"
        new = tmp_path / "new"
        new.write_text(f"{ELSEWHERE} 41 0 abc")
        new.rename(file)
        assert process.stdout is not None
        assert "stood still, and process 17 on other (job 41) took the run directory" in process.stdout.read()
        assert process.wait(60) == 1
    assert file.read_text().startswith(ELSEWHERE)
