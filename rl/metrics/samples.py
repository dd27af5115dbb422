"""A few episodes of each step as people read them, for wandb's tables and TensorBoard.

Workers write the first ones they have of each kind into ``samples/<host>-<pid>.jsonl`` of the run directory; the
trainer takes a few of them into its loggers. The whole episodes are in the records (``rollout.records``).
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from rl.metrics.episodes import Tail
from rollout.episode import Episode

EACH = 2  # of a step's resolved episodes, and of its others
_TEXT = 2000  # characters of a patch, and of the last messages
COLUMNS = ("step", "split", "task", "verdict", "reward", "turns", "tokens sampled", "patch", "last messages", "episode")


class SampleLog:
    """Keeps ``EACH`` resolved and as many other episodes of each step and split of this process."""

    def __init__(self, run_dir: Path) -> None:
        directory = run_dir / "samples"
        directory.mkdir(exist_ok=True)
        self.path = directory / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._kept = Counter[tuple[str, int, bool]]()

    def offer(self, episode: Episode, split: str, step: int) -> None:
        """Infrastructure failures are not kept: they say nothing about the policy."""
        kind = (split, step, episode.verdict.reason is None)
        if episode.verdict.is_infra or self._kept[kind] >= EACH:
            return
        self._kept[kind] += 1
        with open(self.path, "a") as file:
            file.write(json.dumps(sample(episode, split, step)) + "\n")


def sample(episode: Episode, split: str, step: int) -> dict[str, Any]:
    """One row of the table, by ``COLUMNS``."""
    verdict, run, session = episode.verdict, episode.agent, episode.session
    values = (
        step,
        split,
        episode.task.instance_id,
        verdict.reason.value if verdict.reason else "resolved",
        verdict.reward,
        run.turns if run else 0,
        session.tree.sampled_tokens() if session else 0,
        _cut(episode.patch.decode("utf-8", "replace")),
        last_messages(run.events if run else []),
        episode.id,
    )
    return dict(zip(COLUMNS, values, strict=True))


def last_messages(events: list[dict[str, Any]]) -> str:
    """The end of a conversation, from Claude Code's own events."""
    said: list[str] = []
    for event in events:
        if event.get("type") not in ("assistant", "user"):
            continue
        content = event.get("message", {}).get("content", [])
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            said.append(f"[{event['type']}] {_shown(block)}")
    text = "\n".join(said)
    return text if len(text) <= _TEXT else f"... {text[-_TEXT:]}"


def _shown(block: dict[str, Any]) -> str:
    match block.get("type"):
        case "text":
            return block["text"]
        case "thinking":
            return f"(thinking) {block['thinking']}"
        case "tool_use":
            return f"{block['name']} {json.dumps(block['input'])}"
        case "tool_result":
            answer = block.get("content")
            return f"=> {answer if isinstance(answer, str) else json.dumps(answer)}"
        case kind:
            return f"({kind})"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} ..."


class SampleReader:
    """What all ``SampleLog`` of a run wrote since the last call, ``EACH`` of a kind."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "samples"
        self._tails = {path: Tail(path, from_end=True) for path in self._directory.glob("*.jsonl")}

    def take(self) -> list[dict[str, Any]]:
        """Resolved ones first. A split's are those of its last step."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            found += self._tails.setdefault(path, Tail(path)).take()
        kept = Counter[tuple[str, bool]]()
        chosen = []
        for one in found:
            kind = (one["split"], one["verdict"] == "resolved")
            kept[kind] += 1
            if kept[kind] <= EACH:
                chosen.append(one)
        return sorted(chosen, key=lambda one: (one["split"], one["verdict"] != "resolved"))


def log_samples(samples: list[dict[str, Any]], loggers: dict[str, Any], step: int) -> None:
    """Put them into verl's loggers that can show them. ``loggers``: of verl's Tracking, by name."""
    if not samples:
        return
    if "wandb" in loggers:
        import wandb

        rows = [[one[name] for name in COLUMNS] for one in samples]
        loggers["wandb"].log({"samples/episodes": wandb.Table(list(COLUMNS), rows)}, step=step)
    if "tensorboard" in loggers:
        text = "\n\n".join(_markdown(one) for one in samples)
        loggers["tensorboard"].writer.add_text("samples/episodes", text, step)


def _markdown(one: dict[str, Any]) -> str:
    title = ", ".join(f"{name} {one[name]}" for name in COLUMNS if name not in ("patch", "last messages"))
    bodies = (f"    {line}" for name in ("patch", "last messages") for line in one[name].splitlines())
    return f"**{title}**\n\n" + "\n".join(bodies)
