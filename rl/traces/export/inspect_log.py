"""Write logs for Inspect's viewer (inspect_ai 0.3, version 2 of its format), with a sample per episode.

A log is a zip of JSON: a file per sample, and summaries.json and header.json, which are about all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from rl.data.choice import ChoiceEntry
from rl.run.weights import name_of
from rl.traces.export.conversation import ChatConversation, agent_name
from rl.traces.export.inspect_sample import Json, clock, sample
from rl.traces.export.sink import Sink
from rl.traces.export.source import ExportSource
from rollout import files
from rollout.program import shown
from rollout.records import Record

SAMPLES = 1000  # of a log; what goes on is in another one
_SHORT = 1000  # characters of a prompt in the list of samples
_LISTED = ("id", "epoch", "target", "metadata", "scores", "model_usage", "started_at", "completed_at", "total_time")


def write(source: ExportSource, out: Sink) -> None:
    """Write a log for each run, split and model, of at most SAMPLES episodes."""
    logs: dict[tuple[Path, str, str], _Log] = {}
    for entry, talks in source.talks():
        run = entry.path.parent.parent if entry.path.parent.name == "episodes" else entry.path.parent
        model = shown(source.name or name_of(entry.facts["model"]))
        record = talks[0].trace.record if talks else entry.record()
        key = (run, record.split, model)
        if key in logs and len(logs[key].samples) == SAMPLES:
            logs.pop(key).close()
        if key not in logs:
            logs[key] = _Log(out, run, record, model)
        logs[key].add(entry, record, talks)
    for log in logs.values():
        log.close()


class _Log:
    """A log is written sample by sample. ``first``: its first record; ``samples``: what is listed of each."""

    def __init__(self, out: Sink, run: Path, first: Record, model: str) -> None:
        self._out, self._run, self._model = out, shown(str(run)), model
        self._task = shown(f"{run.parent.name}/{run.name}/{first.split}")
        self._agent = shown(agent_name(first))
        self._id = hashlib.sha256(f"{run} {first.episode}".encode(errors="replace")).hexdigest()[:16]
        self._epochs = Counter[str]()
        self.samples: list[Json] = []
        # Inspect's list of logs takes time, task and id from the name.
        task = re.sub(r"[^A-Za-z0-9.-]+", "-", self._task)[-100:]
        self._file = f"{clock(first.started)[:19].replace(':', '-')}+00-00_{task}_{self._id}.eval"
        self._zip = ZipFile(out.directory / self._file, "w", ZIP_DEFLATED)

    def add(self, entry: ChoiceEntry, record: Record, talks: list[ChatConversation]) -> None:
        """Add an episode. The episodes of a task are its epochs."""
        task = shown(entry.task)
        self._epochs[task] += 1
        made: Json = {"id": task, "epoch": self._epochs[task], **sample(entry, record, talks, self._model)}
        self._member(f"samples/{task}_epoch_{self._epochs[task]}.json", made)
        listed = {key: made[key] for key in _LISTED} | {"input": made["input"][:_SHORT], "completed": True}
        listed |= {"error": made["error"] and made["error"]["message"], "message_count": len(made["messages"])}
        self.samples.append(listed | {"limit": made["limit"] and made["limit"]["type"]})
        self._out.rows[self._file] += 1

    def close(self) -> None:
        """Write what is said of all samples."""
        began, used = min(one["started_at"] for one in self.samples), Counter[str]()
        for one in self.samples:
            used.update(one["model_usage"].get(self._model, {}))
        ended = max(one["completed_at"] for one in self.samples)
        # A training run plays some tasks more often than others; then there is no number of epochs.
        total, times = len(self.samples), set(self._epochs.values())
        even = {"epochs": times.pop()} if len(times) == 1 else {}
        tasks: Json = {"name": self._task, "samples": len(self._epochs) if even else total}
        spec: Json = {"created": began, "task": self._task, "model": self._model, "config": even}
        spec |= dict.fromkeys(("eval_id", "run_id", "task_id"), self._id)
        spec |= {"dataset": tasks | {"sample_ids": list(self._epochs)}, "metadata": {"run": self._run}}
        header = {
            "version": 2,
            "status": "success",
            "eval": spec | {"packages": {"claude-code-rl": version("claude-code-rl")}},
            "plan": {"steps": [{"solver": self._agent, "params": {}}]},
            "results": self._results(),
            "stats": {"started_at": began, "completed_at": ended, "model_usage": {self._model: dict(used)}},
        }
        self._member("summaries.json", self.samples)
        self._member("header.json", header)
        self._zip.close()
        files.sync(self._out.directory / self._file)

    def _results(self) -> Json:
        total, scores = len(self.samples), [one["scores"] for one in self.samples if one["scores"]]
        counts = {"scored_samples": len(scores), "unscored_samples": total - len(scores)}
        found = {("resolved", "accuracy"): [float(one["resolved"]["value"] == "C") for one in scores]}
        found["reward", "mean"] = [one["reward"]["value"] for one in scores]
        told = [
            {"name": name, "scorer": name, **counts, "metrics": {how: {"name": how, "value": fmean(values)}}}
            for (name, how), values in found.items()
            if values
        ]
        failed = sum(one["error"] is not None for one in self.samples)
        return {"total_samples": total, "completed_samples": total - failed, "scores": told}

    def _member(self, name: str, value: Any) -> None:
        self._zip.writestr(name, json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
