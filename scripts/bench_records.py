"""Measure what records cost: the bytes of an episode, the seconds of writing it beside those of the run, the audit.

    python scripts/bench_records.py RUN              the records of a run
    python scripts/bench_records.py RUN --copies 10000          the audit of so many copies of them
    python scripts/bench_records.py --model DIR      a made-up episode of 300 turns and 100,000 tokens

Bytes are those on the disk, compressed. The records of RUN are written once more, next to RUN and synced as a run does
it, and timed. Their share is of the time from the start of the first episode to the end of the last one: a worker plays
nothing else while it writes. The time to gather a record from the session, before that, is measured with the made-up
episode only, whose texts and log-probabilities are random. ``python -m rl.quickstart.policy --out DIR --seed 1``
makes a DIR. Copies have names, replies' ids and seals of their own; ``python -m rollout.audit`` reads them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from bench_proxy import SAID
from measuring import head, row
from proxy_load import Talk, text

from rewards.verdict import Verdict
from rl.metrics.episodes import percentile
from rollout import program
from rollout.agent import AgentRun, Status
from rollout.episode import Episode
from rollout.figures import line
from rollout.proxy.engine import Completion, Seals
from rollout.proxy.replies import reply_events
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import VERSION, Record, RecordWriter, path_of, record_of
from rollout.records.reading import CorruptRecordError, Reader

TURNS, TOKENS, REPLY_CHARS, REPEATS = 300, 100_000, 300, 9


def measure(run: Path) -> None:
    """Print the figures of a run's records."""
    reader, sizes, took, spans, tokens = Reader(run), [], [], [], 0
    with tempfile.TemporaryDirectory(prefix=".records-", dir=run.resolve().parent) as beside:
        writer, bare = RecordWriter(Path(beside), "again"), RecordWriter(Path(beside, "bare"), "bare", synced=False)
        for path in reader.files():
            starts = []
            for offset, record in reader.placed(path):
                starts.append(offset)
                took.append(timed(writer, record))
                spans.append((record.started, record.started + record.timing.get("total", 0.0)))
                tokens += sum(node.length for node in record.nodes)
                bare.append(without_messages(record))
            sizes += [end - start for start, end in itertools.pairwise([*starts, path.stat().st_size])]
        writer.close()
        bare.close()
        tokens_only = bare.path.stat().st_size if sizes else 0
    if not sizes:
        raise SystemExit(f"{run}: there are no records of episodes (*.cep)")
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    played = sum(end - start for start, end in spans)
    head("what", "measured")
    row("episodes, attempts that were lost included", len(sizes))
    row("KB of an episode: mean, p50, p95", spread([size / 1e3 for size in sizes]))
    row("KB without its messages: mean", f"{tokens_only / len(sizes) / 1e3:.2f}")
    row("MB of all", f"{sum(sizes) / 1e6:.2f}")
    row("bytes per token", f"{sum(sizes) / tokens:.2f}" if tokens else "no tokens")
    row("ms to write one: mean, p50, p95", spread([1e3 * seconds for seconds in took]))
    row("share of the wall time", f"{sum(took) / wall:.3%} of {wall:.0f} s" if wall else "no times")
    row("share of the episodes' own time", f"{sum(took) / played:.3%} of {played:.0f} s" if played else "no times")


def audit(run: Path, count: int) -> int:
    """Print what the audit of ``count`` copies of a run's episodes takes; return its exit status."""
    records = [record for record in Reader(run) if not record.attempt]
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(Path(directory, "episodes"), "copies", synced=False)
        Path(directory, "episode_metrics").mkdir()
        with open(Path(directory, "episode_metrics", "copies.jsonl"), "w") as lines:
            for number, record in zip(range(count), itertools.cycle(records), strict=False):
                writer.append(made := copy_of(record, number))
                lines.write(json.dumps(line(made)) + "\n")
        writer.close()
        size, began = writer.path.stat().st_size, time.monotonic()
        code = subprocess.run([sys.executable, "-m", "rollout.audit", directory]).returncode
        seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    head("the audit", "measured")
    row("episodes, MB", f"{count}, {size / 1e6:.0f}")
    row(
        "seconds; of CPU; ms of an episode",
        f"{seconds:.1f}; {used.ru_utime + used.ru_stime:.1f}; {1e3 * seconds / count:.2f}",
    )
    row("MiB of memory", used.ru_maxrss >> 10)
    return code


def copy_of(record: Record, number: int) -> Record:
    """Return a record of this version as if it were of another session."""
    data = msgspec.msgpack.encode(record)
    for name in {node.message_id[4:20] for node in record.nodes if node.message_id}:
        data = data.replace(name.encode(), f"{number:06x}{name[6:]}".encode())
    made = msgspec.msgpack.decode(data, type=Record)
    made.version, made.seal = VERSION, b""
    made.episode, made.attempt, made.started = f"train-1-{number}-{record.episode}", 0, record.started + number
    for i, node in enumerate(made.nodes):
        if node.logprobs is not None:
            prompt = [*array("i", b"".join(made.nodes[n].ids for n in path_of(made.nodes, i)[:-1]))]
            ids, probs = [*array("i", node.ids)], [*array("f", node.logprobs)]
            versions = tuple(array("i", node.versions)) if isinstance(node.versions, bytes) else ()
            node.seal = Seals().make(prompt, Completion(ids, probs, versions), node.side, node.message_id)
    return made


