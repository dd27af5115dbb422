"""Notes on this machine's GPUs: whether they are the plan's, and what a model with experts needs on Blackwell."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from rl.checks.model import model_config
from rl.config.compose import CONFIGS
from rl.metrics.nvml import Card, cards

NEAR = 0.05  # by which NVML's figure of memory may differ from what a program sees
BLACKWELL = 10  # the first generation of it; 12: cards for desks
MOE_BACKEND = "actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend"
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def card_notes(config: DictConfig) -> list[str]:
    """Return what there is to say of this machine's GPUs: nothing on a CPU, or where NVML finds none."""
    found = [] if config.trainer.device == "cpu" else cards()
    if not found:
        return []
    least = min(found, key=lambda card: card.gib)
    here = f"{len(found)} x {least.name} with {least.gib:.0f} GiB"
    planned, notes = config.cluster, []
    if _is(least, planned.gpu, planned.gpu_gb):
        notes.append(f"GPUs: {here}, as planned")
    else:
        files = {file.stem: OmegaConf.load(file) for file in sorted((CONFIGS / "cluster").glob("*.yaml"))}
        other = [name for name, one in files.items() if "gpu" in one and _is(least, one.gpu, one.gpu_gb)]
        instead = f"cluster.gpu_gb={least.gib:.0f}, cluster.tflops, cluster.memory_gbs and cluster.gpu"
        if other:
            instead = f"cluster={other[0]}"
        told = f"the plan is of {planned.gpu} with {planned.gpu_gb:.0f} GiB"
        notes.append(f"GPUs: {here}, but {told}; set {instead}")
    newest = max(card.generation for card in found)
    experts = any(model_config(config).get(key) for key in _EXPERTS)
    if newest >= BLACKWELL and experts and not OmegaConf.select(config, MOE_BACKEND):
        why = "vLLM 0.24 may arrange experts so that the first sync of weights fails (verl issue 7978, seen on sm_100)"
        notes.append(f"on Blackwell (sm_{newest}0) {why}; set +{MOE_BACKEND}=triton")
    return notes


def _is(card: Card, gpu: str, gib: float) -> bool:
    """Tell whether a card is of the kind that ``cluster.gpu`` names with its first word, such as H100, and has such
    memory."""
    named = gpu.split()[0].lower() in card.name.lower().replace("-", " ").split()
    return named and abs(card.gib / gib - 1) <= NEAR
