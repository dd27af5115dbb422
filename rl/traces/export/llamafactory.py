"""Write data sets for LLaMA-Factory (0.9.5), with dataset_info.json and train.yaml.

Its loader drops what it does not like with a warning only, so rows have the one form that survives it: a reply is a
``gpt`` turn whose text ends with its calls as <tool_call> blocks, and what comes between two replies is one turn. Its
template qwen3_nothink writes both as Qwen's own does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl.config.compose import compose
from rl.data.choice import ChoiceEntry
from rl.traces.export.conversation import ChatConversation
from rl.traces.export.sink import Sink
from rl.traces.export.source import ExportSource
from rl.traces.export.trl import alike, parting
from rollout.proxy.blocks import ChatMessage

_COLUMNS = {"messages": "conversations", "system": "system", "tools": "tools"}
# What stands between two results in one turn; the template writes the first and the last of these marks.
_RESULTS = "\n</tool_response>\n<tool_response>\n"


def write_sharegpt(source: ExportSource, out: Sink) -> None:
    """Write a row per conversation. All its replies are trained on."""
    for entry, talks in source.talks():
        for talk in talks:
            out.row(_file(source), {"conversations": turns(talk.messages), **_rest(entry, talk)})
    _finish(source, out, {"formatting": "sharegpt", "columns": _COLUMNS})


def write_ranking(source: ExportSource, out: Sink) -> None:
    """Write a row per pair: what both have in common, and the first reply in which they differ."""

    def same(one: list[ChatMessage], other: list[ChatMessage]) -> bool:
        place = parting(one, other)  # after a result that differs there is no common prompt
        return alike(one[place : place + 1], other[place : place + 1])

    for better, chosen, rejected in source.pairs(same):
        place = parting(chosen.messages, rejected.messages)
        good, bad = (turns(talk.messages[: place + 1])[-1] for talk in (chosen, rejected))
        row = {"conversations": turns(chosen.messages[:place]), "chosen": good, "rejected": bad}
        out.row(_file(source), row | _rest(better, chosen))
    columns = _COLUMNS | {"chosen": "chosen", "rejected": "rejected"}
    _finish(source, out, {"formatting": "sharegpt", "ranking": True, "columns": columns})


def turns(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Return messages, without a system prompt at their beginning, as turns that alternate."""
    made: list[dict[str, str]] = []
    for message in messages[messages[0]["role"] == "system" :]:
        role = {"assistant": "gpt", "tool": "observation"}.get(message["role"], "human")
        text = said(message) if role == "gpt" else message["content"]
        before = made[-1]["from"] if made else ""
        if before and (role == "gpt") == (before == "gpt"):
            between = "\n" if role == "gpt" else _RESULTS if role == before == "observation" else "\n\n"
            made[-1]["value"] += between + text
            continue
        if role == "gpt" and not before:
            made.append({"from": "human", "value": ""})
        made.append({"from": role, "value": text})
    return made


def said(message: ChatMessage) -> str:
    """Return a reply as text: thinking, text, and calls as Qwen's template writes them."""
    thought = message.get("reasoning_content")
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return text + "\n".join(part for part in (message["content"], *calls) if part)


def _rest(entry: ChoiceEntry, talk: ChatConversation) -> dict[str, Any]:
    first = talk.messages[0]
    return {
        "system": first["content"] if first["role"] == "system" else "",
        "tools": json.dumps([tool["function"] for tool in talk.tools], ensure_ascii=False) if talk.tools else "",
        "episode": entry.facts["episode"],
    }


def _file(source: ExportSource) -> str:
    return f"{source.data_set}.jsonl"


def _finish(source: ExportSource, out: Sink, info: dict[str, Any]) -> None:
    place = out.directory / "dataset_info.json"
    known = json.loads(place.read_text()) if place.exists() else {}  # of an export that is appended to
    known[source.data_set] = {"file_name": _file(source), **info}
    out.text(place.name, json.dumps(known, indent=2) + "\n")


def training(overrides: Sequence[str], stage: str, data_set: str, out: Path, model: str) -> str:
    """Return train.yaml: configs/llamafactory.yaml with the user's overrides, and where these set nothing, what belongs
    to the export. Raises ConfigError."""
    config = compose(overrides, "llamafactory")
    given = {text.lstrip("+~").partition("=")[0] for text in overrides}
    place = out.absolute()
    ours: dict[str, Any] = {"stage": stage, "dataset": data_set, "dataset_dir": str(place)}
    ours["model_name_or_path"] = model
    ours |= {"output_dir": str(place / "trained"), "learning_rate": 1e-4 if stage == "sft" else 5e-6}
    return OmegaConf.to_yaml(OmegaConf.merge(config, {key: ours[key] for key in ours if key not in given}))
