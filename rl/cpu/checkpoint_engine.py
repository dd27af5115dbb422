"""Weight sync from the trainer to engines with devices of their own, over ZeroMQ in place of NCCL.

verl imports this module by its config key ``actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module``; the
backend's name is ``zmq``. Only trainer.v1.trainer_mode=separate_async uses it. It is made for processes of one machine
and models of a few million parameters: each engine gets a copy of its own, tensor by tensor.
"""

import asyncio
import os
import pickle
import tempfile
import uuid
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import torch
import zmq
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

_END = b""


@CheckpointEngineRegistry.register("zmq")
class ZmqCheckpointEngine(CheckpointEngine):
    """An engine is one end of the transfer.

    The trainer's first process (``is_master``) sends and each engine receives; the trainer's other processes only take
    part in gathering the weights. ``bucket_size`` is the largest size of a message in bytes; larger tensors are split.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        # The run's own directory, if there is one (rl.run.scratch): it is removed with what a kill leaves in it.
        directory = os.environ.get("RL_SOCKET_DIR") or tempfile.gettempdir()
        self._path = Path(directory) / f"weights-{uuid.uuid4().hex[:12]}"
        self._receiving: zmq.Socket | None = None
        self._sending: list[zmq.Socket] = []

    def prepare(self) -> dict[str, Any]:
        """Open this process's own address and return it; verl does not say yet which processes receive."""
        self._receiving = zmq.Context.instance().socket(zmq.PULL)
        self._receiving.bind(f"ipc://{self._path}")
        return {"address": f"ipc://{self._path}"}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of ``init_process_group``, an item per process: the trainer's get where all engines
        listen, the engines get nothing.

        ``metadata``: what each ``prepare`` returned, the trainer's processes first.
        """
        receivers = [one["address"] for one in metadata[actor_wg_world_size:]]
        return {"receivers": [receivers] * actor_wg_world_size}, {"receivers": [[]] * rollout_world_size}

    def init_process_group(self, receivers: list[str]) -> None:  # ty: ignore[incompatible-method-override]  as verl's
        """Connect to the engines, in the process that sends."""
        if self.is_master:
            for address in receivers:
                socket = zmq.Context.instance().socket(zmq.PUSH)
                socket.connect(address)
                self._sending.append(socket)

    def finalize(self) -> None:
        """Close the sockets; verl calls this when everything has been received."""
        for socket in (self._receiving, *self._sending):
            if socket is not None:
                socket.close(linger=0)
        self._receiving, self._sending = None, []
        self._path.unlink(missing_ok=True)

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send all weights to each engine."""
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            assert chunk is not None
            for socket in self._sending:
                await asyncio.to_thread(socket.send_multipart, [pickle.dumps(meta), chunk.detach().numpy()])
        for socket in self._sending:
            await asyncio.to_thread(socket.send_multipart, [_END, b""])

    def receive_weights(  # ty: ignore[incompatible-method-override]  an async generator, as verl's own are
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield name and weight until the trainer has sent all."""
        chunks: Any = self._chunks()  # verl's annotation says Generator; it takes an async one, too
        return merge_weight_chunks(chunks, self.bucket_size)

    async def _chunks(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield parts of tensors, each a uint8 vector."""
        assert self._receiving is not None
        while True:
            parts: Any = await asyncio.to_thread(self._receiving.recv_multipart)
            meta, data = parts
            if meta == _END:
                return
            yield pickle.loads(meta), torch.frombuffer(bytearray(data), dtype=torch.uint8)
