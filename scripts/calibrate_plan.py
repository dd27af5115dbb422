"""How far off is rl.plan? Its formulas beside what can be measured without a GPU.

    python scripts/calibrate_plan.py activations            # the real model code at its real size, no memory taken
    python scripts/calibrate_plan.py sharding               # FSDP2 of 32 ranks at the real size, no memory taken
    python scripts/calibrate_plan.py cache                  # vLLM on the CPU: tokens of its KV cache
    python scripts/calibrate_plan.py run                    # two training runs: resident memory, checkpoint on disk

``activations`` runs transformers' own modules forward and backward on fake tensors and adds up the storages that are
alive; ``sharding`` does the same for FSDP2 with a process group that only pretends. ``cache`` starts a vLLM server per
model shape and reads the line that it prints. ``run`` makes two steps of ``rl.train`` on the CPU with a tiny model and
with one of 270 million parameters (13 GiB of memory, 6 of disk), watches the resident memory of trainer and engine by
phase, and weighs the checkpoint. All print Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import ENGINE, GIB, TRAINER, Watch, error, own, row
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rl.run.vllm_server import vllm_server

ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------ activations


def use_fused_attention() -> None:
    """Register "fused": one kernel without a mask, which keeps what flash-attn's keeps."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def fused(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **_: Any) -> tuple[Any, None]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("fused", fused)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fused", lambda *_, **__: None)


