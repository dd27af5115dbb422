"""Advantages, log-probabilities and entropies of the trainer, kept in the run directory: ``trained/<step>-<row>.zst``.

A file has the rows of one batch: of each row its key in TransferQueue (``{group}_{session}_{row}``), its advantage, and
the trainer's log-probabilities and entropies of the tokens with mask 1, in their order. A record has the engine's. The
files are for people who look at an episode (``rl.view``); nothing is trained with them, and they may be deleted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from omegaconf import OmegaConf

from rollout import files
from rollout.records import Record, path_of

_LATER = 8  # an episode may be trained on up to so many steps after the one in which it began


class Row(msgspec.Struct, array_like=True):
    """A row is what the trainer knows of one training row. ``logprobs`` and ``entropies``: float32, in this machine's
    byte order, one per token with mask 1; empty if the trainer has not computed them."""

    key: str
    advantage: float
    logprobs: bytes
    entropies: bytes


@dataclass(frozen=True)
class Values:
    """Values are the trainer's of one reply, one per token; ``entropies`` may be empty."""

    logprobs: Sequence[float]
    entropies: Sequence[float]


@dataclass(frozen=True)
class EpisodeTraining:
    """This is what the trainer made of an episode: ``advantages`` by row, ``values`` by node of the tree,
    for replies that were trained on."""

    advantages: dict[int, float]
    values: dict[int, Values]


def columns(config: Any) -> list[str]:
    """Return the names of the columns that the trainer computes; with ``bypass_mode`` it takes the engine's."""
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
    return [] if bypass else ["old_log_probs", "entropy"]


def rows(batch: Any, known: Any, advantages: Any) -> list[Row]:
    """Return the rows of a batch, without padding.

    batch: verl's KVBatchMeta. known: its columns response_mask and those of ``columns``.
    All columns are nested tensors, one row per key.
    """
    masks = [mask.bool() for mask in known["response_mask"].unbind(0)]
    names, none = ("old_log_probs", "entropy"), [None] * len(batch.keys)
    columns = [known[name].unbind(0) if name in known else none for name in names]
    out = []
    for key, tag, mask, logprobs, entropies, values in zip(
        batch.keys, batch.tags, masks, *columns, advantages.unbind(0), strict=True
    ):
        if tag.get("is_padding") or not bool(mask.any()):
            continue
        told = values[mask].float()  # the same for all tokens, 0 for those that rejection took
        advantage = float(told[told.abs().argmax()])
        out.append(Row(key, advantage, _packed(logprobs, mask), _packed(entropies, mask)))
    return out


def _packed(values: Any, mask: Any) -> bytes:
    return floats(values[mask].tolist()) if values is not None else b""


def write(run_dir: Path, step: int, made: Sequence[Row]) -> None:
    """Write the rows of one batch of a step."""
    if not made:
        return
    directory = run_dir / "trained"
    directory.mkdir(exist_ok=True)
    with files.replacing(directory / f"{step:06d}-{made[0].key}.zst") as new:
        new.write_bytes(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(made)))


def floats(values: Sequence[float]) -> bytes:
    """Return values as float32."""
    return array("f", values).tobytes()


def read(run_dir: Path, record: Record) -> EpisodeTraining | None:
    """Return what the trainer made of an episode; None if nothing was kept of it, or it does not fit the record."""
    session = _session(run_dir, record.episode) if (run_dir / "trained").is_dir() else ""
    if not session:
        return None
    paths = [path for path in sorted((run_dir / "trained").glob("*.zst")) if path.name[:6].isdigit()]
    for path in (one for one in paths if 0 <= int(one.name[:6]) - record.step <= _LATER):
        try:
            rows = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()), type=list[Row])
        except (OSError, zstandard.ZstdError, msgspec.MsgspecError):
            continue
        if found := {int(row.key.rpartition("_")[2]): row for row in rows if row.key.rpartition("_")[0] == session}:
            return _assigned(record, found)
    return None


def _assigned(record: Record, rows: dict[int, Row]) -> EpisodeTraining | None:
    """Give each reply its part of the row that trains it."""
    values: dict[int, Values] = {}
    for number, row in rows.items():
        if number >= len(record.rows):
            return None
        nodes = record.rows[number].nodes
        if not row.logprobs:
            continue
        logprobs, entropies, at = array("f", row.logprobs), array("f", row.entropies), 0
        for node in (one for one in path_of(record.nodes, max(nodes)) if one in set(nodes)):
            end = at + record.nodes[node].length
            values[node] = Values(logprobs[at:end], entropies[at:end])
            at = end
        if at != len(logprobs):
            return None
    return EpisodeTraining({number: row.advantage for number, row in rows.items()}, values)


def _session(run_dir: Path, episode: str) -> str:
    """Return the key of an episode in TransferQueue, as its line in ``episode_metrics`` tells; empty if none does."""
    wanted = json.dumps(episode).encode()
    for path in sorted((run_dir / "episode_metrics").glob("*.jsonl")):
        data, at = path.read_bytes(), -1
        while (at := data.find(wanted, at + 1)) >= 0:
            try:
                told = json.loads(data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0])
            except ValueError:
                continue
            if told.get("episode") == episode:
                return str(told.get("session", ""))
    return ""
