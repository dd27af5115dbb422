"""verl's SFT trainer on token rows."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from rl.quickstart.policy import make_policy
from rl.sft import run_sft


@pytest.mark.long
def test_fewer_rows_than_a_batch_are_one_batch(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", seed=1)
    table = pyarrow.table({"input_ids": [[5, 6, 7], [8, 9]], "loss_mask": [[0, 1, 1], [0, 1]]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    settings = {"epochs": 1, "lr": 1e-2, "batch_size": 8, "max_length": 16, "seed": 1}
    model = run_sft(tmp_path / "policy", tmp_path / "rows.parquet", tmp_path / "out", log=tmp_path / "log", **settings)
    before, after = (load_file(place / "model.safetensors") for place in (tmp_path / "policy", model))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not before[name].equal(after[name])


CALL = """
import json, sys
from pathlib import Path
from rl.sft import run_sft
given = json.loads(sys.argv[1])
run_sft(**given["settings"], **{name: Path(path) for name, path in given["paths"].items()})
"""


@pytest.mark.long
def test_a_killed_imitation_goes_on_with_the_same_result(tmp_path: Path) -> None:
    """It is killed after its first epochs. The trainer ends with it, and the next call does the others."""
    make_policy(tmp_path / "policy", seed=1)
    rows = [[number, *range(number + 1, number + 9)] for number in range(20, 44)]
    table = pyarrow.table({"input_ids": rows, "loss_mask": [[0] + [1] * 8] * len(rows)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    settings = {"epochs": 6, "lr": 1e-2, "batch_size": 4, "max_length": 16, "seed": 1}
    paths = {"model_dir": tmp_path / "policy", "rows": tmp_path / "rows.parquet"}

    def given(name: str) -> dict[str, Path]:
        return {**paths, "out_dir": tmp_path / name, "log": tmp_path / f"{name}.log"}

    arguments = json.dumps({"settings": settings, "paths": {key: str(path) for key, path in given("killed").items()}})
    process = subprocess.Popen([sys.executable, "-c", CALL, arguments], cwd=Path(__file__).parents[2])
    tracker = tmp_path / "killed" / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not tracker.exists():
        assert process.poll() is None
        time.sleep(0.01)
    (trainer,) = psutil.Process(process.pid).children()
    process.kill()
    trainer.wait(timeout=10)
    reached = int(tracker.read_text())
    assert reached < 36 and reached % 6 == 0

    shown: list[tuple[int, int]] = []
    made = [
        load_file(run_sft(**settings, **given(name), shown=lambda *far: shown.append(far)) / "model.safetensors")
        for name in ("killed", "unbroken")
    ]
    assert shown[-1] == (36, 36), "the user sees how far it is"
    assert made[0].keys() == made[1].keys()
    assert all(made[0][name].equal(made[1][name]) for name in made[0])
    steps = [json.loads(line) for line in (tmp_path / "killed" / "sft_metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 36
    assert run_sft(**settings, **given("killed")) == tmp_path / "killed" / "model"  # nothing is left to be done
