"""Write docs/config.md from the comments in configs/: the comment above a key, or behind its value, describes it.

A key without one has the line that describes it in another file of ours, or in verl's own files. A key that has no line
at all is an error.

    .venv/bin/python scripts/config_reference.py            # write it
    .venv/bin/python scripts/config_reference.py --check    # exit status 1 if it is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rl.config import package_dir
from rollout import program

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, OUT = ROOT / "configs", ROOT / "docs" / "config.md"
_LONG = 60  # characters of a value

_HEAD = """# Config reference

Made by `scripts/config_reference.py` from the comments in `configs/`; change those.

A run's config is `configs/train.yaml`, then the groups that it names (`agent`, `proxy`, `sandbox`, `grading`,
`sft`, `store`, `cluster`, `plan`), then the experiment with its recipe and scale, then what is on the command line:

    python -m rl.train +experiment=quickstart sandbox=docker data.train_batch_size=8

Keys of `actor_rollout_ref`, `algorithm`, `data`, `trainer` and the like are verl's; here are those that this project
sets, and "verl:" is what verl says of one. verl documents all of them in `verl/trainer/config/`. `python -m rl.train
--cfg job +experiment=NAME` prints a whole config, ours first. What a run was started with is in its `config.yaml`.
"""


@dataclass(frozen=True)
class Key:
    """A key has its place, its value as YAML ("" if it only groups others) and the lines that describe it."""

    name: str
    value: str
    lines: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        return " ".join(self.lines).strip()


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


def _comment(lines: list[str], key: yaml.Node, value: yaml.Node) -> tuple[str, ...]:
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
    return tuple(said)


def header(text: str) -> str:
    """Return the comment that a file begins with, if a blank line separates it from the first key."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            return "\n".join(lines).strip() if not line.strip() else ""
        if "@package" not in line:
            lines.append(line.lstrip("#").removeprefix(" "))
    return "\n".join(lines).strip()


def verls() -> dict[str, str]:
    """Return what verl's own files say about its keys, by their full names, for FSDP and for Megatron."""
    said: dict[str, str] = {}
    root = Path(package_dir("verl")) / "trainer" / "config"

    def read(path: Path, prefix: str) -> None:
        text = path.read_text()
        for entry in (yaml.safe_load(text) or {}).get("defaults", []):
            group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
            group, _, package = group.partition("@")
            for engine in ("dp", "megatron") if "$" in name else ("",):
                file = path.parent / group / f"{name.replace('${model_engine}', engine)}.yaml"
                if file.exists():
                    read(file, f"{prefix}{package}." if package else prefix)
        for key in keys(text):
            if line := _first(key.lines):
                said.setdefault(f"{prefix}{key.name}", line)

    read(root / "ppo_trainer.yaml", "")
    return said


def _first(lines: Sequence[str]) -> str:
    """Return the first sentence of a comment of verl's, whose lines often are sentences without a full stop."""
    said = ""
    for line in lines:
        if said and (line[:1].isupper() or not line[:1].isalpha() or line.startswith("oc.select")):
            break
        said = f"{said} {line}".strip()
    return said.lstrip("# ")


def everything() -> dict[Path, list[Key]]:
    """Return the keys of each file with their full names; one without a comment has the line of another place."""
    found = {}
    for path in files():
        text, relative = path.read_text(), path.relative_to(CONFIGS)
        prefix = "" if len(relative.parts) == 1 else f"{relative.parts[0]}."
        if package := re.search(r"@package (\S+)", text):
            prefix = "" if package[1] == "_global_" else f"{package[1]}."
        found[path] = [replace(key, name=f"{prefix}{key.name}") for key in keys(text)]
    said: dict[str, str] = {}
    for key in (key for some in found.values() for key in some if key.about):
        said.setdefault(key.name, key.about)
    said |= {name: f"verl: {line}" for name, line in verls().items()}
    return {
        path: [key if key.about else replace(key, lines=(said.get(key.name, ""),)) for key in some]
        for path, some in found.items()
    }


def section(path: Path, some: Sequence[Key]) -> str:
    """Return a file as Markdown."""
    said = header(path.read_text())
    # Indented lines of a comment are commands.
    said = "\n".join(f"  {line}" if line.startswith("  ") else line for line in said.splitlines())
    parts = [f"## {_name(path)}", *([said] if said else [])]
    rows = [f"| `{key.name}` | {_value(key.value)} | {_cell(key.about)} |" for key in some]
    if rows:
        parts.append("\n".join(["| key | value | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def index(found: Mapping[Path, Sequence[Key]]) -> str:
    """Return the list of files, and the list of keys with the files that set them, as Markdown."""
    where: dict[str, list[Path]] = {}
    for path, some in found.items():
        for key in some:
            where.setdefault(key.name, []).append(path)
    keys_ = [f"- `{name}`: {', '.join(map(_link, paths))}" for name, paths in sorted(where.items())]
    return "\n".join(["## Index", "", *(f"- {_link(path)}" for path in found), "", "Keys:", "", *keys_, ""])


def _name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def _link(path: Path) -> str:
    return f"[{_name(path)}](#{re.sub(r'[^a-z0-9_-]', '', _name(path).lower())})"


def _value(value: str) -> str:
    code = value.replace("|", "\\|")
    return f"`{code}`" if 0 < len(value) <= _LONG else "see the file" if value else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def files() -> list[Path]:
    """Return train.yaml, the groups' files, the experiments, then what they share, without verl's agent_loops.yaml."""
    groups = ("agent", "proxy", "sandbox", "grading", "sft", "cluster", "plan", "experiment", "recipe")

    def order(path: Path) -> tuple[int, str]:
        relative = path.relative_to(CONFIGS)
        if relative.name == "train.yaml":
            return -1, ""
        first = relative.parts[0]
        return groups.index(first) if first in groups else len(groups), relative.as_posix()

    found = [path for path in CONFIGS.rglob("*.yaml") if path.name != "agent_loops.yaml"]
    return sorted(found, key=order)


def reference() -> str:
    found = everything()
    return "\n".join([_HEAD, *(section(path, some) for path, some in found.items()), index(found)])


def main() -> int:
    parser = program.parser("python scripts/config_reference.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    for path, some in everything().items():
        if silent := [key.name for key in some if not key.about]:
            print(f"{path.relative_to(ROOT)}: nothing says what these are: {', '.join(silent)}", file=sys.stderr)
            return 1
    text = reference()
    if not parser.parse_args().check:
        OUT.write_text(text)
    elif not OUT.exists() or OUT.read_text() != text:
        print(f"{OUT.relative_to(ROOT)} is not up to date: run scripts/config_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
