"""Panels are the charts that people look at, in the wandb workspace (``rl.dashboard``) and in ``rl.report``.

They are listed in panels.yaml. Metrics have the names of docs/metrics.md; ``<...>`` in a name stands for any text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


@dataclass(frozen=True)
class Panel:
    """A panel is one chart over steps.

    ``metrics``: the labels of its curves, by the name of the metric; ``{}`` in a label is filled with the text that
    ``<...>`` stands for. ``unit``: label of the y axis; ``bounds``: its ends, None for automatic. ``stacked``: the
    curves are parts of a whole.
    """

    title: str
    unit: str
    metrics: dict[str, str]
    stacked: bool = False
    bounds: tuple[float | None, float | None] = (None, None)

    def curves(self, names: list[str]) -> dict[str, str]:
        """Return the labels of those of ``names`` that belong here, by name and in the panel's order."""
        found: dict[str, str] = {}
        for metric, label in self.metrics.items():
            for name in names:
                if match := pattern(metric).fullmatch(name):
                    found.setdefault(name, label.format(*match.groups()))
        return found


def names_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics that any of a run's lines has."""
    return sorted({name for one in lines for name, value in one.items() if value is not None})


def pattern(metric: str) -> re.Pattern[str]:
    """Return the pattern of the names that a documented name stands for."""
    parts = re.split(r"<[^>]+>", metric)
    return re.compile("(.+)".join(re.escape(part) for part in parts))


def _sections() -> dict[str, tuple[Panel, ...]]:
    named: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("panels.yaml")))
    for panel in (panel for panels in named.values() for panel in panels):
        panel["bounds"] = tuple(panel.get("bounds", (None, None)))
    return {name: tuple(Panel(**panel) for panel in panels) for name, panels in named.items()}


SECTIONS = _sections()
