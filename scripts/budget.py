"""Print how much Python each part of the project has beside its budget. The exit status is 1 if a budget is exceeded.

A line of code is one that is neither blank nor a comment nor part of a docstring. A budget is there so that growth is a
decision: whoever raises one says in the commit what the project gets for it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parents[1]

# Lines of code per directory. A directory that is not named here counts in the one above it.
WINGS = {
    # 145 are the curriculum: which tasks a step plays, by measured rates, the same after a resume.
    # The player of episodes moved here from rl/evaluate, because collection and warm start use it too; 15 show its
    # progress.
    "rl": 2805,
    # 9: sft's numbers; 46: a toy's recipe for a real model, and the memory of a real model on a CPU; 39: names
    # that verl looks up, before the first rollout.
    "rl/checks": 900,
    "rl/cluster": 1260,  # 15: starts without progress end a job that never trains
    # Episodes as data (records, session files, spans, a dataset); 205 are an expert that plays in a policy's own form.
    "rl/collect": 485,
    "rl/cpu": 267,  # 22 start vLLM's server with an engine that is a fork, and without a worker of its own
    # 420 are selections: episodes by rules over their figures, tasks by measured resolve rates. 385 are the commands
    # that make tasks, overlap of task files, and the probe. 150 put made tasks into container images. 98 are labels and
    # comments. 39: undone fixes and written bugs among a package's edits, and which tests the gold patch does not pass.
    "rl/data": 2284,
    "rl/evaluate": 780,
    "rl/ingest": 2094,  # conversations of six kinds and runs as states, through one gate; rows, evaluation
    "rl/export": 887,  # eleven formats, of records and of ingested states; 235 are logs for Inspect
    # Tasks of packages: hostile archives, environments, 28 makers, trials in boxes, statements; 75 find what is alike;
    # 55 record what functions return while tests run. 445: tasks of functions that stand alone. 21: the quickstart's
    # repositories, which those of functions are like. 350: a program for each bug, fixes taken back from a history,
    # bugs that a model writes, and why a package or a test is of no use.
    "rl/make": 3030,
    "rl/metrics": 580,  # 94 keep what the trainer made of sampled tokens
    "rl/plan": 1274,  # 65 read layers: windows, MLA, linear attention; 11: where turns end
    "rl/quickstart": 613,
    # This includes the weights that policy= names, which rl.train takes, too. 45 run the sender beside a run; 35 fork
    # an engine from the fork server, as Ray's workers are, which saves 8 s of each start on a CPU; 60 start programs as
    # forks, in rounds on a CPU; 10 end with the fork server what a fork has started; 5 keep ports below those of
    # connections; 4 add an adapter to weights and run verl's merger for rl.sft, too.
    "rl/run": 1340,
    "rl/store": 408,  # new: episodes in a LightningStore, live and later
    # Fine-tuning once and in rounds: rows, verl's SFT trainer, adapters, LLaMA-Factory, preference pairs.
    "rl/sft": 989,
    # Records in the browser: index, turns, tokens, tasks, comparison, finding; the terminal. 60 write pages as files,
    # 30 spare a search most of its work.
    "rl/view": 1786,
    # Other models answer recorded states, within a cap of dollars; 135: they word statements; 61: they write bugs.
    "rl/teachers": 355,
    # 10: the audit knows copies of records. 50: the --help and the quiet end of all programs; 10: records are read on
    # while their file grows; 45: what closes a turn, by the template.
    # 165: the trace, which all that read episodes share, whatever an endpoint has said; 140: hostile records, and
    # output without escape codes.
    # 411: the audit proves every field of a record and every figure of a line, and which commands ran.
    # 42 record what the stand-alone proxy serves.
    "rollout": 1866,
    "rollout/agent": 347,  # Claude Code's settings, hooks, MCP servers, skills; its session files out of hostile boxes
    # 210 are proofs: of delivery (the socket tells what was read), and of which one is meant among several replies,
    # requests or branches that are alike. 300 are chat completions, and conversations as they went over the wire. 280
    # are for large requests, which hold nobody up and are refused before they are encoded; a head is encoded, and the
    # beginning of a prompt hashed, only once.
    # 140 compare a session with the model's own chat template at every start.
    # 239: limits of connections, endpoints that fail or say odd things, end ids by the template, what log-probabilities
    # are of.
    "rollout/proxy": 3641,
    "rollout/sandbox": 1164,  # 62: exhausted machines are no failure of the policy; logs are cut in the middle
    "rollout/sandbox/apptainer": 490,
    "rollout/sandbox/docker": 1010,
    "rollout/sandbox/local": 544,  # 44: the trainer's packages are hidden, and the two reasons for no bubblewrap
    # 705: a second opinion that is not told from the first, for every Python runner; what an image has installed; drops
    # that decide are graded again.
    "rewards": 1724,
    # 190: the stress of the proxy; 150: the viewer's benchmark; 70: seeds of fine-tuning. 180: what records cost,
    # distillation and the curriculum for several seeds, a document typed. 30: rounds, then GRPO from them.
    # 150: a detector of tests made wrong, and the audit's benchmark.
    # 600 bring a real model and everything that it needs to a GPU machine without a network, and train it there.
    "scripts": 3747,
}
# 800 of it are collection: three back ends, what an agent leaves, its settings as config. 1,500 are selections of
# episodes and tasks, and exports; 2,600 recorded conversations of other programs as states, and what is made of these,
# by teachers, too; 350 the proxy's speed and how it is measured; 950 fine-tuning: the command, rounds, LLaMA-Factory,
# preferences, seeds; 60: the help of all programs; 1,900: what was recorded, in the browser and the terminal; 550
# episodes in a store. 200 measure distillation and records, and type docs/chain.md. 3,250 are tasks made of packages,
# their measured rates, a curriculum, and tasks of functions. 620 are a real model on a lent GPU. 235 are logs for
# Inspect. 2,090 are what reviewers got through: a second opinion that cannot be recognized (680), the audit (430),
# tasks of histories and with a program for each bug (450), boxes (120), the proxy (300); 104 read a model's layers and
# verl's names.
EVERYTHING = 36_524

# What happens to one task, from its row to the rows that are trained on, in the simplest kind of box: these files of
# the trainer's side, and everything in rollout/ and rewards/ that these modules import. Pulls, seals, registries and
# leases belong to boxes from images and do not count; neither does another agent or kind of box that is added.
ONE_TASK_TRAINER = ("rl/agent_loop.py", "rl/engine.py", "rl/trainer.py", "rl/groups.py")
ONE_TASK_MODULES = (
    "rollout.episode",
    "rollout.records",
    "rollout.agent.claude_code",
    "rollout.sandbox.local.box",
    "rollout.proxy.server",
    "rollout.proxy.render",
    "rollout.proxy.parsers",
    "rewards.grade",
    "rewards.second",
    "rewards.shape",
    "rewards.falsify",
)
# The goal was 5,000. Of the excess, 210 are proofs (of delivery, and of which reply is meant); 130 an agent's own
# settings, and keeping its files; 265 speed; 30 reading on behind a broken record, and copying one; 10 reading on while
# a file grows; 160 control groups of boxes; 55 failures in logs that nothing takes back; 35 limits of what a client
# sends; 45 the forms of calls and turns that published chat templates want;
# 160 messages in records, records that are hostile, and ids of other endpoints, whose replies have an end; 1,010 the
# second opinion, honest work, failures of machines, and clients and endpoints that are hostile.
ONE_TASK_BUDGET = 7_533

LONGEST_FILE = 500
# Files of more lines (of any kind), with the reason.
LONG_FILES: dict[str, str] = {}

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


class Size(NamedTuple):
    """A size is the number of a file's lines: of code, of code and docstrings, and all."""

    code: int
    documented: int
    all: int


