"""This module tests LLaMA-Factory and TRL's DPO at toy size, in the environment that scripts/llamafactory.sh makes."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.ingest import main as ingest
from rl.quickstart.policy import make_policy
from rl.run.vllm_server import SERVED_AS, vllm_server
from rl.sft.other import PROGRAMS, run_dpo, run_llamafactory
from rl.sft.trainer import Passes
from rl.teachers import outcome
from rollout.proxy.standalone import ProxyOptions, StandAlone
from tests.check_kit import composed
from tests.integration.train_kit import WarmStart
from tests.integration.vllm_kit import ONE_PROCESS, UNCOMPILED
from tests.lacks import LACKS
from tests.unit.traces.test_ingest_uses import EDIT, TALK, state, use, write_states

pytestmark = [
    pytest.mark.claude,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PROGRAMS.exists(), reason=f"{LACKS}scripts/llamafactory.sh has not been run"),
]


@pytest.fixture(scope="module")
def warm(warm_start: WarmStart) -> Path:
    """Scripted episodes of the quickstart, half of them resolved, and a policy that imitates them."""
    return warm_start.directory / "warm"


def differ(base: Path, model: Path) -> int:
    """The number of tensors that were trained; all others are the base's."""
    before, after = load_file(base / "model.safetensors"), load_file(model / "model.safetensors")
    assert before.keys() == after.keys()
    return sum(not before[name].equal(after[name]) for name in before)


async def warned_of(url: str, model: Path) -> None:
    """Let the stand-alone proxy look at a server that is in vLLM's default mode of log-probabilities."""
    proxy = StandAlone(ProxyOptions(url, str(model), "qwen3_coder"))
    await proxy.start()
    await proxy.load()
    await proxy.stop()


def served(model: Path, log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Serve a policy with vLLM: it says what its weights say. (Of the server's mode the stand-alone proxy warns.)"""
    prompt = list(range(300, 340))
    known = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = known.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 40:]
    body = {"model": SERVED_AS, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    options = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", *ONE_PROCESS]
    with vllm_server(str(model), log, *options, environment={"HF_HUB_OFFLINE": "1", **UNCOMPILED}) as server:
        data = json.dumps(body | {"return_token_ids": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            (choice,) = json.load(answer)["choices"]
        asyncio.run(warned_of(server.url, model))
    assert choice["token_ids"] == wanted.tolist()
    assert "start it with --logprobs-mode processed_logprobs" in caplog.text


@pytest.mark.parametrize("lora", [0, 4])
def test_llamafactory_trains_on_the_exported_messages(
    warm: Path, tmp_path: Path, lora: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = composed("+experiment=quickstart", f"actor_rollout_ref.model.lora_rank={lora}")
    config.actor_rollout_ref.model.target_modules = ["q_proj", "v_proj"]
    steps: list[int] = []
    # Not warm/model, which knows them by heart.
    base, passes = warm.parent / "policy", Passes(3, 1e-2, 4, 2048, 1)
    made = run_llamafactory(config, str(base), [warm], tmp_path, passes, lambda step, *_: steps.append(step))
    assert made["rows"] == 8 and made["steps"] == 6 == steps[-1]
    assert made["loss"]["last"] < made["loss"]["first"]
    changed = differ(base, tmp_path / "model")
    assert changed == 4 if lora else changed > 10
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists() == bool(lora)
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_text() == (base / name).read_text()
    if lora:  # merged
        served(tmp_path / "model", tmp_path / "vllm.log", caplog)


def test_dpo_prefers_what_resolved(warm: Path, tmp_path: Path) -> None:
    config = composed("+experiment=quickstart")
    made = run_dpo(config, str(warm / "model"), [warm], tmp_path, Passes(4, 1e-4, 2, 2048, 1), lambda *_: None)
    assert made["pairs"] > 0 and made["too_long"] == 0
    state = json.loads((tmp_path / "model" / "trainer_state.json").read_text())
    margins = [entry["rewards/margins"] for entry in state["log_history"] if "rewards/margins" in entry]
    assert margins[0] == 0 and margins[-1] > 0
    assert made["loss"]["last"] < made["loss"]["first"]
    assert differ(warm / "model", tmp_path / "model") > 10


def test_dpo_on_what_teachers_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pairs of rl.teachers become ids, and DPO prefers the teachers' replies; vLLM serves the policy."""
    policy, pairs, out = tmp_path / "policy", tmp_path / "pairs.parquet", tmp_path / "out"
    out.mkdir()
    make_policy(policy, seed=1)
    found = [state(TALK, [EDIT], f"s{n}", system=f"number {n};") for n in range(4)]
    write_states(tmp_path / "s.jsonl", found)
    reply = {"action": {"role": "assistant", "content": [{"type": "text", "text": "I read."}, use("Read", 9)]}}
    outcome.write(tmp_path / "s.jsonl", None, ["t"], {(one.state_id, "t"): reply for one in found}, tmp_path)
    assert ingest(["sft", str(tmp_path / "pairs.jsonl"), "--tokenizer", str(policy), "--out", str(pairs)]) == 0
    config, passes = composed("+experiment=quickstart"), Passes(4, 1e-4, 2, 2048, 1)
    made = run_dpo(config, str(policy), [pairs], out, passes, lambda *_: None)
    assert (made["pairs"], made["too_long"]) == (4, 0) and made["loss"]["last"] < made["loss"]["first"]
    assert differ(policy, out / "model") > 10
    served(out / "model", tmp_path / "vllm.log", caplog)


def test_trl_still_prepares_every_dataset() -> None:
    text = (PROGRAMS.parent / "trl" / "trl" / "trainer" / "dpo_trainer.py").read_text()
    preparing = text[text.index("    def _prepare_dataset(") :].partition("\n    def ")[0]
    assert "self._prepare_dataset(train_dataset," in text and "prompt_ids" in preparing
    assert "column_names" not in preparing  # it does not ask whether the data has token ids already