class Alive(TorchDispatchMode):
    """Bytes of the storages that live now, and the most there ever were. ``known`` are not counted."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.sizes = {t.untyped_storage()._cdata: 0 for t in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.drop, storage._cdata)
        return out

    def drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def measure(config: Any, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Bytes of activations of the decoder of ``config`` (bf16) for one packed row of ``tokens``: ``kept`` between
    forward and backward, ``forward`` and ``backward`` the peaks over that. Gradients of weights are dropped at once.

    Attention is one fused kernel, as flash-attn's: it keeps its inputs, its output and one number per head and token.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    use_fused_attention()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="fused")
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for parameter in model.parameters():  # as FSDP does: a gradient goes when it is whole
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        alive = Alive([*model.parameters(), *model.buffers()])
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with alive:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            kept, forward = alive.now, alive.peak
            alive.peak = alive.now
            hidden.sum().backward()
    return {"kept": kept, "forward": forward - kept, "backward": alive.peak - kept}


def activations() -> None:
    from rl.config import compose
    from rl.plan import memory
    from rl.plan.layout import trainer_of
    from rl.plan.model import KNOWN, load_config, shape_of

    base = replace(trainer_of(compose(["+experiment=qwen3_4b"])), computed=2, sequence_parallel=1)
    print("bytes per token, bf16\n")
    row("model", "what", "plan", "measured", "error")
    row(*["---"] * 5)
    tokens = 1 << 19  # so many that the one gradient that is there at a time does not count
    for file in sorted(KNOWN.glob("*.json")):
        config = load_config(file.stem)
        config.vocab_size = 1024  # an embedding's gradient is no activation
        shape = replace(shape_of(config, file.stem), layer=0, embeddings=0, layers=4)
        for checkpointing in (True, False):
            trainer = replace(base, checkpointing=checkpointing)
            found = {}
            for layers in (2, 4):
                config.num_hidden_layers = layers
                found[layers] = measure(config, tokens, checkpointing)
            measured = (found[4]["kept"] - found[2]["kept"]) / 2 / tokens
            planned = memory.kept_activations(shape, trainer, tokens)
            planned = (planned - memory.kept_activations(replace(shape, layers=2), trainer, tokens)) / 2 / tokens
            name = f"kept of a layer, {'' if checkpointing else 'no '}checkpointing"
            row(file.stem, name, f"{planned:,.0f}", f"{measured:,.0f}", error(planned, measured))
        trainer = replace(base, checkpointing=True)
        found = measure(config, tokens, True)
        for name, backward in (("layer at work, forward", False), ("layer at work, backward", True)):
            planned = memory.one_layer(shape, trainer, tokens, backward) / tokens
            # What the last norm keeps, 8 bytes a channel, is gone when the last layer is computed again.
            measured = found["backward"] / tokens + 8 * shape.hidden if backward else found["forward"] / tokens
            row(file.stem, name, f"{planned:,.0f}", f"{measured:,.0f}", error(planned, measured))


# ------------------------------------------------------------------ FSDP2


def sharding() -> None:
    """The update of qwen3_coder_30b on one of its 32 ranks, two batches of 16,384 tokens, without the head: torch's own
    tracker of FSDP2's memory beside the plan. On the CPU's device there are no streams: a GPU overlaps more."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM

    from rl.config import compose
    from rl.plan import memory
    from rl.plan.layout import trainer_of
    from rl.plan.model import load_config, shape_of

    cfg = compose(["+experiment=qwen3_coder_30b"])
    trainer = replace(trainer_of(cfg), sequence_parallel=1)  # Ulysses' copies are not in this model
    config, tokens = load_config(cfg.actor_rollout_ref.model.path), trainer.tokens
    use_fused_attention()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trainer.gpus)
    mesh = init_device_mesh("cpu", (trainer.gpus,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="fused")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):  # as verl wraps them
            fully_shard(module, mesh=mesh, mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        tracker = FSDPMemTracker(model, optimizer)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with tracker:
            for _ in range(2):  # the moments are there from the second step on
                for _ in range(2):
                    model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.sum().backward()
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    found = {str(getattr(key, "value", key)): size for key, size in peak.items()}
    shape = shape_of(config, "30b")
    print("MiB on one GPU\n")
    row("what", "plan", "measured", "error")
    row(*["---"] * 4)
    states = {"Sharded Param": memory.weights, "Sharded Grad": memory.gradients, "OptState": memory.moments}
    total = 0.0
    for key, formula in states.items():
        planned = formula(shape, trainer)
        total += planned
        row(key, f"{planned / 2**20:,.0f}", f"{found[key] / 2**20:,.0f}", error(planned, found[key]))
    total += memory.kept_activations(shape, trainer, tokens) + memory.one_layer(shape, trainer, tokens, True)
    row("all, at the peak", f"{total / 2**20:,.0f}", f"{found['Total'] / 2**20:,.0f}", error(total, found["Total"]))


# ------------------------------------------------------------------ vLLM's cache


def cache() -> None:
    """Tokens that vLLM says its KV cache of so many bytes has, for shapes of the known models with few layers."""
    from rl.config import compose
    from rl.plan.layout import engine_of, trainer_of
    from rl.plan.memory import kv_tokens
    from rl.plan.model import KNOWN, load_config, shape_of
    from rl.quickstart.policy import make_tokenizer

    cfg = compose(["+experiment=qwen3_4b"])
    base = engine_of(cfg, trainer_of(cfg))
    row("shape", "dtype", "GiB", "plan, tokens", "vLLM, tokens", "error")
    row(*["---"] * 6)
    for name, layers, dtype, gib in (("Qwen3-8B", 2, "float32", 1), ("Qwen3-Coder-30B-A3B-Instruct", 2, "bfloat16", 2)):
        assert (KNOWN / f"{name}.json").is_file()
        config = load_config(name)
        config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, 256, 256
        config.vocab_size = 2048
        if config.model_type == "qwen3":
            config.layer_types = config.layer_types[:layers]
        else:
            config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size = 4, 2, 64
        with tempfile.TemporaryDirectory(prefix="plan-") as directory:
            tokenizer = make_tokenizer()
            tokenizer.save_pretrained(directory)
            config.architectures = ["Qwen3MoeForCausalLM" if config.model_type == "qwen3_moe" else "Qwen3ForCausalLM"]
            config.save_pretrained(directory)
            shape = shape_of(config, name)
            log = Path(directory) / "server.log"
            arguments = ["--dtype", dtype, "--max-model-len", "4096", "--enforce-eager", "--load-format", "dummy"]
            extra = {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            with vllm_server(directory, log, *arguments, environment=extra):
                said = re.search(r"KV cache size: ([0-9,]+) tokens", log.read_text())
                assert said is not None
            measured = int(said[1].replace(",", ""))
        engine = replace(base, element={"float32": 4, "bfloat16": 2}[dtype], tensor=1)
        planned = kv_tokens(shape, engine, gib * GIB, block=128)  # vLLM's blocks on a CPU
        row(f"{name}, {layers} layers", dtype, gib, f"{planned:,}", f"{measured:,}", error(planned, measured))


# ------------------------------------------------------------------ a training run


SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16}
# rl.run.phases' names and the plan's.
PHASES = {"log-probs": "log-probabilities", "update": "update", "sync": "weight sync"}


def make_model(out: Path, shape: dict[str, int]) -> None:
    """A random Qwen3 with the quickstart's tokenizer; in bf16, as models are published."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from rl.quickstart.policy import make_tokenizer

    tokenizer = make_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=shape["num_attention_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=None,
        **ids,
        **shape,
    )
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train(work: Path, name: str) -> dict[str, tuple[float, float]]:
    """Two steps of ``rl.train`` with the model ``work/name``: what the plan says of it and what was found, in bytes.
    Resident memory is what a process has to itself, at its peak in that phase of both steps."""
    from rl.config import compose
    from rl.metrics.episodes import read_jsonl
    from rl.plan import host, memory
    from rl.plan.layout import engine_of, trainer_of
    from rl.plan.model import load_config, shape_of
    from rl.run import phases

    directory = work / f"{name}-run"
    keys = ["+experiment=quickstart", "prepare=null", "~quickstart", f"run.dir={directory}"]
    keys += [f"data.train_files={work}/tasks/train.parquet", f"data.val_files={work}/tasks/heldout.parquet"]
    keys += ["data.train_batch_size=1", "actor_rollout_ref.rollout.n=2", "agent.max_turns=2", "agent.timeout_s=300"]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_epochs=1"]
    model = "actor_rollout_ref.model"  # checkpointing as on GPUs: weights and moments are then nearly all there is
    keys += [f"{model}.path={work / name}", f"{model}.enable_gradient_checkpointing=true"]
    # All tensors at once, which torch's AdamW does by itself only on a GPU.
    keys += ["actor_rollout_ref.actor.optim.override_optimizer_config={foreach:true}"]
    # Adam's moments are there from the end of the first step on.
    keys += ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    keys += ["trainer.save_freq=2", "proxy.max_tokens=16"]

    def phase() -> str:
        now = phases.read(directory)
        return now.name if now else "start"

    # What is freed goes back at once: malloc would keep blocks of up to 32 MiB, and the peak be none of tensors alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    process = subprocess.Popen([sys.executable, "-m", "rl.train", *keys], cwd=ROOT, env=environment)
    watch = Watch(process.pid, phase)
    watch.start()
    code = process.wait()
    watch.finish()
    if code:
        raise RuntimeError((directory / "run.log").read_text()[-3000:])
    for (when, key), peak in sorted(watch.peaks.items(), key=lambda item: -item[1])[:20]:
        print(f"    {when}: {key}: {peak / GIB:.2f} GiB", file=sys.stderr)
    cfg = compose(keys)
    trainer, shape = trainer_of(cfg), shape_of(load_config(str(work / name)), name)
    engine = engine_of(cfg, trainer)
    steps = [r for r in read_jsonl(directory / "metrics.jsonl") if "timing_s/step" in r]
    tokens = max(int(step["global_seqlen/max"]) for step in steps)  # all rows of a step are one batch
    trainer = replace(trainer, tokens=tokens, logprob_tokens=tokens)
    print(f"    {name}: {shape.params:,} parameters, {tokens:,} tokens a step", file=sys.stderr)
    found: dict[str, tuple[float, float]] = {}
    # The model as it is read, and its shards, which are elsewhere on a GPU.
    read = trainer.stored * shape.params + memory.weights(shape, trainer)
    found["trainer, at the start"] = read, watch.most(TRAINER, "start")
    ledgers = {made.name: own(made) for made in memory.phases(shape, trainer, engine, memory.Room(0, 0, 0))}
    for key, planned in PHASES.items():
        found[f"trainer, {planned}"] = ledgers[planned], watch.most(TRAINER, key)
    # Its weights: so short prompts do not fill a batch, and the cache is the same for both models.
    found["engine, rollout"] = memory.engine_weights(shape, engine), watch.most(ENGINE, "rollout")
    saved = directory / "checkpoints" / "global_step_2" / "actor"
    found["checkpoint"] = host.checkpoint_bytes(cfg, shape, trainer), sum(f.stat().st_size for f in saved.glob("*.pt"))
    return found


def run() -> None:
    """What a model of 270 M parameters takes more than one of 0.7 M: libraries and the engine's cache are in both."""
    from rl.quickstart.tasks import make_tasks

    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        work = Path(directory)
        (work / "tasks").mkdir()
        make_tasks(work / "tasks", 1, 4, 2)
        for name, sizes in (("small", SMALL), ("large", LARGE)):
            make_model(work / name, sizes)
        small, large = train(work, "small"), train(work, "large")
    print("MiB\n")
    row("what", "plan", "measured", "error")
    row(*["---"] * 4)
    for what, (planned, measured) in large.items():
        planned, measured = planned - small[what][0], measured - small[what][1]
        row(what, f"{planned / 2**20:,.0f}", f"{measured / 2**20:,.0f}", error(planned, measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("activations", "sharding", "cache", "run"))
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}\n")
    {"activations": activations, "sharding": sharding, "cache": cache, "run": run}[options.what]()


if __name__ == "__main__":
    main()