def measure(path: Path) -> Size:
    """Count the lines of a Python file."""
    text = path.read_text()
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            documents.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    filled = {number for number in code if number <= len(lines) and lines[number - 1].strip()}
    return Size(len(filled - documents), len(filled), len(lines))


def wing(path: str) -> str:
    """Return the most specific key of WINGS that a file counts in."""
    return max((name for name in WINGS if path.startswith(f"{name}/")), key=len)


def one_task() -> set[str]:
    """Return the files on the way of one task."""
    sys.path.insert(0, str(ROOT))  # before a copy of the packages that is installed
    graph = grimp.build_graph("rollout", "rewards", exclude_type_checking_imports=True, cache_dir=None)
    found: set[str] = set()
    waiting = list(ONE_TASK_MODULES)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph.find_modules_directly_imported_by(module)
    places = [ROOT / module.replace(".", "/") for module in found]
    files = [place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places]
    return {str(file.relative_to(ROOT)) for file in files} | set(ONE_TASK_TRAINER)


def main() -> int:
    """Print the table; return 1 if a budget is exceeded or a file is too long, else 0."""
    sizes = {
        str(path.relative_to(ROOT)): measure(path)
        for top in ("rl", "rollout", "rewards", "scripts")
        for path in sorted((ROOT / top).rglob("*.py"))
    }
    way = one_task()
    rows = [(name, [size for path, size in sizes.items() if wing(path) == name], WINGS[name]) for name in WINGS]
    rows.append(("everything", list(sizes.values()), EVERYTHING))
    rows.append(("the way of one task", [sizes[path] for path in sorted(way)], ONE_TASK_BUDGET))

    failures: list[str] = []
    print(f"{'lines of':<26} {'files':>6} {'code':>7} {'budget':>7} {'with docstrings':>16}")
    for name, counted, budget in rows:
        code = sum(size.code for size in counted)
        documented = sum(size.documented for size in counted)
        print(f"{name:<26} {len(counted):>6} {code:>7,} {budget:>7,} {documented:>16,}")
        if code > budget:
            failures.append(f"{name} has {code:,} lines of code; its budget is {budget:,}")
    tests = {str(path.relative_to(ROOT)): measure(path) for path in sorted((ROOT / "tests").rglob("*.py"))}
    for path, size in {**sizes, **tests}.items():
        if size.all > LONGEST_FILE and path not in LONG_FILES:
            failures.append(f"{path} has {size.all} lines; split it, or give a reason in LONG_FILES")
        if size.all <= LONGEST_FILE and path in LONG_FILES:
            failures.append(f"{path} has {size.all} lines: take it out of LONG_FILES")
    for failure in failures:
        print(f"budget: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
