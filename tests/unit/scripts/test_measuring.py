"""This module tests the measuring scripts, as far as they run anywhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl.plan import plan
from tests.check_kit import composed

ROOT = Path(__file__).parents[3]


def test_the_measuring_script_says_that_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, ROOT / "scripts" / "bench_gpu.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("bench_gpu: no GPU here")


def test_memory_of_processes_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    measuring = importlib.import_module("measuring")
    code = "kept = bytearray(1 << 26)\nimport time\nfor i in range(0, 1 << 26, 4096): kept[i] = 1\ntime.sleep(1)"
    with subprocess.Popen(["sh", "-c", f'{sys.executable} -c "{code}"; true']) as process:
        peaks = measuring.watch(process)
    assert measuring.peak(peaks, "python") > 1 << 26
    assert measuring.peak(peaks, "nobody") == 0


@pytest.mark.parametrize("measured", [{"actor/perf/max_memory_allocated_gb": 33.25}, {}])
def test_the_tables_of_training_on_a_gpu(
    measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The test gives what a run on a GPU leaves; the tables come after the steps were paid for."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench = importlib.import_module("bench_gpu")
    steps = [{"step": number, "timing_s/step": 60.0, "timing_s/gen": 40.0, **measured} for number in (1, 2)]
    monkeypatch.setattr(bench, "train", lambda *_: (Counter({"GPU": 70 << 30} if measured else {}), steps))
    config = composed("+experiment=qwen3_4b", f"run.dir={tmp_path}")
    OmegaConf.resolve(config)
    bench.training(config, plan(config), [], tmp_path, 2)
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert "| 40.0 |" in rows["rollout"]
    for what, size in (("trainer's tensors", "33.2"), ("the GPU, at its fullest", "70.0")):
        assert f"| {size} |" in rows[what] if measured else rows[what].endswith("| 0.0 | not measured |")
