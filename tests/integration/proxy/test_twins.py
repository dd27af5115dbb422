"""This module tests the toys that stand for Qwen3.5 (configs/twin) in vLLM on a CPU, beside transformers.

vLLM has linear attention in bfloat16 only, and how far bfloat16 takes a log-probability depends on the weights: those
of a toy are large, so that transformers itself differs by 0.02 between float32 and bfloat16. So the engine is measured
by that: it must be no further from float32 than transformers in bfloat16 is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import CPU_ENVIRONMENT, compose
from rl.quickstart.policy import make_policy
from tests.integration.process_kit import ROOT, plain_environment
from tests.integration.vllm_kit import ONE_PROCESS, UNCOMPILED

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Arguments: the model directories, then what vllm.LLM takes, as JSON. Prints a line per directory: the median distance
# of the engine, and of transformers in bfloat16, from transformers in float32, and the spread of what is compared.
PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForImageTextToText
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

torch.manual_seed(0)
prompts = [torch.randint(290, 700, (length,)).tolist() for length in (90, 600)]

def reference(model, rows, dtype):
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for row in rows:
            found = torch.log_softmax(loaded(input_ids=torch.tensor([row])).logits[0].float(), -1)
            yield found[range(len(row) - 1), row[1:]]

for model in sys.argv[1:-1]:
    engine = LLM(model, **json.loads(sys.argv[-1]))
    sampling = SamplingParams(max_tokens=32, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    done = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    rows, engines = [], []
    for one in done:
        rows.append([*one.prompt_token_ids, *one.outputs[0].token_ids])
        places = [*one.prompt_logprobs[1:], *one.outputs[0].logprobs]
        engines.append(torch.tensor([place[id].logprob for place, id in zip(places, rows[-1][1:], strict=True)]))
    exact, rounded = (torch.cat([*reference(model, rows, dtype)]) for dtype in (torch.float32, torch.bfloat16))
    apart = [(one - exact).abs().median().item() for one in (torch.cat(engines), rounded)]
    print("apart", json.dumps([*apart, exact.std().item()]))
    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
"""


def twin(experiment: str, out: Path) -> str:
    """Make the policy that an experiment trains at scale=tiny; return the precision that its engine has there.

    Its config says that tokens which occur in prompts are those of images: agents read files that spell them, and a
    policy may sample them. The engine, which has no part for images, must take them as any others.
    """
    config = compose([f"+experiment={experiment}", "scale=tiny"])
    quick = config.quickstart
    make_policy(out, seed=1, experts=quick.experts, head_dim=quick.head_dim, hybrid=quick.hybrid)
    file = out / "config.json"
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(zip(names, range(300, 304), strict=True))))
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.language_model_only
    return config.actor_rollout_ref.rollout.dtype


def test_engines_of_the_twins_differ_from_transformers_by_no_more_than_their_precision(tmp_path: Path) -> None:
    names = ("qwen3_5_9b", "qwen3_5_35b_a3b")
    precisions = {twin(name, tmp_path / name) for name in names}
    options = {
        "dtype": precisions.pop(),
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,  # the longer prompt in three parts, which hand on the state
        "language_model_only": True,
        "distributed_executor_backend": ONE_PROCESS[1],
    }
    environment = plain_environment() | {**CPU_ENVIRONMENT, **UNCOMPILED, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, *(str(tmp_path / name) for name in names), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [json.loads(line.removeprefix("apart ")) for line in done.stdout.splitlines() if line.startswith("apart ")]
    assert len(found) == len(names), done.stderr[-9000:]
    for engine, rounded, spread in found:
        assert engine < 1.3 * rounded < 0.04 < 0.04 * spread
