"""Overrides of a command line: compose the config from them, and say of every wrong one what was probably meant.

Hydra names only the first wrong one, mostly in a dozen lines about its search path.
"""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from rl.config.compose import unresolved
from rl.config.plugins import to_install


def read(name: str, overrides: Sequence[str], folders: Sequence[Path]) -> tuple[DictConfig, list[str]]:
    """Return the config ``name``, made without wrong overrides, with its ``hydra`` node; and a line for each of those.

    Hydra must have been initialized. ``folders``: where groups are. More than one config is composed (a second each)
    only if something is wrong.
    """
    compose, failures = partial(hydra.compose, return_hydra_config=True), (HydraException, OmegaConfBaseException)
    try:
        return compose(name, list(overrides)), []
    except failures:
        config = compose(name)
    chosen = config.hydra.runtime.choices
    wrong: list[str] = []
    groups: list[str] = []
    keys: list[Override] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except failures as error:
            wrong.append(f"{text}: {_not_parsed(text, error, folders)}")
            continue
        if override.is_sweep_override():
            wrong.append(f"{text}: this is several values; write a list as [a,b], and a comma in a text as '\"a,b\"'")
        elif _is_group(override.key_or_group, folders):
            if line := _wrong_group(override, chosen, folders):
                wrong.append(f"{text}: {line}")
            else:
                groups.append(text)
        else:
            keys.append(override)
    if groups:
        try:
            config = compose(name, groups)
        except failures as error:  # files that do not go together
            wrong.append(f"{' '.join(groups)}: {_first(error)}")
            groups = []
    plain, good = {key: value for key, value in unresolved(config).items() if key != "hydra"}, list(groups)
    for override in keys:
        if line := _wrong_key(override, plain, chosen, folders):
            wrong.append(f"{override.input_line}: {line}")
        else:
            good.append(override.input_line or "")
    try:
        return compose(name, good), wrong
    except failures as error:  # whatever else Hydra does not accept
        return compose(name, groups), [*wrong, _first(error)]


def leave_out(config: DictConfig, agent: str, overrides: Sequence[str]) -> None:
    """Remove the keys of an agent's group that an experiment has set for Claude Code: those that are Claude Code's, not
    in the file of the agent that is chosen, and named by no override. Hydra must have been initialized."""
    own, claude_codes = (hydra.compose(f"agent/{one}").agent for one in (agent, "claude_code"))
    given = {one.lstrip("+").partition("=")[0] for one in overrides}
    with open_dict(config):
        for key in {*config.agent} & {*claude_codes} - {*own}:  # unlike `in`, this counts one yet to be given (???)
            if f"agent.{key}" not in given:
                del config.agent[key]


def options(group: str, folders: Iterable[Path]) -> list[str]:
    """Return the names of a group's files, sorted."""
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def nearest(key: str, keys: Iterable[str]) -> str:
    """Return a phrase that names the keys which were perhaps meant by ``key``, or "" if none is close."""
    keys = list(keys)
    near = [one for one in keys if one == key or one.endswith(f".{key}")][:2]
    if not near:
        leaf = key.rpartition(".")[2]
        same = [one for one in keys if one.rpartition(".")[2] == leaf]
        near = difflib.get_close_matches(key, same, n=1, cutoff=0.0) or difflib.get_close_matches(key, keys, n=1)
    return f"did you mean {' or '.join(near)}?" if near else ""


def dotted(plain: Mapping[Any, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a config, those that group others included."""
    for name, value in plain.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{path}{name}.")


def _first(error: Exception) -> str:
    """Return the first line of a message, which says what is wrong; the lines after it are about Hydra itself."""
    return str(error).strip().partition("\n")[0].removesuffix(".")


def _is_group(key: str, folders: Iterable[Path]) -> bool:
    return "." not in key and any((folder / key).is_dir() for folder in folders)


def _not_parsed(text: str, error: Exception, folders: Iterable[Path]) -> str:
    if "=" in text:
        quoted = f"{text.partition('=')[0]}='\"...\"'"
        return f"the value cannot be read ({_first(error)}); quote it for Hydra, too: {quoted}"
    experiments = options("experiment", folders)
    near = difflib.get_close_matches(text, experiments, n=1)
    return f"write key=value{f'; did you mean +experiment={near[0]}?' if near else ''}"


def _wrong_group(override: Override, chosen: Mapping[str, str], folders: Sequence[Path]) -> str:
    group, element, value = override.key_or_group, override.get_key_element().lstrip("+~"), override.value()
    known = options(group, folders)
    if override.is_delete():
        return "" if element in chosen else "there is no such group"
    unknown = [str(one) for one in (value if isinstance(value, list) else [value]) if one not in known]
    if unknown:
        if ours := to_install(f"*/configs/{group}/{glob.escape(unknown[0])}.yaml"):
            return f"{unknown[0]!r} is not installed{ours}"
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        return f"there is no {group} {unknown[0]!r}{hint} there are {', '.join(known)}"
    if override.is_add() and not override.is_force_add() and element in chosen:
        return f"{element} has a choice already; leave out the +"
    if not override.is_add() and element not in chosen:
        return f"nothing is chosen here yet; write +{element}={value}"
    return ""


def _wrong_key(override: Override, plain: Any, chosen: Mapping[str, str], folders: Sequence[Path]) -> str:
    key, keys = override.key_or_group, list(dotted(plain))
    if key.split(".")[0].split("/")[0] == "hydra":
        return ""
    if key in keys:
        return "the key is there; leave out the +" if override.is_add() and not override.is_force_add() else ""
    if override.is_add():
        return ""
    absent = {folder.name for path in folders for folder in path.iterdir() if folder.is_dir()} - {*keys, *chosen}
    if "." not in key and (near := difflib.get_close_matches(key, absent, n=1)):
        return f"there is no such key; did you mean +{near[0]}={override.value()}?"
    return f"there is no such key; {nearest(key, keys) or 'python -m rl.keys lists all'}"
