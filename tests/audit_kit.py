"""This module has a sound record of everything that an episode can have, and the hands that damage one."""

from __future__ import annotations

import copy
import json
from array import array
from dataclasses import asdict, replace
from typing import Any

from rollout import SIDE_MODEL
from rollout.proxy.engine import Completion, Seals
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import (
    SEALED,
    VERSION,
    Record,
    node_records,
    pack_floats,
    pack_ids,
    path_of,
    row_digest,
    row_records,
    unpack_floats,
    unpack_ids,
)
from tests.kit import QueueEngine, char_policy, empty_record


class Versioned(QueueEngine):
    """An engine whose weights are loaded anew in the middle of each reply."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        done = await super().generate(request_id, prompt_ids, sampling)
        half = len(done.ids) // 2
        return replace(done, versions=(4,) * half + (5,) * (len(done.ids) - half))


async def played() -> Record:
    """A conversation of three replies, a sub-agent's, a side call, a malformed call, and a reply that was lost."""
    said = "hello", '[[Agent {"a": "b"}]]', '((hm))[[Edit {"a": "b"}]]', "found", "done", "title", "[[Edit {", "lost"
    session = Session("e", replace(char_policy(Versioned(*said)), train_side_calls=False))
    events: list[dict[str, Any]] = []

    async def ask(messages: list[Any], parent: str | None = None, model: str = "policy", lost: bool = False) -> Any:
        request = {"model": model, "messages": messages}
        node = await session.prepare(decode_request(json.dumps(request).encode()), retry=False).reply()
        node.delivered = not lost
        for block in () if lost or model == SIDE_MODEL else copy.deepcopy(node.reply.blocks):
            message = {"id": node.reply.id, "content": [block]}
            events.append({"type": "assistant", "message": message, "parent_tool_use_id": parent})
        messages += [{"role": "assistant", "content": list(node.reply.blocks)}, {"role": "user", "content": "more"}]
        return node

    main: list[Any] = [{"role": "user", "content": "hi"}]
    sub: list[Any] = [{"role": "user", "content": "find it"}]
    await ask(main)
    call = (await ask(main)).reply.blocks[0]["id"]
    await ask(sub, call)
    await ask(sub, call)
    await ask(main)
    await ask([{"role": "user", "content": "make a title"}], model=SIDE_MODEL)
    await ask(main)
    await ask([{"role": "user", "content": "nobody hears"}], lost=True)
    session.disown({event["message"]["id"] for event in events})
    return empty_record(
        version=VERSION,
        nodes=node_records(session.tree),
        rows=row_records(session.tree.sequences()),
        events=events,
        agent={"status": "finished", "turns": 4, "detail": "", "events": len(events), "reports": True},
        counters={name: float(count) for name, count in asdict(session.counters).items()},
        train_side_calls=False,
    )


def sampled(record: Record, number: int) -> Any:
    return [node for node in record.nodes if node.logprobs is not None][number]


def set_ids(node: Any, ids: list[int]) -> None:
    node.ids = pack_ids(ids)


def change_ids(node: Any, at: int, token: int) -> None:
    ids = unpack_ids(node.ids)
    set_ids(node, [*ids[:at], token, *ids[at + 1 :]])


def change_logprob(node: Any, at: int, value: float) -> None:
    values = unpack_floats(node.logprobs)
    node.logprobs = pack_floats([*values[:at], value, *values[at + 1 :]])


def columns(record: Record, row: Any) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return a row's prompt, response, mask and log-probabilities, made from its nodes as the session does."""
    path = path_of(record.nodes, max(row.nodes))
    first = path.index(min(row.nodes))
    own = [(n, record.nodes[n]) for n in path]
    prompt = [i for n, node in own[:first] for i in unpack_ids(node.ids)]
    response = [i for n, node in own[first:] for i in unpack_ids(node.ids)]
    mask = [int(n in row.nodes) for n, node in own[first:] for _ in range(node.length)]
    probs = [
        p
        for n, node in own[first:]
        for p in (unpack_floats(node.logprobs or b"") if n in row.nodes else [0.0] * node.length)
    ]
    return prompt, response, mask, probs


def redo_row(record: Record, row: Any) -> None:
    """Make a row from its nodes, as the session does."""
    made = columns(record, row)
    row.prompt_tokens, row.response_tokens = len(made[0]), len(made[1])
    row.digest = row_digest(*made)
    versions = [v for n in row.nodes for v in array("i", record.nodes[n].versions)]
    row.versions = (min(versions, default=0), max(versions, default=0))


def redo(record: Record) -> None:
    """Make all digests of a record anew, as somebody can who has its code."""
    for node in record.nodes:
        if node.logprobs is not None:
            prompt = [i for n in path_of(record.nodes, node.parent) for i in unpack_ids(record.nodes[n].ids)]
            versions = tuple(array("i", node.versions))
            node.seal = Seals().make(
                prompt,
                Completion(unpack_ids(node.ids), unpack_floats(node.logprobs), versions),
                node.side,
                node.message_id if record.version >= SEALED else "",
            )
    for row in record.rows:
        redo_row(record, row)
