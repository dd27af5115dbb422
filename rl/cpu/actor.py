"""The trainer's worker of trainer.v1.trainer_mode=separate_async, whose saved weights are copies on a CPU too."""

from collections.abc import Callable

from torch import nn
from verl.experimental.separation.engine_workers import DetachActorWorker


class CPUDetachActorWorker(DetachActorWorker):
    """Each update of a step compares with the policy that the step began with: verl saves its weights and loads them
    back. It saves by ``tensor.cpu()``, which on a CPU is the tensor itself, and the policy would be the newest one."""

    @property
    def copy_handler(self) -> Callable:
        save = super().copy_handler

        def copy(module: nn.Module) -> tuple:
            state, spec = save(module)
            return {name: (tensor.clone(), own) for name, (tensor, own) in state.items()}, spec

        return copy
