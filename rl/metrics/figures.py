"""A figure is what a program that proves something has seen: ``rl.smoke``, scripts/gpu_ladder.py."""

from dataclasses import dataclass

CORRELATION = 0.99  # of the engine's and the trainer's probabilities; docs/metrics.md: healthy


@dataclass(frozen=True)
class Figure:
    """A figure is one thing that was seen, beside what was expected; ``ok`` None: for the record."""

    what: str
    expected: str
    seen: str
    ok: bool | None = None
