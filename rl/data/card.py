"""The card of a task file: what is in it, and what each of the commands that led to it did."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from rl.run.screen import this_command
from rollout import files

_COUNTED = {
    "repo": "repositories",
    "set": "sets",
    "licence": "licences",
    "maker": "makers",
    "difficulty": "difficulties",
}
_RATES = (("never", 0.0), ("up to 0.2", 0.2), ("up to 0.8", 0.8), ("below 1", 1 - 1e-9), ("always", 1.0))


def write_card(out: Path, did: str, source: Path | None = None, text: Sequence[str] = (), **details: Any) -> None:
    """Write OUT.card.json and OUT.card.md.

    did: what the command did, such as "admitted". source: the task file from which it made OUT; the steps of its card
    come first. details: what else is to be known of this step, as JSON values. text: the lines in the document that
    describe them, in place of one line for each. Raises OSError.
    """
    step = {"did": did, "command": this_command(), "file": out.name, "sha256": _digest(out), **details}
    if text:
        step["text"] = list(text)
    card = {**facts(out), "steps": [*_steps(source), step]}
    files.write(beside(out, "card.json"), json.dumps(card, indent=1) + "\n")
    files.write(beside(out, "card.md"), "\n".join(to_markdown(card)) + "\n")


def beside(out: Path, name: str) -> Path:
    """Return the path of what belongs to a task file: OUT.name for OUT.parquet."""
    return out.with_name(f"{out.stem}.{name}")


def facts(path: Path) -> dict[str, Any]:
    """Return how many rows a task file has: in all, and of each repository, licence, maker and rate."""
    head = pyarrow.parquet.read_schema(path).names
    names = [name for name in (*_COUNTED, "image", "resolve_rate") if name in head]
    columns = pyarrow.parquet.read_table(path, columns=names).to_pydict()
    found: dict[str, Any] = {"tasks": pyarrow.parquet.read_metadata(path).num_rows}
    for name, title in _COUNTED.items():
        found[title] = _counts("not recorded" if value is None else value for value in columns.get(name, ()))
    found["boxes"] = _counts("snapshots" if image.startswith("dir:") else "images" for image in columns["image"])
    rates = (rate for rate in columns.get("resolve_rate", ()) if rate is not None)
    found["resolve_rates"] = _counts(next(name for name, most in _RATES if rate <= most) for rate in rates)
    return found


def to_markdown(card: Mapping[str, Any]) -> list[str]:
    """Return a card as the lines of a document for people."""
    lines = [f"# {card['tasks']} tasks", "", "| of them | | tasks |", "| --- | --- | --- |"]
    for title, counts in card.items():
        if isinstance(counts, Mapping) and counts:
            shown = list(counts.items())
            lines += [f"| {title.replace('_', ' ')} | {name} | {count} |" for name, count in shown[:_MOST]]
            if more := shown[_MOST:]:
                lines.append(f"| | {len(more)} others | {sum(count for _, count in more)} |")
    for step in card["steps"]:
        lines += ["", f"**{step['did'].capitalize()}** as `{step['file']}` (SHA-256 `{step['sha256'][:16]}`):", ""]
        lines.append(f"    {step['command']}")
        said = {name: value for name, value in step.items() if name not in ("did", "file", "sha256", "command")}
        said_in_lines = [f"- {name.replace('_', ' ')}: {_in_words(value)}" for name, value in said.items()]
        lines += ["", *step.get("text", said_in_lines)] if said else []
    return lines


_MOST = 20  # lines of a kind


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(one)}" for name, one in value.items())
    return str(value)


def _counts(values: Iterable[Any]) -> dict[str, int]:
    return {str(name): count for name, count in Counter(values).most_common()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(source: Path | None) -> list[dict[str, Any]]:
    """Return the steps of a task file's card; if it has none, a step that says so."""
    if source is None:
        return []
    try:
        steps = json.loads(beside(source, "card.json").read_text())["steps"]
        if isinstance(steps, list):
            return steps
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return [{"did": "found", "command": "(it had no card)", "file": source.name, "sha256": _digest(source)}]
