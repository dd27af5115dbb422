"""Compare the formulas of rl.plan with what can be measured without a GPU.

    python scripts/calibrate_plan.py activations            # the real model code at its real size, no memory taken
    python scripts/calibrate_plan.py sharding               # FSDP2 of 32 ranks at the real size, no memory taken
    python scripts/calibrate_plan.py run                    # two training runs: resident memory, checkpoint on disk

``activations`` runs transformers' own modules forward and backward on fake tensors and adds up the storages that are
alive; ``sharding`` does the same for FSDP2 with a process group that only pretends. ``run`` makes two steps of
``rl.train`` on the CPU with a tiny model and with one of 270 million parameters (13 GiB of memory, 6 of disk), watches
the resident memory of trainer and engine by phase, and weighs the checkpoint. All print Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import ENGINE, MIB, TRAINER, compare, head, peak, tensors, train
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl.config import compose
from rl.plan import host, memory
from rl.plan.layout import layout_of, trainer_of
from rl.plan.model import KNOWN, load_config, shape_of


class Alive(TorchDispatchMode):
    """This mode counts the bytes of the storages that live ``now`` and their ``peak``; ``known`` ones do not count."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages that it makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def fake_model(config: Any, dtype: torch.dtype, checkpointing: bool) -> Any:
    """Return the model of ``config`` for training. Its attention is one fused kernel without a mask, which keeps what
    flash-attn's keeps: its inputs, its output and one number per head and token."""

    def fused(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **_: Any) -> tuple[Any, None]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("fused", fused)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fused", lambda *_, **__: None)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="fused")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def measure(config: Any, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Return bytes of activations of the decoder of ``config`` (bf16) for one packed row of ``tokens``: those ``kept``
    between forward and backward, and the peaks over that in ``forward`` and ``backward``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config, torch.bfloat16, checkpointing)
        for parameter in model.parameters():  # as with FSDP, a gradient goes when it is whole
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
    """Print bytes of activations per token of each known model."""
    base = replace(trainer_of(compose(["+experiment=qwen3_4b"])), computed=2, sequence_parallel=1)
    head("bytes per token, bf16", "plan", "measured", "error")
    tokens = 1 << 19  # so many that the one gradient that is there at a time does not count
    for file in sorted(KNOWN.glob("*.json")):
        config = load_config(file.stem)
        config.vocab_size = 1024  # an embedding's gradient is no activation
        for checkpointing in (True, False):
            trainer, found = replace(base, checkpointing=checkpointing), {}
            for layers in (2, 4):
                config.num_hidden_layers = layers
                shape = replace(shape_of(config, file.stem), layer=0, embeddings=0)
                found[layers] = measure(config, tokens, checkpointing), memory.kept_activations(shape, trainer, 1)
            planned, measured = found[4][1] - found[2][1], (found[4][0]["kept"] - found[2][0]["kept"]) / tokens
            name = f"{file.stem}: kept of a layer, {'' if checkpointing else 'no '}checkpointing"
            compare(name, planned / 2, measured / 2)
            if checkpointing:
                layer = {b: memory.one_layer(shape, trainer, tokens, b) / tokens for b in (False, True)}
                work = found[4][0]["forward"] / tokens, found[4][0]["backward"] / tokens
                compare(f"{file.stem}: layer at work, forward", layer[False], work[0])
                # What the last norm keeps, 8 bytes a channel, is gone when the last layer is computed again.
                compare(f"{file.stem}: layer at work, backward", layer[True], work[1] + 8 * shape.hidden)


