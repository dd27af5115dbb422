"""Say what each key of the config is: where it is set, to what, and what it does.

    python -m rl.keys [WORD...]     the keys whose name or description has all these words; without words, all
    python -m rl.keys --markdown    all files and keys as one page

A description is the comment above a key in configs/, or behind its value; a key without one has the line that describes
it in another file of ours, or in verl's own files. Behind it is the range that rl.checks.numbers demands of the value.
Exit status: 0 something was printed, 1 no key has these words.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rl.checks.numbers import POSITIVE, POSITIVE_OR_NULL
from rl.config.compose import config_folders, package_dir
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


def everything() -> dict[str, list[Key]]:
    """Return the keys of each file with their full names; one without a comment has the line of another place."""
    found = {}
    for file, path in files().items():
        text, folder = path.read_text(), file.rpartition("/")[0].partition("/")[0]
        prefix = f"{folder}." if folder else ""
        if package := re.search(r"@package (\S+)", text):
            prefix = "" if package[1] == "_global_" else f"{package[1]}."
        found[file] = [replace(key, name=f"{prefix}{key.name}") for key in keys(text)]
    said: dict[str, str] = {}
    for key in (key for some in found.values() for key in some if key.about):
        said.setdefault(key.name, key.about)
    said |= {name: f"verl: {line}" for name, line in verls().items()}
    ranges = dict.fromkeys(POSITIVE, "(Above 0.)") | dict.fromkeys(POSITIVE_OR_NULL, "(Above 0, or null.)")

    def described(key: Key) -> Key:
        about = key.about or said.get(key.name, "")
        return replace(key, lines=(about, ranges.get(key.name, "") if about else ""))

    return {file: [described(key) for key in some] for file, some in found.items()}


def by_name(found: Mapping[str, Sequence[Key]]) -> dict[str, list[tuple[str, Key]]]:
    """Return the keys by their names, each with the files that set it."""
    where: dict[str, list[tuple[str, Key]]] = {}
    for file, some in found.items():
        for key in some:
            where.setdefault(key.name, []).append((file, key))
    return where


def section(file: str, path: Path, some: Sequence[Key]) -> str:
    """Return a file as Markdown."""
    said = header(path.read_text())
    # Indented lines of a comment are commands.
    said = "\n".join(f"  {line}" if line.startswith("  ") else line for line in said.splitlines())
    parts = [f"## {file}", *([said] if said else [])]
    rows = [f"| `{key.name}` | {_value(key.value)} | {_cell(key.about)} |" for key in some]
    if rows:
        parts.append("\n".join(["| key | value | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def index(found: Mapping[str, Sequence[Key]]) -> str:
    """Return the list of files, and the list of keys with the files that set them, as Markdown."""
    keys_ = [
        f"- `{name}`: {', '.join(_link(file) for file, _ in where)}" for name, where in sorted(by_name(found).items())
    ]
    return "\n".join(["## Index", "", *(f"- {_link(file)}" for file in found), "", "Keys:", "", *keys_, ""])


def _link(file: str) -> str:
    return f"[{file}](#{re.sub(r'[^a-z0-9_-]', '', file.lower())})"


def _value(value: str) -> str:
    code = value.replace("|", "\\|")
    return f"`{code}`" if 0 < len(value) <= _LONG else "see the file" if value else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def files() -> dict[str, Path]:
    """Return the files by their names below their folder of configs; of files with one name ours, as Hydra does.

    The order is train.yaml, the groups' files, the experiments, then what they share. verl's agent_loops.yaml is none.
    """
    groups = ("agent", "proxy", "sandbox", "grading", "sft", "cluster", "plan", "experiment", "recipe")

    def order(file: str) -> tuple[int, str]:
        if file == "train.yaml":
            return -1, ""
        first = file.partition("/")[0]
        return groups.index(first) if first in groups else len(groups), file

    found: dict[str, Path] = {}
    for folder in config_folders():
        for path in folder.rglob("*.yaml"):
            if path.name != "agent_loops.yaml":
                found.setdefault(path.relative_to(folder).as_posix(), path)
    return {file: found[file] for file in sorted(found, key=order)}


def reference() -> str:
    """Return all files and keys, with an index, as Markdown."""
    found = everything()
    sections = (section(file, path, found[file]) for file, path in files().items())
    return "\n".join([_HEAD, *sections, index(found)])


def matching(words: Sequence[str]) -> str:
    """Return the keys whose names or descriptions have all these words, each with its values and its description."""
    wanted = [word.lower() for word in words]
    chosen = [
        (not all(word in name.lower() for word in wanted), name, where)
        for name, where in by_name(everything()).items()
        if all(word in f"{name} {where[0][1].about}".lower() for word in wanted)
    ]
    blocks = []
    for _, name, where in sorted(chosen, key=lambda one: one[:2]):
        values = [f"    {key.value or '(a group)'} in {file}" for file, key in where]
        description = textwrap.indent(textwrap.fill(where[0][1].about, 112), "  ")
        blocks.append("\n".join([name, *values, description]))
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
