"""The quickstart's preparation is killed in its scripted episodes, and goes on with those that it lacks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rl.config.compose import compose
from rl.quickstart import prepare as module
from rl.run.lease import RunLease
from rl.run.screen import Screen
from rollout.records.reading import Reader
from tests.integration.process_kit import ROOT, plain_environment

SMALL = ["quickstart.train_tasks=3", "quickstart.heldout_tasks=2", "quickstart.warm_episodes=8"]


@pytest.fixture
def no_sft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitation is another test's (test_sft.py)."""

    def copied(config: Any, policy: str, rows: Path, out: Path, *_: Any, **__: Any) -> Path:
        return Path(shutil.copytree(policy, out / "model"))

    monkeypatch.setattr(module, "run_sft", copied)


def prepared(root: Path) -> Path:
    """Prepare in this process; return the directory of the warm start."""
    module.prepare(compose(["+experiment=quickstart", *SMALL, f"run.root={root}"]), Screen())
    (made,) = (root / "prepared").iterdir()
    assert not list(made.glob(".[!r]*"))  # no part is left that is not whole
    return made / "warm"


def records(root: Path) -> list[str]:
    return [record.episode for path in root.glob("prepared/*/*warm/episodes/*.cep") for record in Reader(path)]


@pytest.mark.claude
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_sft")
def test_a_preparation_that_is_killed_goes_on_with_the_same_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    command = [sys.executable, "-m", "rl.quickstart.prepare", *SMALL, f"run.root={killed}"]
    process = subprocess.Popen(command, cwd=ROOT, env=plain_environment())
    while len(done := records(killed)) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = records(killed)
    assert 3 <= len(done) < 8

    warm = prepared(killed)
    assert f"{len(done)} episodes are there from an earlier start" in capfd.readouterr().out
    assert records(killed)[: len(done)] and len(records(killed)) == 8  # none was played twice
    rows = [pyarrow.parquet.read_table(made / "rows.parquet") for made in (warm, prepared(unbroken))]
    assert rows[0].num_rows == 8 and rows[0].equals(rows[1])
    assert (warm / "model" / "config.json").exists()

    # For a policy that is named, only the tasks are made.
    named = ["+experiment=quickstart", *SMALL, f"run.root={tmp_path / 'named'}", f"policy={warm / 'model'}"]
    made = module.prepare(compose(named), Screen())
    (place,) = (tmp_path / "named" / "prepared").iterdir()
    assert sorted(path.name for path in place.glob("[!.]*")) == ["tasks"]
    assert [Path(made[f"data.{split}_files"][0]).exists() for split in ("train", "val")] == [True, True]
    assert len(made) == 2


def test_a_second_run_waits_for_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = RunLease(tmp_path)
    first.take()
    threading.Timer(1.0, first.release).start()
    began = time.monotonic()
    with module._alone(tmp_path, Screen()):
        assert time.monotonic() - began > 0.9
    assert capfd.readouterr().out.count("waiting for another run that prepares the same") == 1
