"""This program proves from a run's episode records that the trainer received exactly what was sampled.

    python -m rollout.audit RUN

It checks every record from the stored nodes alone, with code that shares nothing with the session tree:

1. Every sampled token that the agent received is in exactly one training row, once. It is in none if it belongs to a
   side call that is served but not trained on, if the infrastructure failed, or if the agent does not report the reply.
2. Each row is the path of its last node: ids, mask (1 on the tokens that the row trains on, 0 elsewhere) and logprobs
   (the engine's, one per token) reproduce the digest of what was given to the trainer.
3. The sampled ids decode to the recorded text, and that text parses to the content blocks that were sent.
4. What the agent reports to have received (Claude Code's own event stream) is what was sent. What is trained on is
   reported, comes before a reported reply, or is on the longest path of a conversation that is the first or has one,
   or follows these and has no calls (a summary).

The exit status is 0, with one summary line, or 1, with one line per finding. Replies that something else in the box has
asked for are noted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rewards.verdict import Outcome
from rollout.agent.events import blocks, message_id
from rollout.proxy.parsers import ReplyParser, make_parser
from rollout.records import (
    CorruptRecordError,
    NodeRecord,
    Reader,
    Record,
    path_of,
    row_digest,
    unpack_floats,
    unpack_ids,
)


def audit_tokens(record: Record) -> Iterator[str]:
    """Yield the findings of checks 1 and 2; there are none if the record is sound."""
    ids = [unpack_ids(node.ids) for node in record.nodes]
    logprobs = [None if node.logprobs is None else unpack_floats(node.logprobs) for node in record.nodes]
    for i, node in enumerate(record.nodes):
        if not -1 <= node.parent < i:
            yield f"node {i}: parent {node.parent} does not come before it"
            return
        if (logprobs[i] is not None) != (node.parent >= 0 and logprobs[node.parent] is None):
            yield f"node {i}: context and sampled nodes do not alternate"
        values = logprobs[i]
        if values is None:
            continue
        if len(values) != len(ids[i]):
            yield f"node {i}: {len(ids[i])} sampled tokens but {len(values)} logprobs"
        if not all(math.isfinite(value) and value <= 1e-4 for value in values):  # rounding may exceed 0 a little
            yield f"node {i}: a logprob is positive or not finite"

    times = Counter(n for row in record.rows for n in row.nodes)
    infra = _infra_failed(record)
    for i, node in enumerate(record.nodes):
        wanted = int(node.delivered and node.trained and logprobs[i] is not None and not infra)
        if times[i] != wanted:
            kind = ", the infrastructure failed" if infra else "" if node.trained else ", not to be trained"
            yield f"node {i}: trained in {times[i]} rows, must be {wanted} (delivered: {node.delivered}{kind})"

    for number, row in enumerate(record.rows):
        if not row.nodes or not all(0 <= n < len(record.nodes) for n in row.nodes):
            yield f"row {number}: it trains on no node, or on one that does not exist"
            continue
        path = path_of(record.nodes, max(row.nodes))
        if not set(row.nodes) <= set(path):
            yield f"row {number}: its nodes {row.nodes} are not on one path"
            continue
        first = path.index(min(row.nodes))
        prompt = [token for n in path[:first] for token in ids[n]]
        response = [token for n in path[first:] for token in ids[n]]
        mask = [int(n in row.nodes) for n in path[first:] for _ in ids[n]]
        probs = [p for n in path[first:] for p in ((logprobs[n] or []) if n in row.nodes else [0.0] * len(ids[n]))]
        if (len(prompt), len(response)) != (row.prompt_tokens, row.response_tokens):
            recorded = f"{row.prompt_tokens}+{row.response_tokens}"
            yield f"row {number}: its nodes have {len(prompt)}+{len(response)} tokens, but {recorded} are recorded"
        elif row_digest(prompt, response, mask, probs) != row.digest:
            yield f"row {number}: the trainer got other ids, masks or logprobs than those of its nodes"


def audit_text(record: Record, tokenizer: Any, parser: ReplyParser, tools: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the findings of check 3. ``tools`` are the tool definitions (in chat form) that the parser needs."""
    for i, node in enumerate(record.nodes):
        if node.logprobs is None:
            continue
        ids = unpack_ids(node.ids)
        text = tokenizer.decode(ids[:-1] if node.ended else ids, skip_special_tokens=False)
        if text != node.text:
            yield f"node {i}: the sampled ids decode to {text!r}, but the recorded text is {node.text!r}"
            continue
        if node.stop_sequence is not None:
            text = text[: text.find(node.stop_sequence)]
        sent = [{k: v for k, v in block.items() if k != "id"} for block in node.blocks]
        read = parser.parse(text, tools if node.tools_allowed else []).blocks
        if record.version == 1:  # the parser of these records trimmed text and kept empty text blocks
            sent, read = _trimmed(sent), _trimmed(read)
        if read != sent:
            yield f"node {i}: the sampled text does not parse to the blocks that were sent"


