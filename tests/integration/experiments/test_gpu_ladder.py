"""The ladder of proofs on a GPU goes its way on a CPU, with a toy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.train_kit import WarmStart

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.claude,
    pytest.mark.engine,
    pytest.mark.timeout(3600),
]


def test_the_toy_climbs(warm_start: WarmStart, tmp_path: Path) -> None:
    """A server alone, a training run that looks at its engine, one with random weights, and what only a GPU can do."""
    warm_start.lend_to(tmp_path / "work" / "shared", "+experiment=qwen3_4b", "scale=tiny", "quickstart.experts=0")
    command = [sys.executable, ROOT / "scripts" / "gpu_ladder.py", "--device", "cpu", "--out", tmp_path]
    rungs = ("engine", "grpo", "lora", "experts")
    done = subprocess.run([*command, *(word for rung in rungs for word in ("--only", rung))], env={**os.environ})
    results = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert done.returncode == 0, results
    assert {rung: results[rung]["state"] for rung in rungs} == {
        "engine": "passed",
        "grpo": "passed",
        "lora": "not measured: needs a GPU",
        "experts": "passed",
    }
    seen = {figure["what"]: figure["ok"] for rung in rungs for figure in results[rung]["figures"]}
    assert all(
        seen[what]
        for what in (
            "tokens of the KV cache",
            "rows per episode",
            "the engine's reply to one prompt, after an update",
            "requests in the engine after a call was cancelled",
            "KL from engine to trainer, nats per token",
        )
    )
    for process in psutil.process_iter(["cmdline"]):
        assert not any(str(tmp_path) in word for word in process.info["cmdline"] or []), process
