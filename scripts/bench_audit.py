"""Measure how fast the audit reads.

    python scripts/bench_audit.py RUN --episodes 10000

It writes a run of that many episodes with their lines, copies of RUN's with names, replies' ids and seals of their own,
and times ``python -m rollout.audit`` on it.
"""

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import msgspec

from rollout import program
from rollout.figures import line
from rollout.proxy.engine import Completion, Seals
from rollout.records import VERSION, Record, RecordWriter, path_of
from rollout.records.reading import Reader


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


def main() -> int:
    """Print episodes, replies, tokens, seconds and memory; return the audit's exit status."""
    options = program.parser("python scripts/bench_audit.py", __doc__)
    options.add_argument("run", type=Path, help="a run directory")
    options.add_argument("--episodes", type=int, default=10_000)
    args = options.parse_args()
    records = [record for record in Reader(args.run) if not record.attempt]
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(Path(directory, "episodes"), "copies", synced=False)
        Path(directory, "episode_metrics").mkdir()
        with open(Path(directory, "episode_metrics", "copies.jsonl"), "w") as lines:
            for number, record in zip(range(args.episodes), itertools.cycle(records), strict=False):
                writer.append(made := copy_of(record, number))
                lines.write(json.dumps(line(made)) + "\n")
        writer.close()
        size = writer.path.stat().st_size
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "rollout.audit", directory]).returncode
        seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{args.episodes} episodes, {size / 1e6:.0f} MB: {seconds:.1f} s, {1e3 * seconds / args.episodes:.2f} ms each, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU time, {used.ru_maxrss >> 10} MiB of memory"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
