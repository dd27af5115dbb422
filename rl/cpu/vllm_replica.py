"""This module is a vLLM replica whose weight sync works on vLLM's CPU back end.

vLLM repacks linear weights for the CPU after loading them, so verl's ``model.load_weights`` on the live model fails
("Parameter has no attribute weight_loader"). vLLM's own answer is ``reload_weights``: it restores the layout of a
checkpoint, loads, and repacks. It takes all weights in one call, while verl sends them in buckets, so the worker
collects the buckets first.

Limit: with tied embeddings vLLM does not refresh ``lm_head`` in a reload; models must have untied ones.
"""

import os
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def _own_socket(handle: str) -> str:
    """Return the same socket in this run's own directory, if rl.train made one (RL_SOCKET_DIR).

    verl names it in /tmp by Ray's job id, and the first job of every cluster has the same id: two runs on one machine
    would load each other's weights.
    """
    directory = os.environ.get("RL_SOCKET_DIR")
    return f"ipc://{directory}/{handle.rpartition('/')[2]}" if directory else handle


class CPUServerAdapter(ServerAdapter):
    """The trainer's end of the weight sync, with a socket of this run."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.zmq_handle = _own_socket(self.zmq_handle)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension of vLLM with a reload of the whole model in place of loading bucket by bucket."""

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

        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=collect)
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))
        _pack_experts(self.model_runner.get_model())


def _pack_experts(model: torch.nn.Module) -> None:
    """Bring the experts' weights into the layout of vLLM's CPU kernel.

    vLLM does it when it makes the kernel (UnquantizedFusedMoEMethod._setup_kernel), but not when weights are loaded
    again: the engine would sample nonsense.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            kernel: Any = layer.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(layer)


class CPUHttpServer(vLLMHttpServer):
    """verl's vLLM server with the worker extension above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # verl sets it with rollout.full_determinism, but vLLM's batch-invariant kernels need Triton, which does not run
        # on a CPU: the engine would die at its first reply.
        os.environ["VLLM_BATCH_INVARIANT"] = "0"

    def _get_worker_extension_cls(self) -> str:
        return f"{CPUWorkerExtension.__module__}.{CPUWorkerExtension.__qualname__}"


class CPUReplica(vLLMReplica):
    """verl's vLLM replica with the server above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CPUHttpServer)
