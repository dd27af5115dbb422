"""Write data sets for TRL (conversations, single replies, preference pairs), and plain messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rl.data.choice import ChoiceEntry
from rl.traces.export.conversation import ChatConversation
from rl.traces.export.sink import Sink
from rl.traces.export.source import ExportSource
from rollout.proxy.blocks import ChatMessage

FILE = "train.parquet"


def about(entry: ChoiceEntry, talk: ChatConversation) -> dict[str, Any]:
    """Return the columns that say which conversation of which episode a row is."""
    names = ("episode", "task", "repo", "model", "resolved", "reward", "flags")
    facts = {name: entry.facts[name] for name in names}
    return facts | {"thread": talk.kind, "labels": msgspec.to_builtins(entry.labels)}


def write_messages(source: ExportSource, out: Sink) -> None:
    """Write a line per conversation, with messages and tools in OpenAI's form. ``sampled``: the places of the replies
    that are to be trained on; the others are context, or trained on in a row before."""
    for entry, talks in source.talks():
        for talk in talks:
            row = {"messages": talk.messages, "tools": talk.tools, "sampled": talk.fresh, **about(entry, talk)}
            out.row("messages.jsonl", row)


def _columns(entry: ChoiceEntry, talk: ChatConversation) -> dict[str, Any]:
    return {"tools": json.dumps(talk.tools, ensure_ascii=False), "episode": entry.facts["episode"]}


def write_trl(source: ExportSource, out: Sink) -> None:
    """Write a row per conversation: ``messages`` and ``tools``."""
    for entry, talks in source.talks():
        for talk in talks:
            out.table_row(FILE, {"messages": talk.messages, **_columns(entry, talk)})


def write_prompt_completion(source: ExportSource, out: Sink) -> None:
    """Write a row per reply: the completion is that reply alone, so that nothing else is trained on."""
    for entry, talks in source.talks():
        for talk in talks:
            for place in talk.fresh:
                row = {"prompt": talk.messages[:place], "completion": [talk.messages[place]], **_columns(entry, talk)}
                out.table_row(FILE, row)


def write_preference(source: ExportSource, out: Sink) -> None:
    """Write a row per pair: what both begin with, and how each goes on to its end."""
    for better, chosen, rejected in source.pairs(alike):
        place = parting(chosen.messages, rejected.messages)
        row = {"prompt": chosen.messages[:place], "chosen": chosen.messages[place:]}
        row |= {"rejected": rejected.messages[place:], **_columns(better, chosen)}
        out.table_row(FILE, row)


def parting(one: list[ChatMessage], other: list[ChatMessage]) -> int:
    """Return the place of the last reply before which two conversations are the same but for the ids of calls."""
    pairs = zip(one, other, strict=False)
    alike = next((n for n, pair in enumerate(pairs) if _said(pair[0]) != _said(pair[1])), min(len(one), len(other)) - 1)
    return max(place for place in range(alike + 1) if one[place]["role"] == "assistant")


def alike(one: list[ChatMessage], other: list[ChatMessage]) -> bool:
    """Tell whether two lists of messages say the same."""
    return list(map(_said, one)) == list(map(_said, other))


def _said(message: ChatMessage) -> Any:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("reasoning_content"), calls
