"""verl's SFT trainer on token rows."""

from pathlib import Path

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
