"""A vLLM replica for CPU runs, whose weight sync works on vLLM's CPU back end.

vLLM repacks linear weights for the CPU after loading them, so verl's ``model.load_weights`` on the live model fails
("Parameter has no attribute weight_loader"). vLLM's own answer is ``reload_weights``: it restores the layout of a
checkpoint, loads, and repacks. It takes all weights in one call, while verl sends them in buckets, so the worker
collects the buckets first. With tensor parallelism each of vLLM's workers does so with the buckets of its own rank of
the trainer, and takes its part of every weight.

vLLM's CPU kernel for experts needs two corrections (``CPUExperts``), which are registered in each process that imports
this module.

Limit: with tied embeddings vLLM does not refresh ``lm_head`` in a reload; models must have untied ones.
"""

import functools
import multiprocessing.context
import os
from collections.abc import Callable
from typing import Any, TypeVar

import ray
import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models import registry
from vllm.v1.engine import utils as engine_processes

T = TypeVar("T")


def _own_socket(handle: str) -> str:
    """Return the same socket in this run's own directory, if rl.train made one (RL_SOCKET_DIR).

    verl names it in /tmp by Ray's job id, and the first job of every cluster has the same id: two runs on one machine
    would load each other's weights.
    """
    directory = os.environ.get("RL_SOCKET_DIR")
    return f"ipc://{directory}/{handle.rpartition('/')[2]}" if directory else handle


class CPUServerAdapter(ServerAdapter):
    """This adapter is the trainer's end of the weight sync, with a socket of this run."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.zmq_handle = _own_socket(self.zmq_handle)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """This worker extension of vLLM reloads the whole model, where verl's loads it bucket by bucket."""

    model_runner: Any  # of the vLLM worker that this class extends

    def _get_zmq_handle(self) -> str:
        return _own_socket(super()._get_zmq_handle())

    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done=False, use_shm=True):
        """Receive one round of weights from the trainer and reload the model with them.

        Raises:
            NotImplementedError: the trainer sends a LoRA adapter, not merged weights (``model.lora.merge``).
        """
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if peft_config:
            raise NotImplementedError("LoRA adapters to vLLM on a CPU; set actor_rollout_ref.model.lora.merge=true")
        received: dict[str, torch.Tensor] = {}

        def collect(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # Clones: the tensors view shared memory that the next bucket overwrites.
            received.update((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm)
        receiver.receive_weights(on_bucket_received=collect)
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))


def _local_experts(
    places: torch.Tensor, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of each token's experts, [tokens, topk], for a worker that holds only a part.

    ``places``: for each expert its number in this worker; -1 if another worker has it; its weight is 0 then.
    """
    weights, experts = select_experts(
        hidden_states, gating_output, topk, use_grouped_topk=False, renormalize=renormalize
    )
    places = places[experts.long()]
    return weights * (places >= 0), places.clamp(min=0)


@UnquantizedFusedMoEMethod.register_oot
class CPUExperts(UnquantizedFusedMoEMethod):
    """These are vLLM's experts, with weights that may be loaded more than once and may be spread over workers.

    Without this class the engine samples nonsense: vLLM converts the weights to the layout of its CPU kernel only when
    it makes the kernel, and the kernel uses an expert's global number as an index into this worker's own experts.
    """

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Make the kernel anew. Raises NotImplementedError for experts in groups, if they are spread over workers."""
        if layer.expert_map is not None:
            if layer.use_grouped_topk:
                raise NotImplementedError("expert parallel on a CPU with experts that are chosen by groups")
            layer.custom_routing_function = functools.partial(_local_experts, layer.expert_map)
        self.moe_kernel = None
        super().process_weights_after_loading(layer)


def _forked() -> multiprocessing.context.BaseContext:
    """Return what starts vLLM's engine: as a fork of the run's fork server (``rl.run.fork_server``).

    By itself vLLM starts its engine on a CPU as a new Python process, whose imports take longer than the rest of the
    start.
    """
    return multiprocessing.get_context("forkserver")


def _here(function: Callable[[], T]) -> T:
    """Call a function that finds out what a model's class can do.

    vLLM calls it in a new Python process, so that CUDA is not initialized in this one. On a CPU that process would do
    hardly more than import.
    """
    return function()


class CPUHttpServer(vLLMHttpServer):
    """This is verl's vLLM server with the worker extension above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # verl sets it with rollout.full_determinism, but vLLM's batch-invariant kernels need Triton, which does not run
        # on a CPU: the engine would die at its first reply.
        os.environ["VLLM_BATCH_INVARIANT"] = "0"
        registry._run_in_subprocess = _here  # ty: ignore[invalid-assignment]
        if "RL_FORK_SERVER" in os.environ:
            engine_processes.get_mp_context = _forked  # ty: ignore[invalid-assignment]

    def _get_worker_extension_cls(self) -> str:
        return f"{CPUWorkerExtension.__module__}.{CPUWorkerExtension.__qualname__}"


class CPUReplica(vLLMReplica):
    """This is verl's vLLM replica with the server above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CPUHttpServer)
