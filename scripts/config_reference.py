"""Write docs/config.md from the comments in configs/: the comment above a key, or behind its value, describes it.

.venv/bin/python scripts/config_reference.py            # write it
.venv/bin/python scripts/config_reference.py --check    # exit status 1 if it is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, OUT = ROOT / "configs", ROOT / "docs" / "config.md"
_LONG = 60  # characters of a value

_HEAD = """# Config reference

Made by `scripts/config_reference.py` from the comments in `configs/`; change those.

A run's config is `configs/train.yaml`, then the groups that it names (`agent`, `proxy`, `sandbox`, `grading`,
`cluster`, `plan`), then the experiment, then what is on the command line:

    python -m rl.train +experiment=quickstart sandbox=docker data.train_batch_size=8

Keys of `actor_rollout_ref`, `algorithm`, `data`, `trainer` and the like are verl's; here are those that this project
sets. verl documents all of them in `verl/trainer/config/`. What a run was started with is in its `config.yaml`.
"""


@dataclass(frozen=True)
class Key:
    """A key with its place, its value as YAML and what is said about it; the value of one that only groups is empty."""

    name: str
    value: str
    about: str


def keys(text: str) -> Iterator[Key]:
    """Yield the keys of a YAML file in its order. A key that only groups others is left out unless it has a comment."""
    root = yaml.compose(text)
    if isinstance(root, yaml.MappingNode):
        yield from _keys(root, "", text.splitlines())


def _keys(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Key]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name == "defaults":  # Hydra's own
            continue
        about = _comment(lines, key, value)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            if about:
                yield Key(name, "", about)
            yield from _keys(value, f"{name}.", lines)
        else:
            shown = yaml.safe_dump(yaml.safe_load(yaml.serialize(value)), default_flow_style=True, width=10**6)
            yield Key(name, shown.removesuffix("\n").removesuffix("\n..."), about)


def _comment(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    """Return the comment of a key: the lines directly above it with its indentation, and what is behind its value."""
    said = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.startswith("#", key.start_mark.column) or line[: key.start_mark.column].strip():
            break
        said.append(line.strip().lstrip("#").strip())
    said.reverse()
    end = value.end_mark
    if end.line == key.start_mark.line and (behind := lines[end.line][end.column :].strip()).startswith("#"):
        said.append(behind.lstrip("# "))
    return " ".join(said).strip()


def header(text: str) -> str:
    """Return the comment that a file begins with, if a blank line separates it from the first key."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            return "\n".join(lines).strip() if not line.strip() else ""
        if "@package" not in line:
            lines.append(line.lstrip("#").removeprefix(" "))
    return "\n".join(lines).strip()


def section(path: Path) -> str:
    """Return a file as Markdown."""
    text, relative = path.read_text(), path.relative_to(CONFIGS)
    prefix = "" if len(relative.parts) == 1 or "@package _global_" in text else f"{relative.parts[0]}."
    said = header(text)
    # Indented lines of a comment are commands.
    said = "\n".join(f"  {line}" if line.startswith("  ") else line for line in said.splitlines())
    parts = [f"## {relative.as_posix()}", *([said] if said else [])]
    rows = [f"| `{prefix}{key.name}` | {_value(key.value)} | {_cell(key.about)} |" for key in keys(text)]
    if rows:
        parts.append("\n".join(["| key | value | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _value(value: str) -> str:
    code = value.replace("|", "\\|")
    return f"`{code}`" if 0 < len(value) <= _LONG else "see the file" if value else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def files() -> list[Path]:
    """train.yaml, the groups' files, the experiments, then what they share. agent_loops.yaml is verl's list."""
    groups = ("agent", "proxy", "sandbox", "grading", "cluster", "plan", "experiment")

    def order(path: Path) -> tuple[int, str]:
        relative = path.relative_to(CONFIGS)
        if relative.name == "train.yaml":
            return -1, ""
        first = relative.parts[0]
        return groups.index(first) if first in groups else len(groups), relative.as_posix()

    found = [path for path in CONFIGS.rglob("*.yaml") if path.name != "agent_loops.yaml"]
    return sorted(found, key=order)


def reference() -> str:
    return "\n".join([_HEAD, *map(section, files())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = reference()
    if not parser.parse_args().check:
        OUT.write_text(text)
    elif not OUT.exists() or OUT.read_text() != text:
        print(f"{OUT.relative_to(ROOT)} is not up to date: run scripts/config_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
