"""This module makes the rows of a Hugging Face dataset from an episode's record: one per call that was answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from rollout import files
from rollout.proxy.calls import CallRecord
from rollout.proxy.engine import TextCodec
from rollout.records import Record, path_of, unpack_floats, unpack_ids

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


def calls_of(record: Record) -> list[CallRecord]:
    """Return the calls of a record in the order in which they began; a reply that was sent twice is one call."""
    last = {call.node if call.node >= 0 else str(call.reply.get("id")): call for call in record.calls}
    return sorted(last.values(), key=lambda call: call.started)


def reply_of(record: Record, call: CallRecord) -> tuple[str, list[dict[str, Any]], str]:
    """Return a call's message id, content blocks and stop reason."""
    if call.node >= 0:
        node = record.nodes[call.node]
        return node.message_id, node.blocks, node.stop_reason
    return str(call.reply.get("id")), call.reply["content"], str(call.reply.get("stop_reason"))


def tokens_of(record: Record, call: CallRecord) -> tuple[list[int], list[int], list[float]] | None:
    """Return the ids of a call's prompt and of its reply, and the reply's logprobs; None for a forwarded call."""
    if call.node < 0:
        return None
    node = record.nodes[call.node]
    prompt = [token for n in path_of(record.nodes, call.node)[:-1] for token in unpack_ids(record.nodes[n].ids)]
    return prompt, unpack_ids(node.ids), unpack_floats(node.logprobs or b"")


def messages_of(record: Record, call: CallRecord) -> list[dict[str, str]]:
    """Return a call's conversation with its reply: the system prompt first, each content a text.

    A content that is more than texts is the JSON text of its blocks.
    """
    system = msgspec.json.decode(record.parts[call.system])
    sent = [msgspec.json.decode(record.parts[place]) for place in call.messages]
    head = [("system", system)] if system else []
    talk = [*head, *((one["role"], one["content"]) for one in sent), ("assistant", reply_of(record, call)[1])]
    return [{"role": role, "content": _flat(content)} for role, content in talk]


def _flat(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if all(block.get("type") == "text" for block in content):
        return "\n".join(block["text"] for block in content)
    return json.dumps(content, ensure_ascii=False)


def rows(record: Record, epoch: int, tokenizer: TextCodec | None) -> Iterator[dict[str, Any]]:
    """Yield a row per call, with SCHEMA's columns. tokenizer: decodes prompts; None if there are no tokens."""
    for turn, call in enumerate(calls_of(record)):
        prompt, response, logprobs = tokens_of(record, call) or (None, None, None)
        yield {
            "repo": record.repo,
            "instance_id": record.task,
            "episode": record.episode,
            "epoch": epoch,
            "turn": turn,
            "slot": "low" if call.side else "high",
            "prompt_ids": prompt,
            "response_ids": response,
            "gold_completion_ids": response,  # the name that agentlightning's example has for it
            "logprobs": logprobs,
            "reward": record.verdict["reward"],
            "prompt": tokenizer.decode(prompt, skip_special_tokens=False) if tokenizer and prompt else None,
            "messages": messages_of(record, call),
            "tools": record.parts[call.tools].decode(),
        }


def write(path: Path, record: Record, epoch: int, tokenizer: TextCodec | None) -> None:
    """Write the rows of an episode to a parquet file, in one step."""
    table = pyarrow.Table.from_pylist(list(rows(record, epoch, tokenizer)), SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as new:
        pyarrow.parquet.write_table(table, new, compression="zstd")
