"""The command line of the programs that take an experiment: overrides, ``--help``, ``--cfg job``."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.compose import CONFIGS, ConfigError, compose, config_folders, package_dir, unresolved
from rl.config.overrides import nearest, options
from rollout.program import failed, plain

# Folders of configs/ that nobody chooses from.
_SHARED = ("base", "engine_defaults", "experiment", "twin")


def read_command(
    program: str, about: str, arguments: Sequence[str], check: Callable[[DictConfig], object] | None = None
) -> DictConfig:
    """Return the config of a command line, or exit: with 0 after ``--help`` or ``--cfg``, with 2 if something is wrong.

    program: such as "rl.train". about: what it does, the first line of its help. check: see ``compose``.
    """
    try:
        return _read(program, about, arguments, check)
    except ConfigError as error:
        error.tell()
        sys.exit(2)


def _read(
    program: str, about: str, arguments: Sequence[str], check: Callable[[DictConfig], object] | None
) -> DictConfig:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", nargs="?", const="job")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("overrides", nargs="*")
    given, unknown = parser.parse_known_intermixed_args(arguments)
    if given.help:
        print(plain(help_text(program, about)))
        sys.exit(0)
    if unknown:
        raise ConfigError(*(f"{one}: there is no such option; --help lists them" for one in unknown))
    if not arguments:
        _choose(program)
    if given.cfg not in (None, "job"):
        raise ConfigError(f"--cfg {given.cfg}: only --cfg job is there, which shows the config")
    config = compose(given.overrides, check=check)
    keys = {one.partition("=")[0].lstrip("+"): one for one in given.overrides}
    if config.prepare and program != "rl.plan" and _MADE.keys() & keys.keys():  # rl.plan makes nothing
        made = f"{config.prepare} makes this when the run starts, and would replace what you give"
        raise ConfigError(*(f"{keys[key]}: {made}; {instead}" for key, instead in _MADE.items() if key in keys))
    if given.cfg:
        print(show(config, given.package, given.resolve), end="")
        sys.exit(0)
    named = any(one.lstrip("+").startswith("experiment=") for one in given.overrides)
    if not named and not OmegaConf.select(config, "actor_rollout_ref.model.path"):
        _choose(program)
    return config


# What a config's `prepare` makes, and what a user gives instead.
_MADE = {
    "actor_rollout_ref.model.path": "give policy=MODEL",
    "data.train_files": "with prepare=null policy=MODEL it takes yours",
    "data.val_files": "with prepare=null policy=MODEL it takes yours",
}


def _choose(program: str) -> NoReturn:
    shown = plain(experiments())
    sys.exit(failed(f"config: choose an experiment: python -m {program} +experiment=NAME\n\n{shown}", 2))


def show(config: DictConfig, package: str | None = None, resolve: bool = False) -> str:
    """Return a config as YAML: our groups, then verl's. package: only what is below this key. Raises ConfigError."""
    generated = Path(package_dir("verl"), "trainer", "config", "_generated_ppo_trainer.yaml").read_text()
    verls = set(re.findall(r"^(\w+):", generated, re.MULTILINE))
    ordered = OmegaConf.create(dict(sorted(unresolved(config).items(), key=lambda item: item[0] in verls)))
    try:
        if package is None:
            return OmegaConf.to_yaml(ordered, resolve=resolve)
        part = OmegaConf.select(ordered, package)
        if isinstance(part, DictConfig):
            return OmegaConf.to_yaml(part, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).partition("\n")[0]) from error
    raise ConfigError(f"--package {package}: there is no such group of keys; {nearest(package, map(str, ordered))}")


def experiments() -> str:
    """Return what each experiment is: the first sentence of its file."""
    files = sorted(file for folder in config_folders() for file in (folder / "experiment").glob("*.yaml"))
    width = max(len(file.stem) for file in files)
    beside = " " * (width + 4)
    lines = ((f"  {file.stem:<{width}}  ", _sentence(file)) for file in files)
    return "\n".join(textwrap.fill(text, 120, initial_indent=name, subsequent_indent=beside) for name, text in lines)


def _sentence(file: Path) -> str:
    lines = [line.lstrip("# ") for line in file.read_text().partition("\n\n")[0].splitlines()]
    text = " ".join(line for line in lines if line and "@package" not in line)
    return re.split(r"(?<=\.)(?<!al\.)\s|: `|; docs/", text)[0]


def help_text(program: str, about: str) -> str:
    """Return what ``--help`` prints."""
    groups = [folder.name for folder in sorted(CONFIGS.iterdir()) if folder.is_dir() and folder.name not in _SHARED]
    folders = config_folders()
    choices = "\n".join(f"  {group}={'|'.join(options(group, folders))}" for group in groups)
    about = about.strip()
    if f"python -m {program} " not in about:
        about += f"\n\n  python -m {program} +experiment=NAME [group=choice ...] [key=value ...]"
    return f"""{about}

experiments
{experiments()}

groups (with a + where nothing is chosen yet)
{choices}

options
  --cfg job        print the config and end; our groups come first, then verl's
  --package KEY    with --cfg: only what is below KEY
  --resolve        with --cfg: with ${{...}} replaced by values

python -m rl.keys [WORD...] says what each key is."""
