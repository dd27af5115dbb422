"""``python -m rollout.audit RUN``: prove from a run's episode records that the trainer got exactly what was sampled.

For every record, from the stored nodes alone and with code that shares nothing with the session tree:

1. every sampled token that the agent received is in exactly one training row, once (in none if it belongs to a
   side call that is served and not trained, or if the infrastructure failed);
2. each row is the path of its last node: ids, mask (1 on the tokens it trains, 0 elsewhere) and logprobs (the
   engine's, one per token) reproduce the digest of what was handed to the trainer;
3. the sampled ids decode to the recorded text, and that text parses to the content blocks that were sent;
4. what the agent says it received (Claude Code's own event stream) is what was sent.

Exits with 0 and one summary line, or with 1 and one line per finding.
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
from rollout.proxy.parsers import ReplyParser, make_parser
from rollout.records import CorruptRecordError, NodeRecord, Reader, Record, row_digest, unpack_floats, unpack_ids


def audit_tokens(record: Record) -> Iterator[str]:
    """Checks 1 and 2: findings, none if the record is sound."""
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
        if not all(math.isfinite(value) and value <= 1e-4 for value in values):
            yield f"node {i}: a logprob is not a finite number below zero"

    times = Counter(n for row in record.rows for n in row.nodes)
    infra = _infra_failed(record)
    for i, node in enumerate(record.nodes):
        wanted = int(node.delivered and node.trained and logprobs[i] is not None and not infra)
        if times[i] != wanted:
            kind = (
                ", the infrastructure failed" if infra else "" if node.trained else ", a side call that is not trained"
            )
            yield f"node {i}: trained in {times[i]} rows, must be {wanted} (delivered: {node.delivered}{kind})"

    for number, row in enumerate(record.rows):
        if not row.nodes or not all(0 <= n < len(record.nodes) for n in row.nodes):
            yield f"row {number}: it trains no node that exists"
            continue
        path = _path(record.nodes, max(row.nodes))
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
            yield f"row {number}: its nodes have {len(prompt)}+{len(response)} tokens, recorded are {recorded}"
        elif row_digest(prompt, response, mask, probs) != row.digest:
            yield f"row {number}: the trainer got other ids, masks or logprobs than its nodes give"


def audit_text(record: Record, tokenizer: Any, parser: ReplyParser, tools: list[dict[str, Any]]) -> Iterator[str]:
    """Check 3. ``tools``: the tool definitions, in chat form, that the parser needs."""
    for i, node in enumerate(record.nodes):
        if node.logprobs is None:
            continue
        ids = unpack_ids(node.ids)
        text = tokenizer.decode(ids[:-1] if node.ended else ids, skip_special_tokens=False)
        if text != node.text:
            yield f"node {i}: sampled ids decode to {text!r}, recorded text is {node.text!r}"
            continue
        if node.stop_sequence is not None:
            text = text[: text.find(node.stop_sequence)]
        sent = [{k: v for k, v in block.items() if k != "id"} for block in node.blocks]
        read = parser.parse(text, tools if node.tools_allowed else []).blocks
        if record.version == 1:  # its parser trimmed text, and kept an empty block of it
            sent, read = _trimmed(sent), _trimmed(read)
        if read != sent:
            yield f"node {i}: the sampled text does not parse to the blocks that were sent"


def audit_heard(record: Record) -> Iterator[str]:
    """Check 4, against the assistant events of Claude Code's stream-json output."""
    heard: dict[str, list[dict[str, Any]]] = {}
    for event in record.events:
        if event.get("type") == "assistant":
            message = event.get("message", {})
            heard.setdefault(message.get("id"), []).extend(message.get("content", []))
    for i, node in enumerate(record.nodes):
        if not node.delivered or node.message_id not in heard:
            continue  # a killed agent does not report its last reply; a side call is never reported
        if [_essence(b) for b in heard[node.message_id]] != [_essence(b) for b in node.blocks]:
            yield f"node {i}: the agent reports another reply than it was sent ({node.message_id})"


def _essence(block: Mapping[str, Any]) -> tuple[Any, ...]:
    """What Claude Code leaves alone. It adds defaults to the input of its own tools, so of an input only the
    kind of tool and the call's id count."""
    if block["type"] == "tool_use":
        return ("tool_use", block["id"], block["name"])
    return (block["type"], str(block.get("text", "")).strip())


def _trimmed(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    trimmed = [block | {"text": block["text"].strip()} if block["type"] == "text" else block for block in blocks]
    return [block for block in trimmed if block.get("text", True)]


def _path(nodes: list[NodeRecord], leaf: int) -> list[int]:
    path = [leaf]
    while nodes[path[-1]].parent >= 0:
        path.append(nodes[path[-1]].parent)
    return path[::-1]


def _infra_failed(record: Record) -> bool:
    return record.verdict.get("outcome") == Outcome.INFRA_FAILURE


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m rollout.audit", description=__doc__.split("\n")[0])
    options.add_argument("run", type=Path, help="run directory, or one record file")
    options.add_argument("--model", type=Path, help="where the policy's tokenizer is (default: as recorded)")
    args = options.parse_args(argv)
    reader = Reader(args.run)
    findings = 0
    total: Counter[str] = Counter()
    text_tools: dict[tuple[str, str], tuple[Any, ReplyParser]] = {}
    try:
        for record in reader:
            problems = [*audit_tokens(record), *audit_heard(record)]
            if record.nodes:  # a model behind another endpoint, in an evaluation, leaves none, and has no tokenizer
                model = str(args.model or record.model)
                if (model, record.parser) not in text_tools:
                    text_tools[model, record.parser] = _load(model, record.parser)
                problems += audit_text(record, *text_tools[model, record.parser], record.tools)
            for problem in problems:
                print(f"{record.episode} ({record.task}): {problem}", file=sys.stderr)
            findings += len(problems)
            total["episodes"] += 1
            total["rows"] += len(record.rows)
            for node in record.nodes:
                kind = "context" if node.logprobs is None else "sampled" if node.delivered else "undelivered"
                if _infra_failed(record):
                    kind = "left out"
                total[kind] += len(node.ids) // 4
                total["replies"] += node.logprobs is not None
    except (CorruptRecordError, FileNotFoundError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    for torn in reader.torn:
        print(f"note: {torn.path}: last record is incomplete, {torn.lost} bytes dropped (the process was killed)")
    if not total["episodes"]:
        print(f"audit: no episode records under {args.run}", file=sys.stderr)
        return 1
    print(
        f"{'FAILED' if findings else 'ok'}: {total['episodes']} episodes, {total['replies']} replies, "
        f"{total['rows']} rows, {total['sampled']} sampled tokens each trained once, "
        f"{total['undelivered']} undelivered, {total['context']} context tokens, "
        f"{total['left out']} left out (the infrastructure failed), {findings} findings"
    )
    return 1 if findings else 0


def _load(model: str, parser: str) -> tuple[Any, ReplyParser]:
    from transformers import AutoTokenizer

    if not Path(model).is_dir():
        raise FileNotFoundError(f"the policy's tokenizer is not at {model}; give its place with --model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer, make_parser(parser, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
