"""Samples are a few episodes of each step as people read them, for wandb's tables, TensorBoard and the report.

Workers write the first ones that they have of each kind into ``samples/<host>-<pid>.jsonl`` of the run directory; the
trainer puts a few of them into its loggers. The whole episodes are in the records (``rollout.records``).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rl.metrics.episodes import EpisodeLog, Tails
from rl.metrics.loggers import Loggers
from rollout.figures import line
from rollout.proxy.blocks import blocks_of
from rollout.records import Record
from rollout.trace import TraceError, trace

EACH = 2  # of a step's resolved episodes, and of its others
_TEXT = 2000  # characters of a patch, and of the last messages
COLUMNS = ("step", "split", "task", "verdict", "reward", "turns", "tokens_sampled", "patch", "last messages", "episode")


class SampleLog:
    """A log keeps ``EACH`` resolved episodes, and as many others, of each step and split of this process."""

    def __init__(self, run_dir: Path) -> None:
        self._log = EpisodeLog(run_dir, "samples")
        self._kept = Counter[tuple[Any, ...]]()

    def offer(self, record: Record) -> None:
        """Keep the attempt if there is room for its kind. Infrastructure failures say nothing and are never kept."""
        one = line(record)
        kind = (one["split"], one["step"], one["resolved"])
        if one["infra"] or self._kept[kind] >= EACH:
            return
        self._kept[kind] += 1
        self._log.append(sample(record))


def sample(record: Record) -> dict[str, Any]:
    """Return one row of the table, by ``COLUMNS``."""
    values: dict[str, Any] = line(record)
    values["verdict"] = values["reason"] or "resolved"
    values["patch"] = _cut(record.patch.decode("utf-8", "replace"))
    values["last messages"] = last_messages(record)
    return {name: values[name] for name in COLUMNS}


def last_messages(record: Record) -> str:
    """Return the end of what was said in an episode, in the order of the replies."""
    said: list[str] = []
    try:
        for point in trace(record).delivered:
            read = [one for one in point.read if not isinstance(one, int)]
            for message in [*read, {"role": "assistant", "content": point.blocks}]:
                said += (f"[{message['role']}] {_shown(block)}" for block in blocks_of(message["content"]))
    except TraceError as error:
        return f"({error})"
    text = "\n".join(said)
    return text if len(text) <= _TEXT else f"... {text[-_TEXT:]}"


def _shown(block: dict[str, Any]) -> str:
    match block.get("type"):
        case "text":
            return str(block.get("text"))
        case "thinking":
            return f"(thinking) {block.get('thinking')}"
        case "tool_use":
            return f"{block.get('name')} {json.dumps(block.get('input'))}"
        case "tool_result":
            answer = block.get("content")
            return f"=> {answer if isinstance(answer, str) else json.dumps(answer)}"
        case kind:
            return f"({kind})"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} ..."


class SampleReader:
    """A reader takes in what all sample logs of a run wrote since it was made."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = Tails(run_dir / "samples")

    def take(self) -> list[dict[str, Any]]:
        """Return the new samples, at most ``EACH`` resolved ones and as many others per split, resolved ones first."""
        kept = Counter[tuple[str, bool]]()
        chosen = []
        for one in self._tails.take():
            kind = (one["split"], one["verdict"] == "resolved")
            kept[kind] += 1
            if kept[kind] <= EACH:
                chosen.append(one)
        return sorted(chosen, key=lambda one: (one["split"], one["verdict"] != "resolved"))


def log_samples(samples: list[dict[str, Any]], loggers: Loggers, step: int) -> None:
    """Put samples into the loggers that can show them."""
    if not samples:
        return
    if wandb_run := loggers.logger.get("wandb"):
        with loggers.guarded("wandb"):
            import wandb

            rows: list[Any] = [[one[name] for name in COLUMNS] for one in samples]
            wandb_run.log({"samples/episodes": wandb.Table(list(COLUMNS), rows)}, step=step)
    if tensorboard := loggers.logger.get("tensorboard"):
        with loggers.guarded("tensorboard"):
            text = "\n\n".join(_markdown(one) for one in samples)
            tensorboard.writer.add_text("samples/episodes", text, step)


def _markdown(one: dict[str, Any]) -> str:
    title = ", ".join(f"{name} {one[name]}" for name in COLUMNS if name not in ("patch", "last messages"))
    bodies = (f"    {text}" for name in ("patch", "last messages") for text in one[name].splitlines())
    return f"**{title}**\n\n" + "\n".join(bodies)
