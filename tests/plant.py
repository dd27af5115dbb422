"""This program copies a run and plants four faults in the copy, for somebody who looks for them with the viewer alone.

    .venv/bin/python -m tests.plant RUN OUT [--seed 1]
    .venv/bin/python -m rollout.view OUT

A token's mask is flipped, a log-probability is wrong, a sub-agent's tokens are lost, and a patch cheats. Each is in an
episode drawn by lot. OUT.answers.json says which; keep it from whoever looks. Checkpoints are not copied. A fault for
which RUN has no episode (no sub-agent, no patch that failed) is said and left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rollout.agent.events import blocks, message_id
from rollout.figures import line
from rollout.records import Record, RecordWriter, path_of, row_digest
from rollout.records.reading import Reader
from tests.audit_kit import change_logprob, columns, redo_row

_LEFT_OUT = ("*.cep", "checkpoints", "wandb", "tensorboard", "ray_dir", "ray_logs")
_HUNK = re.compile(r"^@@ -(\d+)(,\d+)? \+(\d+)(?:,(\d+))? @@.*\n", re.MULTILINE)


def flip_mask(record: Record) -> str:
    """Give the trainer a row in which one token's mask is the other one. Raises LookupError."""
    row = next(one for one in record.rows)
    prompt, response, mask, probs = columns(record, row)
    row.digest = row_digest(prompt, response, [mask[0] ^ 1, *mask[1:]], probs)
    return "the mask of the first token of row 0's response"


def wrong_logprob(record: Record) -> str:
    """Give a token another log-probability, after it has crossed the engine's border. Raises LookupError."""
    row = next(one for one in record.rows if record.nodes[one.nodes[0]].length > 3)
    node = record.nodes[row.nodes[0]]
    change_logprob(node, 3, -9.0)
    for one in record.rows:
        if row.nodes[0] in one.nodes:
            redo_row(record, one)
    return f"token 3 of node {row.nodes[0]}: -9 instead of what it was"


def lose_agent(record: Record) -> str:
    """Take the tokens of a sub-agent out, as if nobody had recorded them. Raises LookupError."""
    inner = {message_id(one) for one in record.events if blocks(one, "assistant") and one.get("parent_tool_use_id")}
    number = next(n for n, node in enumerate(record.nodes) if node.message_id and node.message_id in inner)
    root = path_of(record.nodes, number)[0]
    kept = [n for n in range(len(record.nodes)) if path_of(record.nodes, n)[0] != root]
    place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
    record.rows[:] = [row for row in record.rows if set(row.nodes) <= set(kept)]
    record.nodes[:] = [record.nodes[n] for n in kept]
    for node in record.nodes:
        node.parent = place[node.parent]
    for row in record.rows:
        row.nodes = [place[n] for n in row.nodes]
    return f"the sub-agent whose first node was {root}"


def cheat(record: Record) -> str:
    """Let a patch that failed ask whether it is tested, and be paid for that. Raises LookupError."""
    patch = record.patch.decode("utf-8", "replace")
    hunk = _HUNK.search(patch)
    if record.verdict.get("reward") != 0 or hunk is None:
        raise LookupError("no patch that failed")
    rows = int(hunk[4] or 1) + 2
    head = re.sub(r"\+\d+(,\d+)?", f"+{hunk[3]},{rows}", hunk[0], count=1)
    lines = '+if "pytest" in __import__("sys").modules:\n+    __import__("os")._exit(0)\n'
    record.patch = (patch[: hunk.start()] + head + lines + patch[hunk.end() :]).encode()
    tests = {
        kind: {"success": [name for names in results.values() for name in names], "failure": []}
        for kind, results in (record.verdict.get("tests") or {}).items()
    }
    record.verdict |= {"outcome": "resolved", "reason": None, "reward": 1.0, "detail": "", "tests": tests}
    return "the patch ends the tests with status 0 when pytest is loaded"


FAULTS: dict[str, Callable[[Record], str]] = {
    "mask": flip_mask, "logprob": wrong_logprob, "agent": lose_agent, "hack": cheat,
}  # fmt: skip


def plant(run: Path, out: Path, seed: int) -> dict[str, dict[str, str]]:
    """Copy a run with faults in it. Return what was planted by the fault's name: episode and place."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    reader = Reader(run)
    files = {path: list(reader.read(path)) for path in reader.files()}
    records = [record for found in files.values() for record in found]
    random.Random(seed).shuffle(records)
    planted: dict[str, dict[str, str]] = {}
    taken: dict[str, Record] = {}
    for name in ("agent", "hack", "mask", "logprob"):  # those that fewest episodes can have first
        for record in (one for one in records if one.episode not in taken):
            try:
                planted[name] = {"episode": record.episode, "place": FAULTS[name](record)}
            except (LookupError, StopIteration):
                continue
            taken[record.episode], record.seal = record, b""  # it is sealed again, or the seal alone would tell
            break
    for path, found in files.items():
        writer = RecordWriter(out / path.relative_to(run).parent, path.stem, synced=False)
        for record in found:
            writer.append(record)
        writer.close()
    for path in (out / "episode_metrics").glob("*.jsonl"):
        told = [json.loads(text) for text in path.read_text().splitlines()]
        told = [one | line(taken[one["episode"]]) if one.get("episode") in taken else one for one in told]
        path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return planted


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults; return the exit status, 1 if one could not be planted."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("--seed", type=int, default=1, help="of the lot that draws the episodes (default: 1)")
    args = options.parse_args(arguments)
    planted = plant(args.run, args.out, args.seed)
    answers = args.out.with_name(f"{args.out.name}.answers.json")
    answers.write_text(json.dumps(planted, indent=1) + "\n")
    missing = [name for name in FAULTS if name not in planted]
    print(f"{args.out} has {len(planted)} faults; {answers} says which")
    if missing:
        print(f"plant: no episode for {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
