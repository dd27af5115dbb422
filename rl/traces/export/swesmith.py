"""Write rows in SWE-smith's format, as its collect_trajs does in the style xml.

A row is {messages, instance_id, resolved, model, traj_id, patch}. Calls are in the text of a reply, results are user
messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl.run.weights import name_of
from rl.traces.export.sink import Sink
from rl.traces.export.source import ExportSource
from rollout.proxy.blocks import ChatMessage


def write(source: ExportSource, out: Sink) -> None:
    """Write a line per conversation."""
    for entry, talks in source.talks():
        for number, talk in enumerate(talks):
            row = {
                "messages": spelled(talk.messages, talk.tools),
                "instance_id": entry.task,
                "resolved": entry.facts["resolved"],
                "model": source.name or name_of(entry.facts["model"]),
                "traj_id": entry.facts["episode"] + (f".{number}" if number else ""),
                "patch": talk.trace.record.patch.decode("utf-8", "replace"),
            }
            out.row("ft_xml.jsonl", row)


def spelled(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Return messages with the calls in their texts; the system prompt says how they are written."""
    told = _about(tools) if tools else ""
    made: list[ChatMessage] = [] if messages[0]["role"] == "system" else [{"role": "system", "content": ""}]
    for message in messages:
        thought = message.get("reasoning_content")
        calls = [_call(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        role = "user" if message["role"] == "tool" else message["role"]
        parts = (f"<think>\n{thought}\n</think>" if thought else "", message["content"], *calls)
        text = "\n\n".join(part for part in parts if part)
        if made and made[-1]["role"] == role == "user":
            made[-1]["content"] += f"\n\n{text}"
        else:
            made.append({"role": role, "content": text})
    made[0]["content"] = "\n\n".join(part for part in (made[0]["content"], told) if part)
    return made if made[0]["content"] else made[1:]


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"<parameter={key}>{_plain(value)}</parameter>" for key, value in arguments.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _about(tools: Sequence[dict[str, Any]]) -> str:
    parts = ["You have access to the following functions:"]
    for number, tool in enumerate((tool["function"] for tool in tools), 1):
        parts += [f"---- BEGIN FUNCTION #{number}: {tool['name']} ----", f"Description: {tool['description']}"]
        parts += [f"Parameters: {json.dumps(tool['parameters'], ensure_ascii=False)}"]
        parts += [f"---- END FUNCTION #{number} ----"]
    parts += ["Call a function in this form:", _call("NAME", {"PARAMETER": "VALUE"})]
    return "\n".join(parts)
