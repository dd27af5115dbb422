"""This module writes rows as SWE-smith's collect_trajs does: {messages, instance_id, resolved, model, traj_id, patch}.

Its styles differ in how a call is written: ``xml`` and ``ticks`` in the text of the reply, with results as user
messages; ``tool`` in tool_calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.export.sink import Sink
from rl.export.source import Source
from rollout.proxy.messages import ChatMessage


def write(style: str, source: Source, out: Sink) -> None:
    """Write a line per conversation. ``style``: xml, ticks or tool."""
    for entry, talks in source.talks():
        for number, talk in enumerate(talks):
            name = entry.facts["episode"] + (f".{number}" if number else "")
            row = {
                "messages": STYLES[style](talk.messages, talk.tools),
                "instance_id": entry.task,
                "resolved": entry.facts["resolved"],
                "model": source.name or entry.facts["model"],
                "traj_id": name,
                "patch": talk.record.patch.decode("utf-8", "replace"),
            }
            out.row(f"ft_{style}.jsonl", row)


def _tool(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Return messages as chat completions have them: arguments are JSON texts."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**one, "tool_calls": [written(call) for call in one["tool_calls"]]} if one.get("tool_calls") else one
        for one in map(_thought, messages)
    ]


def _text(call: Callable[[str, Mapping[str, Any]], str], about: Callable[[Sequence[dict[str, Any]]], str]) -> Any:
    """Return a style in which calls are text. ``call``: writes one; ``about``: what the system prompt says of them."""

    def style(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
        told = about(tools) if tools else ""
        made: list[ChatMessage] = [] if messages[0]["role"] == "system" else [{"role": "system", "content": ""}]
        for message in map(_thought, messages):
            calls = [
                call(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())
            ]
            role = "user" if message["role"] == "tool" else message["role"]
            text = "\n\n".join(part for part in (message["content"], *calls) if part)
            if made and made[-1]["role"] == role == "user":
                made[-1]["content"] += f"\n\n{text}"
            else:
                made.append({"role": role, "content": text})
        made[0]["content"] = "\n\n".join(part for part in (made[0]["content"], told) if part)
        return made if made[0]["content"] else made[1:]

    return style


def _thought(message: ChatMessage) -> ChatMessage:
    """Return a message with its thinking in the text."""
    thought = message.get("reasoning_content")
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest | {"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"} if thought else rest


def _xml(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"<parameter={key}>{_plain(value)}</parameter>" for key, value in arguments.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])


def _ticks(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call of Bash as its command, which is what the format is for, and others as a name and JSON."""
    said = arguments.get("command") if name == "Bash" else None
    return f"```\n{said if isinstance(said, str) else f'{name} {json.dumps(arguments, ensure_ascii=False)}'}\n```"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _xml_tools(tools: Sequence[dict[str, Any]]) -> str:
    parts = ["You have access to the following functions:"]
    for number, tool in enumerate((tool["function"] for tool in tools), 1):
        parts += [f"---- BEGIN FUNCTION #{number}: {tool['name']} ----", f"Description: {tool['description']}"]
        parts += [f"Parameters: {json.dumps(tool['parameters'], ensure_ascii=False)}"]
        parts += [f"---- END FUNCTION #{number} ----"]
    parts += ["Call a function in this form:", _xml("NAME", {"PARAMETER": "VALUE"})]
    return "\n".join(parts)


def _ticks_tools(tools: Sequence[dict[str, Any]]) -> str:
    lines = [f"- {tool['name']}: {tool['description']}" for tool in (tool["function"] for tool in tools)]
    form = "Write a shell command between triple backticks to run it, or the name of a tool and its arguments as JSON:"
    return "\n".join([*lines, form, "```\nCOMMAND\n```"])


STYLES: dict[str, Callable[[Sequence[ChatMessage], Sequence[dict[str, Any]]], list[ChatMessage]]] = {
    "xml": _text(_xml, _xml_tools),
    "ticks": _text(_ticks, _ticks_tools),
    "tool": _tool,
}
