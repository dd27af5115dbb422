"""The measuring scripts, as far as they run anywhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
        peaks = measuring.watch(process, lambda: "now")
    assert measuring.peak(peaks, "python", "now") > 1 << 26
    assert measuring.peak(peaks, "python", "then") == measuring.peak(peaks, "nobody") == 0
