"""verl's merger makes models of FSDP checkpoints, and an adapter is added to the weights that are served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rl.quickstart.policy import make_policy
from rl.run import weights

SCALE = 8 / 4


def test_an_adapter_is_added_to_the_weights(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    make_policy(tmp_path / "base", seed=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # it is zero until it is trained
            torch.nn.init.normal_(weight, std=0.1)
    state = adapted.state_dict()
    # As verl's checkpoint manager writes them, on one device.
    actor = tmp_path / "actor"
    shutil.copytree(tmp_path / "base", actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')

    weights.merge(actor, actor / "merged", tmp_path / "log")
    merged = AutoModelForCausalLM.from_pretrained(actor / "merged", dtype=torch.float32).state_dict()
    assert merged.keys() == before.keys()
    changed = 0
    for name, weight in before.items():
        parts = [state.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.default.weight") for x in "AB"]
        if parts[0] is not None and parts[1] is not None:
            weight, changed = weight + SCALE * parts[1] @ parts[0], changed + 1
        torch.testing.assert_close(merged[name], weight, rtol=2e-2, atol=2e-2)  # through bfloat16
    assert changed == 4
    left = sorted(path.name for path in actor.iterdir() if path.name.startswith((".m", "m")))
    assert (
        left == [".merge.lock", "merged", "model_world_size_1_rank_0.pt"]
        and not (actor / "merged/lora_adapter").exists()
    )
    (actor / "model_world_size_1_rank_0.pt").unlink()
    weights.merge(actor, actor / "merged", tmp_path / "log")  # does nothing, as the model is there


def test_an_adapter_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lora_adapter").mkdir()
    (tmp_path / "lora_adapter" / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 0}))
    with pytest.raises(weights.ServeError, match=r"no lora_train_meta\.json"):
        weights._add_adapter(tmp_path)


def test_a_failed_merge_is_reported_in_one_line_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.sys, "executable", shutil.which("false"))
    with pytest.raises(weights.ServeError, match=r"cannot be merged: no output; the whole log: "):
        weights.merge(tmp_path, tmp_path / "merged", tmp_path / "log")
    assert not (tmp_path / "merged").exists() and not (tmp_path / ".merged").exists()
