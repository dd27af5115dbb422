"""This module tests LLaMA-Factory and TRL's DPO at toy size, in the environment that scripts/llamafactory.sh makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.sft.other import PROGRAMS, run_dpo, run_llamafactory
from rl.tune.trainer import Passes
from tests.check_kit import composed
from tests.integration.train_kit import WarmStart

pytestmark = [
    pytest.mark.long,
    pytest.mark.claude,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PROGRAMS.exists(), reason="scripts/llamafactory.sh has not been run"),
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripted episodes of the quickstart, a quarter of them resolved, and a policy that imitates them a little."""
    return WarmStart.make(tmp_path_factory.mktemp("warm")).directory / "warm"


def differ(base: Path, model: Path) -> int:
    """The number of tensors that were trained; all others are the base's."""
    before, after = load_file(base / "model.safetensors"), load_file(model / "model.safetensors")
    assert before.keys() == after.keys()
    return sum(not before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize("lora", [0, 4])
def test_llamafactory_trains_on_the_exported_messages(warm: Path, tmp_path: Path, lora: int) -> None:
    config = composed("+experiment=quickstart", f"actor_rollout_ref.model.lora_rank={lora}")
    config.actor_rollout_ref.model.target_modules = ["q_proj", "v_proj"]
    steps: list[int] = []
    base, passes = warm / "model", Passes(2, 1e-2, 8, 2048, 1)
    made = run_llamafactory(config, str(base), [warm], tmp_path, passes, lambda step, *_: steps.append(step))
    assert made["rows"] == 24 and made["steps"] == 6 == steps[-1]
    assert made["loss"]["last"] < made["loss"]["first"]
    changed = differ(base, tmp_path / "model")
    assert changed == 4 if lora else changed > 10
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists() == bool(lora)
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_text() == (base / name).read_text()


def test_dpo_prefers_what_resolved(warm: Path, tmp_path: Path) -> None:
    config = composed("+experiment=quickstart")
    made = run_dpo(config, str(warm / "model"), [warm], tmp_path, Passes(4, 1e-4, 2, 2048, 1), lambda *_: None)
    assert made["pairs"] > 0 and made["too_long"] == 0
    state = json.loads((tmp_path / "model" / "trainer_state.json").read_text())
    margins = [entry["rewards/margins"] for entry in state["log_history"] if "rewards/margins" in entry]
    assert margins[0] == 0 and margins[-1] > 0
    assert made["loss"]["last"] < made["loss"]["first"]
    assert differ(warm / "model", tmp_path / "model") > 10