def audit_heard(record: Record) -> Iterator[str]:
    """Yield the findings of check 4, which reads the assistant events of Claude Code's stream-json output."""
    heard: dict[str, list[dict[str, Any]]] = {}
    for event in record.events:
        heard.setdefault(message_id(event), []).extend(blocks(event, "assistant"))
    for i, node in enumerate(record.nodes):
        if not node.delivered or node.message_id not in heard:
            continue  # a killed agent does not report its last reply, and side calls are never reported
        if [_essence(b) for b in heard[node.message_id]] != [_essence(b) for b in node.blocks]:
            yield f"node {i}: the agent reports another reply than the one it was sent ({node.message_id})"
    if "foreign_calls" not in record.counters or not any(heard):
        return  # an older record, or an agent that reports no ids
    if any(node.parent >= i for i, node in enumerate(record.nodes)):
        return  # a finding of check 1
    paths = {i: path_of(record.nodes, i) for i, node in enumerate(record.nodes) if node.delivered}
    named = {i for i in paths if record.nodes[i].message_id in heard}
    ends = {
        max((i for i in paths if paths[i][0] == root), key=lambda i: (_tokens(record.nodes, paths[i]), -i))
        for root in {paths[i][0] for i in paths}
        if root == 0 or any(paths[i][0] == root for i in named)
    }
    known = {before for i in ends | named for before in paths[i]}
    calls = {i for i in paths if any(block.get("type") == "tool_use" for block in record.nodes[i].blocks)}
    known |= {i for i in paths.keys() - calls if paths[i][-3:-2] and paths[i][-3] in known}
    for number in sorted({n for row in record.rows for n in row.nodes} - known):
        yield f"node {number}: it is trained on, but the agent does not report it"


def _essence(block: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what Claude Code does not change in a block.

    It adds defaults to the input of its own tools, so of a call only its id and the tool's name are compared.
    """
    if block.get("type") == "tool_use":
        return ("tool_use", block.get("id"), block.get("name"))
    return (block.get("type"), str(block.get("text", "")).strip())


def _trimmed(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    trimmed = [block | {"text": block["text"].strip()} if block["type"] == "text" else block for block in blocks]
    return [block for block in trimmed if block.get("text", True)]


def _tokens(nodes: list[NodeRecord], path: list[int]) -> int:
    return sum(nodes[number].length for number in path)


def _infra_failed(record: Record) -> bool:
    return record.verdict.get("outcome") == Outcome.INFRA_FAILURE


def main(argv: list[str] | None = None) -> int:
    """Audit a run and return the exit status."""
    options = argparse.ArgumentParser(prog="python -m rollout.audit", description=__doc__.split("\n")[0])
    options.add_argument("run", type=Path, help="a run directory or one record file")
    options.add_argument("--model", type=Path, help="directory of the policy's tokenizer (default: the recorded one)")
    args = options.parse_args(argv)
    reader = Reader(args.run)
    findings = 0
    total: Counter[str] = Counter()
    text_tools: dict[tuple[str, str], tuple[Any, ReplyParser]] = {}
    try:
        for record in reader:
            problems = [*audit_tokens(record), *audit_heard(record)]
            if record.nodes:  # an evaluation of another endpoint leaves none, and has no tokenizer
                model = str(args.model or record.model)
                if (model, record.parser) not in text_tools:
                    text_tools[model, record.parser] = _load(model, record.parser)
                problems += audit_text(record, *text_tools[model, record.parser], record.tools)
            for problem in problems:
                print(f"{record.episode} ({record.task}): {problem}", file=sys.stderr)
            findings += len(problems)
            total["episodes"] += 1
            total["rows"] += len(record.rows)
            total["foreign"] += int(record.counters.get("foreign_calls", 0))
            for node in record.nodes:
                kind = "context" if node.logprobs is None else "sampled" if node.delivered else "undelivered"
                if _infra_failed(record):
                    kind = "left out"
                total[kind] += node.length
                total["replies"] += node.logprobs is not None
    except (CorruptRecordError, FileNotFoundError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    for torn in reader.torn:
        print(f"note: {torn.path}: its last record is incomplete (the process was killed); {torn.lost} bytes ignored")
    if total["foreign"]:
        print(f"note: {total['foreign']} replies were not asked for by the agent itself, and are not trained on")
    if not total["episodes"]:
        print(f"audit: no episode records under {args.run}", file=sys.stderr)
        return 1
    print(
        f"{'FAILED' if findings else 'ok'}: {total['episodes']} episodes, {total['replies']} replies, "
        f"{total['rows']} rows, {total['sampled']} sampled tokens, each trained on once, "
        f"{total['undelivered']} undelivered, {total['context']} context tokens, "
        f"{total['left out']} left out because the infrastructure failed, {findings} findings"
    )
    return 1 if findings else 0


def _load(model: str, parser: str) -> tuple[Any, ReplyParser]:
    from transformers import AutoTokenizer

    if not Path(model).is_dir():
        raise FileNotFoundError(f"the policy's tokenizer is not at {model}; say with --model where it is")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer, make_parser(parser, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
