"""Plug-ins: the agents, kinds of boxes and config groups that packages beside this one bring.

In a config, a kind is a name of ours or ``module:attribute``. An entry point in the group ``claude_code_rl.configs``
names a package with config groups: its folder ``agent/`` with ``mine.yaml`` makes ``agent=mine`` a choice.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from rollout.dotted import attribute

CONFIGS = "claude_code_rl.configs"
MIXED = "mixed"  # the kind of a mix of agents (rl.episodes.setup)
ROOT = Path(__file__).resolve().parents[2]


def named(kind: object, known: Mapping[str, Any]) -> Any:
    """Return what a kind names. Raises ValueError, whose text says what it must be or why it cannot be had."""
    if isinstance(kind, str) and ":" in kind:
        try:
            return attribute(kind)
        except ValueError as error:
            hint = to_install(f"{re.split('[.:]', kind)[0]}/__init__.py")
            raise ValueError(f"is {kind!r}, which {error}{hint}") from error
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"is {kind!r}; it must be one of {', '.join(known)}, or module:attribute")
    return known[kind]


def agents_of(config: DictConfig) -> dict[str, DictConfig]:
    """Return the settings of a config's agents by the keys where they are: ``agent``, or those of a mix in it."""
    group = config.agent
    if group.get("kind") != MIXED:
        return {"agent": group}
    mix = group.get("mix")
    names = mix if OmegaConf.is_dict(mix) else ()
    return {f"agent.{name}": group[name] for name in names if OmegaConf.is_dict(group.get(name))}


def longest(config: DictConfig, limit: str) -> float:
    """Return the highest value of a limit (max_turns, timeout_s) that agents of a config have; 0 or no key is none."""
    return max((settings.get(limit) or math.inf for settings in agents_of(config).values()), default=math.inf)


def to_install(file: str) -> str:
    """Return the end of a message that says how to install the package of this repository that has a file.

    file: its path, or a pattern, below the package's directory. "" if no package of packaging/ or examples/ has it.
    """
    for place in ("packaging", "examples"):
        for path in (ROOT / place).glob(f"*/{file}"):
            package = "/".join(path.relative_to(ROOT).parts[:2])
            return f"; it is in a package of its own: .venv/bin/pip install --no-deps {package}"
    return ""


def brought() -> list[Path]:
    """Return the directories of config groups that other packages bring."""
    specs = [importlib.util.find_spec(entry.value) for entry in sorted(entry_points(group=CONFIGS))]
    return [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]


class PluginSearchPath(SearchPathPlugin):
    """Hydra searches the folders of other packages after its own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See SearchPathPlugin."""
        for folder in brought():
            search_path.append("brought", f"file://{folder}")


Plugins.instance().register(PluginSearchPath)