def without_messages(record: Record) -> Record:
    """Return a record as it would be if only tokens were kept."""
    nodes = [msgspec.structs.replace(node, says=b"", head=b"") for node in record.nodes]
    return msgspec.structs.replace(record, nodes=nodes)


def timed(writer: RecordWriter, record: Record) -> float:
    """Write a record, and return the seconds until it is on the disk."""
    began = time.perf_counter()
    writer.append(record)
    return time.perf_counter() - began


def spread(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in (statistics.fmean(values), *(percentile(values, p) for p in (50, 95))))


class LotEngine:
    """A LotEngine calls a tool with words drawn by lot, and draws log-probabilities, which have no pattern."""

    policy: Any

    def __init__(self) -> None:
        self.draw = random.Random(1)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        said = SAID.replace("/src/module.py", text(REPLY_CHARS, self.draw.randrange(1 << 30)))
        ids = [*self.policy.tokenizer.encode(said, add_special_tokens=False), *self.policy.end_ids]
        return Completion(ids, [-self.draw.expovariate(3.0) for _ in ids], versions=(1,) * len(ids))


async def made_up(model: str) -> Episode:
    """Return an episode of ``TURNS`` turns and about ``TOKENS`` tokens, with the events that Claude Code reports."""
    from rollout.proxy.standalone import ProxyOptions, load_policy

    engine = LotEngine()
    policy = engine.policy = load_policy(ProxyOptions("", model, "qwen3_coder", any_family=True))(engine, 4_000_000)
    sample = text(20_000, 1)
    per_char = len(policy.tokenizer.encode(sample, add_special_tokens=False)) / len(sample)
    session, talk, events = Session("made-up", policy), Talk(1, 0), list[dict[str, Any]]()
    for turn in range(TURNS):
        node = await session.prepare(decode_request(talk.body()), retry=False).reply()
        node.delivered = True
        left = (TOKENS - session.tree.tokens) / (TURNS - turn)
        talk.result_chars = max(0, int((left - len(node.ids)) / per_char))
        talk.heard(reply_events(node.reply))
        said = {"id": node.reply.id, "role": "assistant", "content": list(node.reply.blocks)}
        events.append({"type": "assistant", "message": said})
        events.append({"type": "user", "message": json.loads(talk.messages[-1])})
    session.close()
    replies = frozenset(event["message"]["id"] for event in events[::2])
    run = AgentRun(Status.FINISHED, TURNS, "", events, replies)
    task: Any = SimpleNamespace(instance_id="made-up", repo="made/up", difficulty=None)
    rows, timing = session.tree.sequences(), {"total": 0.0}
    return Episode("made-up", task, 0, time.time(), Verdict(None), session, run, b"", rows, timing)


def measure_made_up(model: str) -> None:
    """Print the figures of the made-up episode."""
    episode, gathered, took = asyncio.run(made_up(model)), [], []
    with tempfile.TemporaryDirectory(prefix=".records-", dir=Path.cwd()) as beside:
        writer = RecordWriter(Path(beside), "made-up")
        for _ in range(REPEATS):
            began = time.perf_counter()
            record = record_of(episode, "train", 1, model, "qwen3_coder")
            gathered.append(time.perf_counter() - began)
            took.append(timed(writer, record))
        writer.close()
        size = writer.path.stat().st_size / REPEATS
    tokens = sum(node.length for node in record.nodes)
    sampled = sum(node.length for node in record.nodes if node.logprobs is not None)
    head("what", "measured")
    row("turns, tokens, of which sampled", f"{TURNS}, {tokens:,}, {sampled:,}")
    row("training rows", len(record.rows))
    row("KB", f"{size / 1e3:.0f}")
    row("bytes per token", f"{size / tokens:.2f}")
    row("ms to gather the record, to write it (medians)", f"{median_ms(gathered)}, {median_ms(took)}")
    row("ms per turn", f"{1e3 * (statistics.median(gathered) + statistics.median(took)) / TURNS:.3f}")


def median_ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def main() -> int:
    """Print the table of a run or of the made-up episode; return the exit status."""
    parser = program.parser("python scripts/bench_records.py", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a directory with records")
    what.add_argument("--model", metavar="DIR", help="a tokenizer and its chat template: measure the made-up episode")
    parser.add_argument("--copies", type=int, help="of RUN's episodes: measure the audit of so many")
    args = parser.parse_args()
    try:
        if args.copies and args.run:
            return audit(args.run, args.copies)
        measure_made_up(args.model) if args.model else measure(args.run)
    except (FileNotFoundError, CorruptRecordError) as error:
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
