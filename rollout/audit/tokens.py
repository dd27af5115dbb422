"""These checks prove that the trainer got exactly what was sampled (checks 1 to 3 of ``rollout.audit``)."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rewards.verdict import Outcome
from rollout.records import SEALED, Record, path_of

SEALS = 3  # the first version of records whose replies have seals, with versions in rows, and counts to compare with


def audit_tokens(record: Record) -> Iterator[str]:
    """Yield the findings of checks 1 to 3; there are none if the record is sound."""
    nodes = record.nodes
    if torn := torn_columns(record):
        yield torn
        return
    paths: list[Any] = []  # a running SHA-256 of the ids on the path to each node, for its children to continue
    lengths: list[int] = []
    for i, node in enumerate(nodes):
        if not -1 <= node.parent < i:
            yield f"node {i}: parent {node.parent} does not come before it"
            return
        sampled = node.logprobs is not None
        if sampled != (node.parent >= 0 and nodes[node.parent].logprobs is None):
            yield f"node {i}: context and sampled nodes do not alternate"
        path = paths[node.parent].copy() if node.parent >= 0 else hashlib.sha256()
        path.update(node.ids)
        paths.append(path)
        lengths.append((lengths[node.parent] if node.parent >= 0 else 0) + node.length)
        if sampled:
            yield from _call(record, i, path.copy(), lengths[i])

    times = Counter(n for row in record.rows for n in row.nodes)
    infra = infra_failed(record)
    for i, node in enumerate(nodes):
        wanted = int(node.delivered and node.trained and node.logprobs is not None and not infra)
        if times[i] != wanted:
            kind = ", the infrastructure failed" if infra else "" if node.trained else ", not to be trained"
            yield f"node {i}: trained in {times[i]} rows, must be {wanted} (delivered: {node.delivered}{kind})"
    for number in range(len(record.rows)):
        yield from (f"row {number}: {finding}" for finding in _row(record, number))


def torn_columns(record: Record) -> str:
    """Return what is wrong with a record that has a part of a number somewhere; empty for all others."""
    for i, node in enumerate(record.nodes):
        for name, column in ("ids", node.ids), ("logprobs", node.logprobs), ("versions", node.versions):
            if isinstance(column, bytes) and len(column) % 4:
                return f"node {i}: its {name} are {len(column)} bytes, which are no whole numbers of 4 bytes"
    return ""


def _call(record: Record, i: int, digest: Any, length: int) -> Iterator[str]:
    """Yield what is wrong with one sampled node. ``digest``: of the path to it; ``length``: the tokens of that path."""
    node = record.nodes[i]
    values = array("f", node.logprobs or b"")
    if len(values) != node.length:
        yield f"node {i}: {node.length} sampled tokens but {len(values)} logprobs"
    if values and not (max(values) <= 1e-4 and min(values) > float("-inf") and sum(values) == sum(values)):
        yield f"node {i}: a logprob is positive or not finite"  # rounding may exceed 0 a little
    if record.version < SEALS:
        return
    versions = node.versions if isinstance(node.versions, bytes) else b""
    digest.update(node.logprobs)
    digest.update(versions)
    counts = length - node.length, node.length, len(values), len(versions) // 4
    digest.update(struct.pack("<QQQQ?", *counts, node.side))
    digest.update(node.message_id.encode() if record.version >= SEALED else b"")
    if digest.digest() != node.seal:
        yield f"node {i}: its prompt, ids, logprobs or versions are not those that crossed the engine's border"


def _row(record: Record, number: int) -> Iterator[str]:
    row, nodes = record.rows[number], record.nodes
    if not row.nodes or not all(0 <= n < len(nodes) for n in row.nodes):
        yield "it trains on no node, or on one that does not exist"
        return
    path = path_of(nodes, max(row.nodes))
    if not set(row.nodes) <= set(path):
        yield f"its nodes {row.nodes} are not on one path"
        return
    first = path.index(min(row.nodes))
    prompt = b"".join([nodes[n].ids for n in path[:first]])
    response = b"".join([nodes[n].ids for n in path[first:]])
    own = set(row.nodes)
    mask = b"".join([(b"\1" if n in own else b"\0") * nodes[n].length for n in path[first:]])
    probs = b"".join([(nodes[n].logprobs or b"") if n in own else bytes(len(nodes[n].ids)) for n in path[first:]])
    if (len(prompt) // 4, len(response) // 4) != (row.prompt_tokens, row.response_tokens):
        recorded = f"{row.prompt_tokens}+{row.response_tokens}"
        yield f"its nodes have {len(prompt) // 4}+{len(response) // 4} tokens, but {recorded} are recorded"
        return
    digest = hashlib.sha256()
    for column in (prompt, response, mask, probs):
        digest.update(struct.pack("<Q", len(column)))
        digest.update(column)
    if digest.hexdigest() != row.digest:
        yield "the trainer got other ids, masks or logprobs than those of its nodes"
    known = array("i", b"".join(v for n in row.nodes if isinstance(v := nodes[n].versions, bytes)))
    if record.version >= SEALS and row.versions != (min(known, default=0), max(known, default=0)):
        yield f"the trainer was told versions {row.versions}, which are not those of its nodes"


def infra_failed(record: Record) -> bool:
    """Tell whether an episode was lost to the infrastructure."""
    return record.verdict.get("outcome") == Outcome.INFRA_FAILURE
