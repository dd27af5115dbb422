"""This module plays episodes of the real Claude Code for tests of stores: turns with tool calls, two calls in a reply,
results that are errors, a sub-agent, hostile arguments.

What is known of each call comes from three sides, none of which is a record: the request as the server got it, the
blocks and their ids as Claude Code's own event stream reports them, the tokens and log-probabilities of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from rewards.task import Task
from rollout.episode import run_episode
from rollout.proxy.server import ProxyServer
from rollout.records import record_of
from tests.integration.claude_kit import Listener, call, in_turn
from tests.integration.proxy.test_claude_code import repair, setup
from tests.integration.proxy.test_claude_threads import agent
from tests.kit import CharTokenizer
from tests.store_kit import HOSTILE, RandomEngine, Told, TracedCall, calls_in, parsed

Script = Callable[[str], str]


def wrong(prompt: str) -> str:
    return repair(prompt).replace('new_string": "', 'new_string": "0 * ')


def both(prompt: str) -> str:
    """Read the file and run a command in one reply, and try what fails."""
    module = re.findall(r"in (\w+)\.py must return", prompt)[0]
    read = call("Read", file_path=f"{module}.py")
    replies = "Two at once. " + read + call("Bash", command="echo 'é' \"}{\""), call("Read", file_path="no/such.py")
    return in_turn(*replies, call("Bash", command="exit 3"), "I give up.")(prompt)


def hostile(prompt: str) -> str:
    """Give a command all that programs may print, less what the kit's format means by itself."""
    said = "".join(HOSTILE).replace("<e>", "").replace("\0", "")
    return in_turn(call("Bash", command="true '" + said.replace("'", "") + "'"), "((I think.))Done.")(prompt)


def delegating(prompt: str) -> str:
    if "SUB " in prompt and "must return" not in prompt:
        return in_turn(call("Bash", command="echo sub"), "Found.")(prompt)
    return in_turn(agent("look", run_in_background=False), "Done.")(prompt)


SCENES: tuple[Script, ...] = (repair, wrong, both, hostile, delegating)


async def told_by_claude_code(task: Task, count: int, prefix: str) -> list[Told]:
    """Play ``count`` episodes, one after the other, with the scenes in turn."""
    proxy, listener = ProxyServer(), Listener()
    proxy._runner.app.middlewares.append(listener.hear)
    await proxy.start()
    try:
        return [await _play(proxy, listener, task, number, prefix) for number in range(count)]
    finally:
        await proxy.stop()


async def _play(proxy: ProxyServer, listener: Listener, task: Task, number: int, prefix: str) -> Told:
    engine = RandomEngine(number, SCENES[number % len(SCENES)])
    listener.requests.clear()
    episode = await run_episode(setup(proxy, engine, tools=("Agent", "Bash", "Edit", "Read")), task, "e")
    assert episode.agent is not None and episode.agent.status == "finished", episode
    record = record_of(episode, "train", 1, "chars", "kit")
    named = {"episode": f"{prefix}-1-real{number}-0-{number:08x}", "task": f"real{number}"}
    told = Told(msgspec.structs.replace(record, **named))
    sent = [one for one in listener.requests if one.path == "/v1/messages"]
    heard = _reported(episode.agent.events)
    for request, (reply, blocks), drawn in zip(sent, heard.items(), engine.said, strict=True):
        _as_sampled(blocks, drawn[1])
        told.calls[reply] = TracedCall(request.body["messages"], request.body["system"], False, blocks, *drawn)
    # What the next request says that the agent has done is what it was told to do.
    done = [one for said in told.calls.values() for one in calls_in(said.reply)]
    last = [one for said in told.calls.values() for message in said.messages for one in calls_in(message["content"])]
    assert done and {name for name, *_ in last} == {name for name, *_ in done}
    return told


def _as_sampled(blocks: list[dict[str, Any]], ids: list[int]) -> None:
    """Take out of a report what was not sampled: marks of thoughts, and defaults that Claude Code adds to arguments."""
    for block in blocks:
        block.pop("signature", None)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    for block, sampled in zip(calls, parsed(CharTokenizer().decode(ids[:-1])), strict=True):
        assert block["input"].items() >= sampled["input"].items()
        block["input"] = sampled["input"]


def _reported(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the replies of which Claude Code's event stream tells, by their ids and in their order."""
    replies: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("type") == "assistant":
            replies.setdefault(event["message"]["id"], []).extend(event["message"]["content"])
    return replies
