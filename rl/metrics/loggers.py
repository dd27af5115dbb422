"""Loggers (wandb, TensorBoard, ...) that cannot end a run: one that fails gets nothing more.

All numbers are in metrics.jsonl, whatever becomes of a logger. When the run is started again, its loggers are, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Collection, Generator
from types import ModuleType
from typing import Any

_CLOSE_S = 30.0


class Loggers:
    """Loggers take the place of verl's ``Tracking``, and hold a ``Tracking`` of their own for each logger.

    A logger that cannot be started, or that raises later, is closed and left out from then on, with one line for the
    user.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        project_name: str,
        experiment_name: str,
        default_backend: list[str],
        config: Any,
    ) -> None:
        from verl.utils.tracking import Tracking

        self._say = say
        self._trackings: dict[str, Any] = {}
        for name in default_backend:
            with self.guarded(name):
                self._trackings[name] = Tracking(project_name, experiment_name, [name], config)

    @property
    def logger(self) -> dict[str, Any]:
        """Return verl's objects of the loggers that work, by name."""
        return {name: tracking.logger[name] for name, tracking in self._trackings.items() if name in tracking.logger}

    def log(self, data: dict[str, Any], step: int) -> None:
        """Put the figures of a step into all loggers."""
        for name, tracking in list(self._trackings.items()):
            with self.guarded(name):
                tracking.log(data=data, step=step)

    def finish(self, exit_code: int = 0) -> None:
        """Close all loggers."""
        for name, tracking in list(self._trackings.items()):
            with self.guarded(name):
                tracking.finish(exit_code=exit_code)

    @contextlib.contextmanager
    def guarded(self, name: str) -> Generator[None]:
        """Leave the logger ``name`` out from now on if the block raises an exception, which goes no further."""
        try:
            yield
        except Exception as error:
            closing = threading.Thread(target=_close, args=(name, self._trackings.pop(name, None)), daemon=True)
            closing.start()
            closing.join(_CLOSE_S)  # wandb would wait for a server that does not answer
            cause = " ".join(str(error).split())[:200]
            self._say(f"{name} failed and gets nothing more; the run goes on ({type(error).__name__}: {cause})")


def _close(name: str, failed: Any) -> None:
    with contextlib.suppress(Exception):
        if failed is not None:
            failed.finish(exit_code=1)
    if name == "wandb":
        import wandb

        with contextlib.suppress(Exception):  # else it tries again, and fails, when the process ends
            wandb.teardown(exit_code=1)


class Tables:
    """Tables guard one of verl's loggers of tables, whose ``log`` is told which loggers there are."""

    def __init__(self, tables: Any, loggers: Loggers) -> None:
        self._tables, self._loggers = tables, loggers

    def log(self, names: list[str], *content: Any) -> None:
        """Put a table into those of the loggers ``names`` that work."""
        for name in set(names) & set(self._loggers.logger):
            with self._loggers.guarded(name):
                self._tables.log([name], *content)


def import_early(names: Collection[str]) -> None:
    """Import what wandb needs. Call it before verl is imported.

    wandb's classes look for their own source in all modules that are loaded: 0.2 s before, 2 s after that import.
    """
    if "wandb" in names:
        with contextlib.suppress(Exception):  # reported when the logger starts
            importlib.import_module("wandb.apis.public")


def take_over(trainer_base: ModuleType, say: Callable[[str], None]) -> None:
    """Make verl's trainer use ``Loggers``. ``trainer_base``: its module; ``say``: prints a line for the user."""
    trainer_base.Tracking = functools.partial(Loggers, say)  # ty: ignore[missing-attribute]
