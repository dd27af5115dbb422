"""This program proves from a run's episode records that the trainer received exactly what was sampled.

    python -m rollout.audit RUN

It checks every record with code that shares nothing with the session tree:

1. Each call of the engine is what it was when it crossed the engine's border: prompt ids (the path of its node),
   sampled ids, log-probabilities and weight versions reproduce the seal that was made there.
2. Every sampled token that the agent received is in exactly one training row, once. It is in none if it belongs to a
   side call that is served but not trained on, if the infrastructure failed, or if the agent does not report the reply.
3. Each row is the path of its last node: ids, mask (1 on the tokens that the row trains on, 0 elsewhere) and
   log-probabilities reproduce the digest of what was given to the trainer; its weight versions are its nodes'.
4. The sampled ids decode to the recorded text, and that text says the content blocks that were sent. Where a prompt
   goes on after a reply, the reply's turn is closed as the model's chat template closes it.
5. What the agent reports as received (in its own event stream) is what was sent, and all of it is marked as delivered.
   Exactly the agent's own replies are trained on. These are the replies that it reports and all before them, and the
   longest path of the first conversation and of each that has a reported reply. A reply without calls is the agent's
   own, too, if it follows one of these or its prompt begins like one of these conversations (a summary).
6. Records are complete: each follows the one before it in its file, no episode is there twice, and every line of
   episode_metrics has its record and its figures. An episode that a selection inside the run has copied
   (rl.data.select) is the same as in the record that it was copied from.

The exit status is 0, with one summary line, or 1, with one line per finding. docs/records.md says what it cannot find.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rewards.verdict import Outcome
from rollout import program
from rollout.agent.events import blocks, message_id
from rollout.reading import FormatReading, Reading
from rollout.records import SELECTION, CorruptRecordError, NodeRecord, Reader, Record, path_of

_SEALED = 3  # the first version of records with seals, versions in rows, and counts to compare with


def audit_tokens(record: Record) -> Iterator[str]:
    """Yield the findings of checks 1 to 3; there are none if the record is sound."""
    nodes = record.nodes
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
    infra = _infra_failed(record)
    for i, node in enumerate(nodes):
        wanted = int(node.delivered and node.trained and node.logprobs is not None and not infra)
        if times[i] != wanted:
            kind = ", the infrastructure failed" if infra else "" if node.trained else ", not to be trained"
            yield f"node {i}: trained in {times[i]} rows, must be {wanted} (delivered: {node.delivered}{kind})"
    for number in range(len(record.rows)):
        yield from (f"row {number}: {finding}" for finding in _row(record, number))


def _call(record: Record, i: int, digest: Any, length: int) -> Iterator[str]:
    """Yield what is wrong with one sampled node. ``digest``: of the path to it; ``length``: the tokens of that path."""
    node = record.nodes[i]
    values = array("f", node.logprobs or b"")
    if len(values) != node.length:
        yield f"node {i}: {node.length} sampled tokens but {len(values)} logprobs"
    if values and not (max(values) <= 1e-4 and min(values) > float("-inf") and sum(values) == sum(values)):
        yield f"node {i}: a logprob is positive or not finite"  # rounding may exceed 0 a little
    if record.version < _SEALED:
        return
    versions = node.versions if isinstance(node.versions, bytes) else b""
    digest.update(node.logprobs)
    digest.update(versions)
    counts = length - node.length, node.length, len(values), len(versions) // 4
    digest.update(struct.pack("<QQQQ?", *counts, node.side))
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
    if record.version >= _SEALED and row.versions != (min(known, default=0), max(known, default=0)):
        yield f"the trainer was told versions {row.versions}, which are not those of its nodes"


def audit_text(record: Record, tokenizer: Any, reading: Reading) -> Iterator[str]:
    """Yield the findings of check 4. Version 1 kept blocks other than those sampled; only its text is checked."""
    malformed = 0
    for i, node in enumerate(record.nodes):
        if node.logprobs is None:
            continue
        ids = array("i", node.ids).tolist()
        text = tokenizer.decode(ids[:-1] if node.ended else ids, skip_special_tokens=False)
        if text != node.text:
            yield f"node {i}: the sampled ids decode to {text!r}, but the recorded text is {node.text!r}"
            continue
        if node.stop_sequence is not None:
            text = text[: text.find(node.stop_sequence)]
        sent = [{k: v for k, v in block.items() if k != "id"} for block in node.blocks]
        if record.version > 1 and not reading.agrees(text, sent, node.tools_allowed):
            yield f"node {i}: the sampled text does not say the blocks that were sent"
        malformed += reading.malformed(text, sent, node.tools_allowed)
    counted = record.counters.get("malformed_calls", 0)
    if record.version >= _SEALED and counted != malformed:
        yield f"{malformed} replies have parts of calls that were not sent as such, but {counted} were counted"


def audit_turns(record: Record, closing: int) -> Iterator[str]:
    """Yield the turns that are not closed (check 4). ``closing``: the id that closes one (see ``closing_of``)."""
    for i, node in enumerate(record.nodes):
        if node.logprobs is None and node.parent >= 0:
            around = array("i", record.nodes[node.parent].ids[-4:] + node.ids[:4])
            if closing not in around:
                yield f"node {i}: the turn before it is not closed by {closing}, as the chat template closes it"


def audit_heard(record: Record) -> Iterator[str]:
    """Yield the findings of check 5, which reads the assistant events of Claude Code's stream-json output."""
    nodes = record.nodes
    counted = record.agent.get("events", len(record.events))
    if counted != len(record.events):
        yield f"the agent had {counted} events, but {len(record.events)} are recorded"
    heard: dict[str, dict[Any, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in record.events:
        if said := blocks(event, "assistant"):
            heard[message_id(event)][str(event.get("parent_tool_use_id") or "")] += said
    sent = {node.message_id: i for i, node in enumerate(nodes) if node.logprobs is not None}
    last = next(reversed(heard), "") if record.agent.get("status") in ("timeout", "crashed") else ""
    for name in (name for name in heard if name in sent):
        node, i = nodes[sent[name]], sent[name]
        if not node.delivered:
            yield f"node {i}: the agent reports this reply ({name}), but it is not marked as delivered"
        for sub_agent, said in heard[name].items():
            if not _same(said, node.blocks, bool(sub_agent), name == last):
                yield f"node {i}: the agent reports another reply than the one it was sent ({name})"
    reports = record.agent.get("reports", "foreign_calls" in record.counters and any(heard))
    if not reports or any(node.parent >= i for i, node in enumerate(nodes)):
        return  # an agent that reports nothing, an older record, or a finding of check 1
    known = _known(nodes, {i for name, i in sent.items() if name in heard and nodes[i].delivered})
    for number in sorted({n for row in record.rows for n in row.nodes} - known):
        yield f"node {number}: it is trained on, but the agent does not report it"
    if record.version < _SEALED:
        return
    unknown = sum(name.startswith("msg_") and name not in sent for name in heard)
    counted = record.counters.get("unknown_reports", 0)
    if unknown != counted and nodes:
        what = "reply that is" if unknown == 1 else "replies that are"
        yield f"the agent reports {unknown} {what} not recorded; {counted:g} were counted"
    for i in sorted(known):
        if not nodes[i].trained and nodes[i].delivered and (record.train_side_calls or not nodes[i].side):
            yield f"node {i}: it is not trained on, though it is a reply of the agent's"


def _same(said: list[dict[str, Any]], sent: list[dict[str, Any]], sub_agent: bool, cut: bool) -> bool:
    """Tell whether reported blocks are those that were sent.

    Of a sub-agent's reply, Claude Code may report only the calls; an agent that was killed may have reported only the
    first blocks of its last reply.
    """
    left, right = [_essence(block) for block in said], [_essence(block) for block in sent]
    if left == right or (cut and left == right[: len(left)]):
        return True
    calls = [block for block in right if block[0] == "tool_use"]
    rest = iter(right)
    return sub_agent and all(block in rest for block in left) and [b for b in left if b[0] == "tool_use"] == calls


def _known(nodes: list[NodeRecord], named: set[int]) -> set[int]:
    """Return the delivered replies that are the agent's own. ``named``: those that it reports."""
    roots: list[int] = []
    lengths: list[int] = []
    longest: dict[int, int] = {}
    for i, node in enumerate(nodes):
        parent = node.parent
        roots.append(roots[parent] if parent >= 0 else i)
        lengths.append((lengths[parent] if parent >= 0 else 0) + node.length)
        best = longest.get(roots[i])
        if node.delivered and node.logprobs is not None and (best is None or lengths[i] > lengths[best]):
            longest[roots[i]] = i
    own = {0, *(roots[i] for i in named)}
    known: set[int] = set()
    for i in (*named, *(end for root, end in longest.items() if root in own)):
        while i >= 0 and i not in known:
            known.add(i)
            i = nodes[i].parent
    sums_up = {
        i
        for i, node in enumerate(nodes)
        if node.logprobs is not None and node.delivered
        if _follows(nodes, nodes[node.parent], known, {nodes[root].begins for root in own})
        if not any(block.get("type") == "tool_use" for block in node.blocks)
    }
    return {i for i in known | sums_up if nodes[i].logprobs is not None and nodes[i].delivered}


def _follows(nodes: list[NodeRecord], context: NodeRecord, known: set[int], starts: set[bytes]) -> bool:
    return context.begins in starts - {b""} if context.parent < 0 else context.parent in known


def _essence(block: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what Claude Code does not change in a block.

    It adds defaults to the input of its own tools, so only a call's id and its tool's name are compared.
    """
    if block.get("type") == "tool_use":
        return ("tool_use", block.get("id"), block.get("name"))
    return (block.get("type"), str(block.get("text", "")).strip())


def _infra_failed(record: Record) -> bool:
    return record.verdict.get("outcome") == Outcome.INFRA_FAILURE


def _digest_of(record: Record) -> bytes:
    """Return a hash of a record that does not depend on the record's place in its file."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(record, number=0, previous=b""))).digest()


class Audit:
    """An audit is what has been read of a run's records; ``findings`` has one line each, ``total`` the counts."""

    def __init__(self, source: Path, model: Path | None = None) -> None:
        self.reader, self.model = Reader(source), model
        self.findings: list[str] = []
        self.unknown: set[str] = set()  # why it is not known what closes a turn
        self.total: Counter[str] = Counter()
        self.figures: dict[str, dict[str, Any]] = {}  # by episode
        self.digests: dict[str, bytes] = {}  # of the records, their places in their files left out
        self.tokenizer = functools.cache(tokenizer_of)
        self.closing = functools.cache(lambda model: closing_of(Path(model), self.tokenizer(model)))
        self.reading = functools.cache(FormatReading)

    def read(self) -> None:
        """Audit all records. Raises FileNotFoundError without a run or tokenizer, ValueError for an unknown format."""
        for copied, path in sorted((self._is_copy(path), path) for path in self.reader.files()):
            try:
                for record in self.reader.read(path):
                    self._audit(record, copied)
            except CorruptRecordError as error:
                self.findings.append(str(error))
        if self.reader.source.is_dir():
            self._compare(self.reader.source)

    def _is_copy(self, path: Path) -> bool:
        """Tell whether a file belongs to a selection inside the run."""
        inside = path.relative_to(self.reader.source).parents if path != self.reader.source else ()
        return any((self.reader.source / place / SELECTION).exists() for place in list(inside)[:-1])

    def _audit(self, record: Record, copied: bool) -> None:
        digest = _digest_of(record)
        before = self.digests.setdefault(record.episode, digest)
        if copied and record.episode in self.figures:
            if before != digest:
                self.findings.append(f"{record.episode} ({record.task}): a selection has another record of it")
            return
        problems = [*audit_tokens(record), *audit_heard(record)]
        if record.nodes:  # an evaluation of another endpoint leaves none, and has no tokenizer
            reading = self.reading(record.parser, record.version < _SEALED)
            model = str(self.model or record.model)
            problems += audit_text(record, self.tokenizer(model), reading)
            try:
                closing = self.closing(model)
                problems += audit_turns(record, closing) if closing is not None else ()
            except ValueError as error:
                self.unknown.add(str(error))
        if record.episode in self.figures:
            problems.append("this episode is recorded twice")
        self.figures[record.episode] = _figures(record)
        self.findings += [f"{record.episode} ({record.task}): {problem}" for problem in problems]
        self.total["episodes"] += 1
        self.total["rows"] += len(record.rows)
        self.total["foreign"] += int(record.counters.get("foreign_calls", 0))
        self.total["unknown"] += int(record.counters.get("unknown_reports", 0))
        for node in record.nodes:
            kind = "context" if node.logprobs is None else "sampled" if node.delivered else "undelivered"
            if _infra_failed(record):
                kind = "left out"
            self.total[kind] += node.length
            self.total["replies"] += node.logprobs is not None

    def _compare(self, run: Path) -> None:
        """Compare what the trainer was told of each episode (episode_metrics/*.jsonl) with its record."""
        told: set[str] = set()
        for path in sorted((run / "episode_metrics").glob("*.jsonl")):
            for number, text in enumerate(path.read_bytes().splitlines(), 1):
                try:
                    line = json.loads(text)
                    episode = line["episode"]
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a process that was killed
                if episode in told:
                    self.findings.append(f"{path.name}, line {number}: episode {episode} is there twice")
                told.add(episode)
                figures = self.figures.get(episode)
                if figures is None:
                    self.findings.append(f"{path.name}, line {number}: episode {episode} has no record")
                    continue
                wrong = [name for name, value in figures.items() if name in line and line[name] != value]
                if wrong:
                    name = ", ".join(wrong)
                    self.findings.append(f"{path.name}, line {number}: {name} of {episode} are not its record's")


def _figures(record: Record) -> dict[str, Any]:
    """Return figures of an episode that episode_metrics has too, under the same names."""
    out = {
        "task": record.task,
        "step": record.step,
        "resolved": record.verdict.get("outcome") == Outcome.RESOLVED,
        "infra": _infra_failed(record),
        "reward": record.verdict.get("reward"),
        "rows": len(record.rows),
        "turns": record.agent.get("turns", 0),
        "calls": int(record.counters.get("calls", 0)),
        "tokens_trained": sum(
            record.nodes[n].length for row in record.rows for n in row.nodes if 0 <= n < len(record.nodes)
        ),
    }
    if record.nodes:
        sampled = sum(node.length for node in record.nodes if node.logprobs is not None)
        out |= {"tokens_sampled": sampled, "tokens_context": sum(n.length for n in record.nodes) - sampled}
    return out


def tokenizer_of(model: str) -> Any:
    """Return a tokenizer that decodes the ids of the model in a directory. Raises FileNotFoundError.

    Where tokenizer.json has all tokens, the ``tokenizers`` library is enough; transformers would do no more with it,
    and imports torch first.
    """
    place = Path(model)
    if not place.is_dir():
        raise FileNotFoundError(f"the policy's tokenizer is not at {model}; say with --model where it is")
    whole, options = place / "tokenizer.json", place / "tokenizer_config.json"
    told = json.loads(options.read_text()) if options.is_file() else {}
    if whole.is_file() and not told.get("clean_up_tokenization_spaces"):
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(whole))
        added = told.get("added_tokens_decoder") or {}
        if all(found.id_to_token(int(number)) == one["content"] for number, one in added.items()):
            return found
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def closing_of(model: Path, tokenizer: Any) -> int | None:
    """Return the id with which the chat template in a model's directory closes a turn of the assistant.

    None: it has no template, or one that closes turns with no control token. Raises ValueError if it fails.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file, options = model / "chat_template.jinja", model / "tokenizer_config.json"
    told = json.loads(options.read_text()) if options.is_file() else {}
    template = file.read_text() if file.is_file() else told.get("chat_template")
    if not template:
        return None
    # As in transformers, which imports torch. A block "generation" is what a template for training trains.
    template = re.sub(r"({%-?\s*)generation\b", r"\1if true", str(template))
    template = re.sub(r"({%-?\s*)endgeneration\b", r"\1endif", template)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zq7"}]
    names = {
        key: one["content"] if isinstance(one, dict) else one for key, one in told.items() if key.endswith("_token")
    }
    try:
        rest = (
            environment.from_string(template).render(messages=said, strftime_now=time.strftime, **names).split("zq7")[1]
        )
    except Exception as error:  # a template may fail in any way
        raise ValueError(f"{model}: the chat template fails: {error}") from error
    encoded = tokenizer.encode(rest, add_special_tokens=False)
    ids = getattr(encoded, "ids", encoded)
    known = getattr(tokenizer, "get_added_tokens_decoder", lambda: tokenizer.added_tokens_decoder)()
    return ids[0] if ids and ids[0] in known else None


def main(argv: list[str] | None = None) -> int:
    """Audit a run and return the exit status."""
    options = program.parser("python -m rollout.audit", __doc__)
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory or one record file")
    options.add_argument("--model", type=Path, help="directory of the policy's tokenizer (default: the recorded one)")
    args = options.parse_args(argv)
    run = Audit(args.run, args.model)
    try:
        run.read()
    except (FileNotFoundError, ValueError) as error:
        return program.failed(f"audit: {error}")
    for finding in run.findings:
        print(finding, file=sys.stderr)
    for torn in run.reader.torn:
        print(f"note: {torn.path}: its last record is incomplete (the process was killed); {torn.lost} bytes ignored")
    for reason in sorted(run.unknown):
        print(f"note: it is not looked at whether turns are closed: {reason}")
    total = run.total
    if total["foreign"]:
        print(f"note: {total['foreign']} replies were not asked for by the agent itself, and are not trained on")
    if total["unknown"]:
        print(
            f"note: {total['unknown']} replies that agents report were sent by nobody: something else wrote the report"
        )
    if not total["episodes"]:
        return program.failed(f"audit: no episode records under {args.run}")
    print(
        f"{'FAILED' if run.findings else 'ok'}: {total['episodes']} episodes, {total['replies']} replies, "
        f"{total['rows']} rows, {total['sampled']} sampled tokens, each trained on once, "
        f"{total['undelivered']} undelivered, {total['context']} context tokens, "
        f"{total['left out']} left out because the infrastructure failed, {len(run.findings)} findings"
    )
    return 1 if run.findings else 0


if __name__ == "__main__":
    program.end(main)
