"""The trainer's worker of separate_async: the weights that it saves are copies, on a CPU too."""

from collections.abc import Callable

from torch import nn
from verl.experimental.separation.engine_workers import DetachActorWorker


class CPUDetachActorWorker(DetachActorWorker):
    """This worker of verl's keeps copies of the weights in ``save_model_to_cpu``.

    Each update of a step compares with the policy that the step began with: verl saves its weights and loads them back.
    verl saves by ``tensor.cpu()``, which on a CPU is the tensor itself: the saved policy would always be the newest
    one.
    """

    @property
    def copy_handler(self) -> Callable:
        """Return verl's function that saves a module's weights, with copies in place of views."""
        save = super().copy_handler

        def copy(module: nn.Module) -> tuple:
            state, spec = save(module)
            return {name: (tensor.clone(), own) for name, (tensor, own) in state.items()}, spec

        return copy
