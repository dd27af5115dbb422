"""Export Claude Code's session files as they are, and the patches of episodes as SWE-bench's predictions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from rl.data.choice import ChoiceEntry
from rl.data.select import about
from rl.run.weights import name_of
from rl.traces.export.sink import ExportError, Sink
from rl.traces.export.source import ExportSource

_CARD = """---
tags: [agent-traces, claude-code]
---
Sessions of Claude Code, as it wrote them: a directory per episode, sub-agents in `subagents/`. Review them before you
publish them: they hold prompts, commands, their output and code.
"""


def write_sessions(source: ExportSource, out: Sink) -> None:
    """Copy Claude Code's own session files of collections, with the data card of the Hugging Face Hub's viewer."""
    for entry in source.entries():
        name = entry.facts["episode"]
        found = _sessions(entry)
        if not found:
            source.left_out.append(
                f"{entry.path}, offset {entry.offset}: {name}: no session files; collections have them"
            )
            continue
        for path, inside in found:
            target = out.directory / "sessions" / quote(name, safe="") / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            out.rows["sessions"] += 1
        source.exported.append(name)
    out.text("README.md", _CARD)


def _sessions(entry: ChoiceEntry) -> list[tuple[Path, Path]]:
    """Return the session files of an episode: where each is, and its path without the name of the box's directory."""
    for run in _runs(entry.path.parent.parent):
        for place in sorted((run / "traces" / quote(entry.task, safe="")).glob("epoch_*")):
            try:
                told = json.loads((place / "episode.json").read_text())["episode"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if told == entry.facts["episode"]:
                sessions = place / "sessions"
                paths = [path for path in sorted(sessions.rglob("*.jsonl")) if path.name != "hooks.jsonl"]
                parts = [(path, path.relative_to(sessions).parts[1:]) for path in paths]
                return [(path, Path(*inside)) for path, inside in parts if inside]
    return []


def _runs(run: Path) -> Iterator[Path]:
    """Yield a run, or, of a selection, the runs that it is from."""
    yield run
    waiting = list(about(run).get("sources") or ())
    while waiting:
        one = waiting.pop(0)
        yield Path(one["run"])
        waiting += one.get("sources") or []


def write_predictions(source: ExportSource, out: Sink) -> None:
    """Write preds.json with the first episode of each task, as sb-cli and swebench take it, preds.1.json with the
    second, and so on. Raises ExportError if there are several models and no name for them."""
    samples = [
        {one["instance_id"]: one for one in json.loads(path.read_text())}
        for path in map(out.directory.joinpath, map(_predictions, range(len(out.known))))
        if path.exists()  # of an export that is appended to
    ]
    for entry in source.entries():
        number = next((n for n, sample in enumerate(samples) if entry.task not in sample), len(samples))
        if number == len(samples):
            samples.append({})
        patch = entry.record().patch.decode("utf-8", "replace")
        name = source.name or name_of(entry.facts["model"])
        samples[number][entry.task] = {"instance_id": entry.task, "model_name_or_path": name, "model_patch": patch}
        source.exported.append(entry.facts["episode"])
    models = {one["model_name_or_path"] for sample in samples for one in sample.values()}
    if len(models) > 1:
        raise ExportError(
            f"predictions are of one model, here are {len(models)}; choose with rl.data.select, or --name"
        )
    for number, sample in enumerate(samples):
        out.text(_predictions(number), json.dumps([sample[task] for task in sorted(sample)], indent=1) + "\n")
        out.rows[_predictions(number)] = len(sample)


def _predictions(number: int) -> str:
    return f"preds.{number}.json" if number else "preds.json"
