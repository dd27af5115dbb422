"""The rows of a Hugging Face dataset, made from an episode: one per reply that the agent has read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from rollout import files
from rollout.proxy.engine import TextCodec
from rollout.trace import Point, Trace

_IDS, _FLOATS, _TEXT = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32()), pyarrow.string()
_MESSAGES = pyarrow.list_(pyarrow.struct([("role", _TEXT), ("content", _TEXT)]))
SCHEMA = pyarrow.schema(
    [
        ("repo", _TEXT), ("instance_id", _TEXT), ("episode", _TEXT), ("epoch", pyarrow.int32()),
        ("turn", pyarrow.int32()), ("slot", _TEXT), ("prompt_ids", _IDS), ("response_ids", _IDS),
        ("gold_completion_ids", _IDS), ("logprobs", _FLOATS), ("reward", pyarrow.float64()), ("prompt", _TEXT),
        ("messages", _MESSAGES), ("tools", _TEXT),
    ]
)  # fmt: skip


def messages_of(trace: Trace, point: Point) -> list[dict[str, str]]:
    """Return a point's conversation with its reply: the system prompt first, each content a text.

    A content that is more than texts is the JSON text of its blocks.
    """
    talk: list[tuple[str, Any]] = [("system", point.system)] if point.system else []
    talk += [(message["role"], message["content"]) for message, _ in trace.context(point)]
    return [{"role": role, "content": _flat(content)} for role, content in [*talk, ("assistant", point.blocks)]]


def _flat(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if all(block.get("type") == "text" for block in content):
        return "\n".join(block["text"] for block in content)
    return json.dumps(content, ensure_ascii=False)


def rows(trace: Trace, epoch: int, tokenizer: TextCodec | None) -> Iterator[dict[str, Any]]:
    """Yield a row per reply that the agent has read, with SCHEMA's columns.

    tokenizer: decodes prompts; None if there are no tokens.
    """
    record = trace.record
    for turn, point in enumerate(trace.delivered):
        prompt, response, logprobs = trace.tokens(point) or (None, None, None)
        yield {
            "repo": record.repo,
            "instance_id": record.task,
            "episode": record.episode,
            "epoch": epoch,
            "turn": turn,
            "slot": "low" if point.side else "high",
            "prompt_ids": prompt,
            "response_ids": response,
            "gold_completion_ids": response,  # the name that agentlightning's example has for it
            "logprobs": logprobs,
            "reward": record.verdict["reward"],
            "prompt": tokenizer.decode(prompt, skip_special_tokens=False) if tokenizer and prompt else None,
            "messages": messages_of(trace, point),
            "tools": msgspec.json.encode(point.tools).decode(),
        }


def write(path: Path, trace: Trace, epoch: int, tokenizer: TextCodec | None) -> None:
    """Write the rows of an episode to a parquet file, in one step."""
    left = rows(trace, epoch, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as new, pyarrow.parquet.ParquetWriter(new, SCHEMA, compression="zstd") as out:
        while some := list(itertools.islice(left, 16)):  # each has all that was said before it
            out.write_table(pyarrow.Table.from_pylist(some, SCHEMA))
