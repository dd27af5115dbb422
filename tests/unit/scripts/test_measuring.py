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
from rl.quickstart.policy import make_tokenizer
from rollout.records import NodeRecord, RecordWriter, pack_ids
from tests.check_kit import composed
from tests.kit import empty_record
from tests.unit.commands.test_help import sampled

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
        peaks = measuring.watch(process, lambda: "now")
    assert measuring.peak(peaks, "python", "now") > 1 << 26
    assert measuring.peak(peaks, "python", "then") == measuring.peak(peaks, "nobody") == 0


@pytest.mark.parametrize("measured", [{"actor/perf/max_memory_allocated_gb": 33.25}, {}])
def test_the_tables_of_training_on_a_gpu(
    measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What a run on a GPU leaves is given; the tables come after the steps were paid for."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench = importlib.import_module("bench_gpu")
    steps = [{"step": number, "timing_s/step": 60.0, "timing_s/gen": 40.0, **measured} for number in (1, 2)]
    monkeypatch.setattr(bench, "train", lambda *_: (Counter({("update", "GPU"): 70 << 30} if measured else {}), steps))
    config = composed("+experiment=qwen3_4b", f"run.dir={tmp_path}")
    OmegaConf.resolve(config)
    bench.training(config, plan(config), [], tmp_path, 2)
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert "| 40.0 |" in rows["rollout"]
    for what, size in (("trainer's tensors", "33.2"), ("the GPU, at its fullest", "70.0")):
        assert f"| {size} |" in rows[what] if measured else rows[what].endswith("| 0.0 | not measured |")


def test_what_records_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Four episodes of 20 s, two at a time and in two files, are 40 s of wall time."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench = importlib.import_module("bench_records")
    run, size = tmp_path / "run", 0
    for worker in range(2):
        writer = RecordWriter(run / "episodes", f"{worker}")
        for number in range(2):
            node = NodeRecord(-1, pack_ids(list(range(50))))
            times = {"started": 20.0 * number, "timing": {"total": 20.0}}
            writer.append(empty_record(version=3, episode=f"{worker}{number}", nodes=[node], **times))
        writer.close()
        size += writer.path.stat().st_size
    bench.measure(run)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line]
    rows = {name.strip(): figure.strip() for _, name, figure, _ in lines}
    assert rows["episodes, attempts that were lost included"] == "4"
    assert rows["KB of an episode: mean, p50, p95"].startswith(f"{size / 4e3:.2f}, ")
    assert rows["bytes per token"] == f"{size / 200:.2f}"
    assert rows["share of the wall time"].endswith(" of 40 s")
    assert rows["share of the episodes' own time"].endswith(" of 80 s")
    assert list(tmp_path.iterdir()) == [run]


def test_copies_of_records_are_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """They differ in what no two episodes may have in common, and their seals are right: nothing is found."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    writer = RecordWriter(tmp_path / "episodes", "0")
    record = sampled(tokenizer.encode("some words"), "some words")
    record.model, record.nodes[1].message_id = str(tmp_path / "model"), "msg_0123456789abcdef00000000"
    record.nodes[1].stop_reason = "end_turn"
    writer.append(record)
    writer.close()
    assert importlib.import_module("bench_records").audit(tmp_path, 3) == 0
    said = capfd.readouterr().out
    assert said.startswith("ok: 3 episodes, 3 replies") and " 0 findings" in said and "| episodes, MB | 3, 0 |" in said
