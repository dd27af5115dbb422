"""This module tests verl's SFT trainer on token rows."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rl.config.compose import compose
from rl.ingest import main as ingest
from rl.quickstart.policy import make_policy
from rl.run.screen import Screen
from rl.sft.fine_tune import tune
from rl.traces.rows import TOKENIZER, digest
from tests.export_kit import TOOLS
from tests.ingest_kit import write_session
from tests.kit import full_at

ROOT = Path(__file__).parents[3]


def test_recorded_conversations_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Session files of another program become states, rows by the policy's tokenizer, and a trained policy.

    Its rows are fewer than a batch, and so all of them are one batch, once in each of two passes.
    """
    policy, states, rows = tmp_path / "policy", tmp_path / "s.jsonl", tmp_path / "given.parquet"
    make_policy(policy, seed=1)
    sessions = [tmp_path / f"{n}.jsonl" for n in range(4)]
    for file in sessions:
        write_session(file, turns=2, text=f"Some text {file.stem}. " * 5, name=file.stem)
    (tmp_path / "system.txt").write_text("Repair.")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    known = ["--system", str(tmp_path / "system.txt"), "--tools", str(tmp_path / "tools.json")]
    assert ingest(["claude-code", *map(str, sessions), *known, "--out", str(states)]) == 0
    assert ingest(["sft", str(states), "--tokenizer", str(policy), "--out", str(rows)]) == 0
    changes = ["sft.epochs=2", "sft.lr=1e-3", "trainer.logger=[file]", f"sft.data=[{rows}]"]
    config = compose(["+experiment=quickstart", f"run.root={tmp_path}", *changes])
    assert config.sft.batch_size > 4
    for name in ("run", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    made = tune(config, str(policy), [rows], tmp_path / "run", 1, Screen())
    assert (made["given"], made["rows"], made["episodes"], made["too_long"]) == (4, 4, 0, 0)
    assert made["steps"] == 2
    assert made["loss"]["last"] < made["loss"]["first"]
    before, after = (load_file(place / "model.safetensors") for place in (policy, tmp_path / "run" / "model"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not before[name].equal(after[name])
    assert [one for one in os.listdir(tmp_path / "temporary") if not one.startswith("torchinductor_")] == []


def test_a_full_disk_is_one_line_and_leaves_no_rows(tmp_path: Path) -> None:
    policy, rows = tmp_path / "policy", tmp_path / "given.parquet"
    make_policy(policy, seed=1)
    made_by = {TOKENIZER: digest(AutoTokenizer.from_pretrained(policy))}
    ids = [random.Random(n).choices(range(300), k=2000) for n in range(400)]
    table = pyarrow.table({"input_ids": ids, "loss_mask": [[0] + [1] * 1999] * 400})
    pyarrow.parquet.write_table(table.replace_schema_metadata(made_by), rows)
    given = ["+experiment=quickstart", "prepare=null", "~quickstart", f"data=[{rows}]", f"policy={policy}"]
    command = [sys.executable, "-m", "rl.sft", *given, f"run.root={tmp_path / 'runs'}", "trainer.logger=[file]"]
    done = subprocess.run(full_at(500_000, command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("stopped: ") and done.stderr.count("\n") == 1, done
    assert "File too large" in done.stderr and done.stdout.splitlines()[-1].startswith("continue  ")
    assert not [one for one in (tmp_path / "runs").rglob("*") if "rows" in one.name or "sft.json" in one.name]


CALL = """
import sys
from pathlib import Path
from rl.config.compose import compose
from rl.sft.trainer import Passes, run_sft
root, name = Path(sys.argv[1]), sys.argv[2]
config = compose(["+experiment=quickstart", "trainer.logger=[]"])
passes = Passes(12, 1e-2, 8, 16, 1)
far = lambda step, steps, _: print(step, steps, flush=True)
run_sft(config, f"{root}/policy", root / "rows.parquet", root / name, passes, far)
"""


def test_a_killed_imitation_goes_on_with_the_same_result(tmp_path: Path) -> None:
    """It is killed after its first epochs, of which every second one is saved. The trainer ends with it, and the next
    call does the others."""
    make_policy(tmp_path / "policy", seed=1)
    rows = [[number, *range(number + 1, number + 9)] for number in range(20, 44)]
    table = pyarrow.table({"input_ids": rows, "loss_mask": [[0] + [1] * 8] * len(rows)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    command = [sys.executable, "-c", CALL, str(tmp_path)]
    process = subprocess.Popen([*command, "killed"], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    tracker = tmp_path / "killed" / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not tracker.exists():
        assert process.poll() is None
        time.sleep(0.01)
    (trainer,) = psutil.Process(process.pid).children()
    process.kill()
    trainer.wait(timeout=10)
    reached = int(tracker.read_text())
    assert reached < 36 and reached % 6 == 0

    said = [
        subprocess.run([*command, name], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.split("\n")
        for name in ("killed", "unbroken")
    ]
    assert [line for line in said[1] if line] == [f"{step} 36" for step in range(1, 37)], "the user sees how far it is"
    assert said[0][0] == f"{reached + 1} 36"
    made = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "unbroken")]
    assert made[0].keys() == made[1].keys()
    assert all(made[0][name].equal(made[1][name]) for name in made[0])
    steps = [json.loads(line) for line in (tmp_path / "killed" / "sft_metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 36
    trained = (tmp_path / "killed" / "model").stat().st_mtime_ns
    subprocess.run([*command, "killed"], cwd=ROOT, check=True)  # nothing is left to be done
    assert (tmp_path / "killed" / "model").stat().st_mtime_ns == trained
