"""Say what each key of the config is: where it is set, to what, and what it does.

    python -m rl.keys [WORD...]     the keys whose name or description has all these words; without words, all
    python -m rl.keys --markdown    all files and keys as one page

A description is the comment above a key in configs/, or behind its value; a key without one has the line that describes
it in another file of ours, or in verl's own files. Exit status: 0 something was printed, 1 no key has these words.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rl.config import config_folders, package_dir
from rollout import program

_LONG = 60  # characters of a value

_HEAD = """# Config reference

Made by `python -m rl.keys --markdown` from the comments in `configs/`; change those.

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
        """The description, as one line."""
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
        text, relative = path.read_text(), Path(_name(path))
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
    """Return the path below the folder of configs that it is in."""
    return next(path.relative_to(one) for one in config_folders() if path.is_relative_to(one)).as_posix()


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
        relative = Path(_name(path))
        if relative.name == "train.yaml":
            return -1, ""
        first = relative.parts[0]
        return groups.index(first) if first in groups else len(groups), relative.as_posix()

    found = [path for one in config_folders() for path in one.rglob("*.yaml") if path.name != "agent_loops.yaml"]
    return sorted(found, key=order)


def reference() -> str:
    """Return all files and keys, with an index, as Markdown."""
    found = everything()
    return "\n".join([_HEAD, *(section(path, some) for path, some in found.items()), index(found)])


def matching(words: Sequence[str]) -> str:
    """Return the keys whose names or descriptions have all these words, each with its values and its description."""
    values: dict[str, list[str]] = {}
    about: dict[str, str] = {}
    for path, some in everything().items():
        for key in some:
            values.setdefault(key.name, []).append(f"{key.value or '(a group)'} in {_name(path)}")
            about.setdefault(key.name, key.about)
    chosen = [name for name in values if all(word.lower() in f"{name} {about[name]}".lower() for word in words)]
    chosen.sort(key=lambda name: (not all(word in name for word in words), name))
    blocks = []
    for name in chosen:
        description = textwrap.indent(textwrap.fill(about[name], 112), "  ")
        blocks.append("\n".join([name, *(f"    {value}" for value in values[name]), description]))
    return "\n\n".join(blocks)


def main() -> int:
    """Print what was asked for; return the exit status."""
    parser = program.parser("python -m rl.keys", __doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--markdown", action="store_true", help="print all as one page")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(reference(), end="")
        return 0
    text = matching(arguments.words)
    print(text or f"no key, and no description of one, has {' and '.join(arguments.words)}")
    return 0 if text else 1


if __name__ == "__main__":
    program.end(main)
