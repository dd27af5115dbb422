"""Plug-ins: the agents, kinds of boxes and config groups that packages beside this one bring.

In a config, a kind is a name of ours or ``module:attribute``. An entry point in the group ``claude_code_rl.configs``
names a package with config groups: its folder ``agent/`` with ``mine.yaml`` makes ``agent=mine`` a choice.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIGS = "claude_code_rl.configs"


def named(kind: object, known: Mapping[str, Any]) -> Any:
    """Return what a kind names. Raises ValueError, whose text says what it must be or why it cannot be had."""
    if isinstance(kind, str) and ":" in kind:
        try:
            return pkgutil.resolve_name(kind)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"is {kind!r}, which cannot be imported: {error}") from error
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"is {kind!r}; it must be one of {', '.join(known)}, or module:attribute")
    return known[kind]


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