def sharding() -> None:
    """Print the update of qwen3_coder_30b on one of its 32 ranks, two batches of 16,384 tokens, without the head, by
    torch's own tracker of FSDP2's memory. The CPU's device has no streams: a GPU overlaps more."""
    import torch.distributed as dist
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    experiment = compose(["+experiment=qwen3_coder_30b"])
    trainer = replace(trainer_of(experiment), sequence_parallel=1)  # Ulysses' copies are not in this model
    config, tokens = load_config(experiment.actor_rollout_ref.model.path), trainer.tokens
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trainer.gpus)
    mesh = init_device_mesh("cpu", (trainer.gpus,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config, torch.float32, checkpointing=True)
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
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    found = {str(getattr(key, "value", key)): size for key, size in snapshot.items()}
    shape = shape_of(config, "30b")
    head("MiB on one GPU", "plan", "measured", "error")
    states = {"Sharded Param": memory.weights, "Sharded Grad": memory.gradients, "OptState": memory.moments}
    for key, formula in states.items():
        compare(key, formula(shape, trainer), found[key], MIB)
    total = sum(formula(shape, trainer) for formula in states.values())
    total += memory.kept_activations(shape, trainer, tokens) + memory.one_layer(shape, trainer, tokens, True)
    compare("all, at the peak", total, found["Total"], MIB)


def resident(work: Path, name: str, layers: int, **sizes: int) -> dict[str, tuple[float, float]]:
    """Run two steps of ``rl.train`` with a Qwen3 of these sizes; return bytes by the plan and as measured. Resident
    memory is what a process has to itself, at its peak in that phase of both steps."""
    from rl.quickstart.policy import make_policy

    model, directory = work / name, work / f"{name}-run"
    make_policy(model, seed=1)
    kinds = ["full_attention"] * layers
    shaped = AutoConfig.from_pretrained(model, num_hidden_layers=layers, layer_types=kinds, **sizes)
    shaped.initializer_range = 0.02
    AutoModelForCausalLM.from_config(shaped, dtype=torch.bfloat16).save_pretrained(model)  # as models are published
    keys = ["+experiment=quickstart", "prepare=null", "~quickstart", f"actor_rollout_ref.model.path={model}"]
    keys += [f"data.train_files={work}/tasks/train.parquet", f"data.val_files={work}/tasks/heldout.parquet"]
    keys += ["data.train_batch_size=1", "actor_rollout_ref.rollout.n=2", "agent.max_turns=2", "agent.timeout_s=300"]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_epochs=1"]
    # Checkpointing as on GPUs: weights and moments are then nearly all there is.
    keys += ["actor_rollout_ref.model.enable_gradient_checkpointing=true", "proxy.max_tokens=16"]
    # All tensors at once, which torch's AdamW does by itself only on a GPU.
    keys += ["actor_rollout_ref.actor.optim.override_optimizer_config={foreach:true}"]
    # Adam's moments are there from the end of the first step on.
    keys += ["trainer.total_training_steps=2", "trainer.save_freq=2"]
    peaks, steps = train(directory, *keys)
    config = compose(keys)
    layout, shape = layout_of(config), shape_of(load_config(str(model)), name)
    tokens = max(int(step["global_seqlen/max"]) for step in steps)  # all rows of a step are one batch
    trainer = replace(layout.trainer, tokens=tokens, logprob_tokens=tokens)
    plan = {made.name: tensors(made) for made in memory.phases(config, shape, replace(layout, trainer=trainer))}
    names = {
        "log-probabilities": "log-probs",
        "update": "update",
        "weight sync": "sync",
    }  # the plan's and rl.run.phases'
    # The model as it is read, and its shards, which are elsewhere on a GPU.
    read = trainer.stored * shape.params + memory.weights(shape, trainer)
    found = {"trainer, at the start": (read, peak(peaks, TRAINER, "start"))}
    found |= {f"trainer, {name}": (plan[name], peak(peaks, TRAINER, now)) for name, now in names.items()}
    # Its weights: such short prompts do not fill a batch, and the cache is the same for both models.
    found["engine, rollout"] = memory.engine_weights(shape, layout.engine), peak(peaks, ENGINE, "rollout")
    saved = sum(file.stat().st_size for file in directory.glob("checkpoints/global_step_2/actor/*.pt"))
    return found | {"checkpoint": (host.checkpoint_bytes(config, shape, trainer), saved)}


def run() -> None:
    """Print what a model of 270 M parameters takes more than one of 0.7 M: libraries and the engine's cache are in
    both."""
    from rl.quickstart.tasks import make_tasks

    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        work = Path(directory)
        make_tasks(work / "tasks", 1, 4, 2)
        small = resident(work, "small", layers=2)
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64}
        large = resident(work, "large", layers=16, num_attention_heads=16, num_key_value_heads=16, **sizes)
    head("MiB", "plan", "measured", "error")
    for what, (planned, measured) in large.items():
        compare(what, planned - small[what][0], measured - small[what][1], MIB)


def main() -> None:
    """Run the calibration that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("activations", "sharding", "run"))
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}")
    {"activations": activations, "sharding": sharding, "run": run}[options.what]()


if __name__ == "__main__":
    main()
