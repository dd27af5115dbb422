"""This program runs groups of tests, remembers what passed, and runs in continuous integration what a change can touch.

    make test                                       # the groups core, boxes, proxy and training
    make test-NAME                                  # one group
    make test-all
    .venv/bin/python -m tests.runner                # the groups: what they prove and cost, and which are stale
    .venv/bin/python -m tests.runner run --group NAME ... PYTEST-ARGUMENTS
    .venv/bin/python -m tests.runner ci             # what .ci/run runs

A group that passes whole writes a hash of all that it depends on (tests.inputs) into tests/passed.json, which is
tracked. It is stale while that hash is another one. Continuous integration runs lint, `make test` and one preempted
SLURM job always, then stale groups, the one that passed longest ago first, while their cost fits into 40 minutes.
First of all come those that have not run for ten commits of tests/passed.json, which may take 20 minutes more. What
does not fit is named, and somebody has to run it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.files import write
from tests import reads
from tests.cpu_seconds import WORKER
from tests.inputs import ROOT, inputs
from tests.lacks import LACKS

PASSED = ROOT / "tests" / "passed.json"
MINUTES = 40
MORE = 20  # minutes, for a group that is due: slow machines would otherwise run longer than they may
COMMITS = 10
UNKNOWN_CPU_S = 600  # of a group that has never passed
RATE = 0.7  # seconds of a session for a CPU second of its tests, if those of `make test` are not remembered
OWN = {f"tests/{name}.py" for name in ("runner", "inputs", "reads", "cpu_seconds", "lacks", "__init__")}
OWN |= {".gitignore", "tests/passed.json"}
PRINTED = 3  # of the files for which a group is stale


@dataclass(frozen=True)
class Group:
    """A group of tests, told by their folders.

    proves: in a few words. scripts: what makes the environments that it needs. packages: Debian's, which continuous
    integration installs for it. overlay: goes first on Python's path; such a group is a session of its own.
    """

    proves: str
    folders: tuple[str, ...]
    scripts: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    overlay: str = ""


_HERE = "tests/integration"
GROUPS = {
    "core": Group("units and properties", ("tests/unit", "tests/property")),
    "boxes": Group("every kind of box: verbs, isolation, attacks", ("tests/boxes",)),
    "proxy": Group("the proxy with the real Claude Code and vLLM", (f"{_HERE}/proxy",)),
    "training": Group("a run starts, is killed with -9, resumes", (f"{_HERE}/training",)),
    "faults": Group("faults of episodes and of whole runs", (f"{_HERE}/faults",)),
    "cluster": Group("SLURM and Ray", (f"{_HERE}/cluster",)),
    "experiments": Group("experiments and the GPU ladder at toy size", (f"{_HERE}/experiments",)),
    "tasks": Group("tasks made, admitted, probed and evaluated", (f"{_HERE}/tasks",)),
    "languages": Group("tasks in Go, JavaScript, Rust and Java", (f"{_HERE}/languages",)),
    "traces": Group(
        "episodes collected, stored, exported, fine-tuned on, also by other trainers",
        (f"{_HERE}/traces",),
        scripts=("scripts/trainers.sh", "scripts/llamafactory.sh"),
        packages=("chromium-headless-shell",),
    ),
    "agents": Group(
        "the real programs of other agents than Claude Code",
        (f"{_HERE}/agents",),
        scripts=("scripts/agents.sh",),
    ),
    "browser": Group("the viewer in Chromium", (f"{_HERE}/browser",), packages=("chromium-headless-shell",)),
    "gpu-pins": Group(
        "units and properties with the GPU extra's vLLM, verl and transformers",
        ("tests/unit", "tests/property"),
        scripts=("scripts/gpu_pins.sh",),
        overlay=".gpu-pins",
    ),
    "real": Group("a real model in the real Claude Code, token by token", (f"{_HERE}/real",)),
    "learning": Group("policies learn: rounds, GRPO and distillation", (f"{_HERE}/learning",)),
}
MAKE_TEST = ("core", "boxes", "proxy", "training")
ALWAYS = f"{_HERE}/cluster/test_slurm.py::test_a_run_on_two_nodes_is_preempted_requeued_and_finishes"
COMMON = (
    ".ci/run",
    ".ci/install",
    "pyproject.toml",
    "scripts/setup.sh",
    *(f"constraints/{name}.txt" for name in ("build", "cpu", "cpu-overrides")),
    "packaging/vllm-shim/pyproject.toml",
)
# Two for those that train, one for all others: with five, two cores take longer.
PYTEST = ("-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder", "--durations=20")


# --- what passed --------------------------------------------------------------------------------------------------


@functools.cache
def inputs_of(name: str) -> frozenset[str]:
    """Return the paths of the files that a group depends on."""
    group = GROUPS[name]
    found = inputs(["tests/conftest.py", *group.folders, *group.scripts])
    return frozenset(found).union(COMMON) - {"tests/passed.json"}


def digest(name: str) -> str:
    """Return the hash of what a group depends on, as the files are now."""
    made = hashlib.sha256(repr((GROUPS[name], PYTEST)).encode())
    for path in sorted(inputs_of(name)):
        made.update(f"{path}\0".encode())
        file = ROOT / path
        made.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    return made.hexdigest()[:32]


def passed() -> dict[str, dict[str, Any]]:
    """Return what is remembered of each group: inputs (its hash), when, cpu_s (of its tests)."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def remember(name: str, inputs: str, cpu_s: float) -> None:
    """Write that a group has passed, a line each."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M")
    known = passed() | {name: {"inputs": inputs, "when": when, "cpu_s": round(cpu_s)}}
    lines = [f"{json.dumps(group)}: {json.dumps(known[group])}" for group in GROUPS if group in known]
    write(PASSED, "{\n" + ",\n".join(lines) + "\n}\n")


def stale(name: str) -> bool:
    """Tell whether something that a group depends on is not what it was when it last passed."""
    return passed().get(name, {}).get("inputs") != digest(name)


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


@functools.cache
def _before() -> dict[str, dict[str, Any]] | None:
    """Return what was remembered ten commits of the file ago, None if it is younger."""
    path = str(PASSED.relative_to(ROOT))
    commits = _git("log", "--format=%H", f"-{COMMITS + 1}", "--", path).split()
    return json.loads(_git("show", f"{commits[COMMITS]}:{path}")) if len(commits) > COMMITS else None


def due(name: str) -> bool:
    """Tell whether a group has not run for ten commits of what is remembered."""
    before = _before()
    return before is not None and before.get(name) == passed().get(name)


def why(name: str) -> str:
    """Return why a group is to run: what has changed since the commit that says that it passed."""
    if not stale(name):
        return f"not run for {COMMITS} commits of {PASSED.name}" if due(name) else ""
    known = passed().get(name)
    if known is None:
        return "has never passed"
    commit = _git("log", "-1", "--format=%H", f"-S{known['inputs']}", "--", str(PASSED)).strip()
    changed = set(_git("diff", "--name-only", commit).split()) if commit else set()
    found = sorted(changed & inputs_of(name))
    more = f" and {len(found) - PRINTED} more" if len(found) > PRINTED else ""
    return f"changed: {', '.join(found[:PRINTED])}{more}" if found else "changed"


# --- running ------------------------------------------------------------------------------------------------------


class Reports:
    """This plugin of pytest's controller keeps the outcome of each test: "passed", "failed", or why it was skipped."""

    def __init__(self, file: str) -> None:
        self.file, self.outcomes = file, dict[str, str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.outcomes.setdefault(report.nodeid, report.longrepr[2])
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported, or that skips itself, as a test."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = report.longrepr[2]

    def pytest_sessionfinish(self) -> None:
        Path(self.file).write_text(json.dumps(self.outcomes))


def pytest_configure(config: Any) -> None:
    """Keep outcomes where the environment says so."""
    if (file := os.environ.get("TEST_OUTCOMES")) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Reports(file))


@dataclass
class Tally:
    """A tally of a group's tests: outcomes, CPU seconds, and the sum of their durations in seconds."""

    outcomes: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0
    wall_s: float = 0

    def count(self, outcome: str) -> int:
        return sum(one == outcome for one in self.outcomes.values())

    @property
    def skipped(self) -> list[str]:
        """Return why tests were skipped, each reason once."""
        return sorted(set(self.outcomes.values()) - {"passed", "failed"})


@dataclass
class Session:
    """A session of pytest: exit status, seconds, its groups' tallies, and CPU seconds of its workers' start and end.

    unforeseen: files that were read and that no group of the session is known to depend on.
    """

    status: int
    wall_s: float
    groups: dict[str, Tally] = field(default_factory=lambda: collections.defaultdict(Tally))
    start_cpu_s: float = 0
    unforeseen: list[str] = field(default_factory=list)

    @property
    def cpu_s(self) -> float:
        """Return all CPU seconds of the session."""
        return self.start_cpu_s + sum(tally.cpu_s for tally in self.groups.values())

    def rate(self, remembered: float) -> float:
        """Return how many seconds a session takes here for a remembered CPU second of tests.

        remembered: CPU seconds that this session's groups once took; its other tests do not count.
        """
        own = sum(tally.cpu_s for name, tally in self.groups.items() if name)
        return self.wall_s / self.cpu_s * own / remembered


def run(names: Sequence[str], arguments: Sequence[str] = (), *, whole: bool | None = None) -> Session:
    """Run groups in one session of pytest, with their environments made; remember those that pass.

    arguments: pytest's; paths among them are run in place of the groups. whole: all tests of the groups are run, and
    the arguments' paths beside them; by default, if there are no arguments. Otherwise nothing is remembered.
    """
    whole = not arguments if whole is None else whole
    paths = _paths(arguments)
    for name in names:
        if failed := prepare(name):
            return failed
    folders = [folder for name in names for folder in GROUPS[name].folders] if whole or not paths else []
    # Modules that were read are told by their bytecode.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTEST_ADDOPTS": ""}
    for overlay in {GROUPS[name].overlay for name in names} - {""}:
        environment["PYTHONPATH"] = str(ROOT / overlay)
    if not whole:
        return _pytest(names, [*folders, *arguments], environment)
    before = {name: digest(name) for name in names}
    unknown = ""
    try:
        reads.forget(ROOT)
    except reads.UnknownError as error:
        unknown = str(error)
    session = _pytest(names, [*folders, *arguments], environment)
    if session.status not in (0, 1):
        return session
    if not unknown:
        known = frozenset(inputs(paths)).union(*(inputs_of(name) for name in names))
        session.unforeseen = sorted(one for one in reads.read(ROOT) - known - OWN if not one.endswith("/.gitignore"))
    for name in names:
        if problem := unknown or _problem(name, before[name], session):
            print(f"runner: {name} is not remembered as passed: {problem}", file=sys.stderr)
        else:
            remember(name, before[name], session.groups[name].cpu_s)
    return session


def prepare(name: str) -> Session | None:
    """Make the environments that a group needs. Returns a session that says which one cannot be made."""
    for script in GROUPS[name].scripts:
        if all(subprocess.run([script], cwd=ROOT).returncode for _ in range(3)):  # an index may not answer once
            return Session(1, 0, {name: Tally({script: "failed"})})
    return None


def _paths(arguments: Sequence[str]) -> list[str]:
    """Return the files and folders of tests among pytest's arguments, without those of an option."""
    found = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        path = (ROOT / word.partition("::")[0]).resolve()
        if path.exists() and path.is_relative_to(ROOT / "tests") and before not in ("--deselect", "--ignore", "-k"):
            found.append(str(path.relative_to(ROOT)))
    return found


def _pytest(names: Sequence[str], arguments: Sequence[str], environment: dict[str, str]) -> Session:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        costs, outcomes = Path(directory, "costs"), Path(directory, "outcomes")
        costs.touch()
        plugins = ["-p", "tests.runner", "-p", "tests.cpu_seconds", f"--cpu-seconds={costs}"]
        command = [sys.executable, "-m", "pytest", *PYTEST, *plugins, *arguments]
        environment = environment | {"TEST_OUTCOMES": str(outcomes)}
        session = Session(subprocess.run(command, cwd=ROOT, env=environment).returncode, time.monotonic() - began)
        spent = [json.loads(line) for line in costs.read_text().splitlines()]
        ended = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    for test, outcome in ended.items():
        session.groups[group_of(test, names)].outcomes[test] = outcome
    for one in spent:
        if one["test"] == WORKER:
            session.start_cpu_s += one["cpu"]
        else:
            tally = session.groups[group_of(one["test"], names)]
            tally.cpu_s += one["cpu"]
            tally.wall_s += one["wall"]
    return session


def _problem(name: str, before: str, session: Session) -> str:
    """Return why a group does not count as passed, "" if it does."""
    tally = session.groups.get(name, Tally())
    lacking = [reason for reason in tally.skipped if LACKS in reason]
    if tally.count("failed") or not tally.count("passed"):
        return f"{tally.count('failed')} failed, {tally.count('passed')} passed"
    if failed := [test for test, outcome in session.groups.get("", Tally()).outcomes.items() if outcome == "failed"]:
        return f"{failed[0]} failed"
    if lacking:
        return lacking[0]
    if session.unforeseen:
        return f"tests.inputs does not know that tests read {', '.join(session.unforeseen)}"
    return "" if digest(name) == before else "files that it depends on have changed meanwhile"


def group_of(test: str, names: Iterable[str]) -> str:
    """Return which of these groups a test belongs to; "" for none."""
    folders = {name: tuple(f"{one}/" for one in GROUPS[name].folders) for name in names}
    return next((name for name in names if f"{test}/".startswith(folders[name])), "")


# --- continuous integration ---------------------------------------------------------------------------------------


def choose(names: Iterable[str], room_s: float, rate: float) -> list[str]:
    """Return which groups run: those that are due, then stale ones, the oldest first, that fit into the time.

    room_s: seconds that are left; one that is due has `MORE`. rate: seconds that a session here takes for a remembered
    CPU second.
    """
    known = passed()
    waiting = sorted(
        (name for name in names if stale(name) or due(name)),
        key=lambda name: (not due(name), known.get(name, {}).get("when", "")),
    )
    chosen = []
    for name in waiting:
        seconds = known.get(name, {}).get("cpu_s", UNKNOWN_CPU_S) * rate
        if seconds <= room_s + due(name) * MORE * 60:
            chosen.append(name)
            room_s -= seconds
    return chosen


def ci(began: float) -> int:
    """Run lint, `make test` and one preempted SLURM job, then what `choose` says; print what each group did.

    began: when continuous integration began, in seconds since 1970. Installing is part of the time.
    """
    known = passed()
    remembered = sum(known[name]["cpu_s"] for name in MAKE_TEST) if known.keys() >= set(MAKE_TEST) else 0
    reasons = {name: why(name) for name in GROUPS}
    lint = _lint()
    sessions = [run(MAKE_TEST, [ALWAYS], whole=True)] if not lint.status else []
    if sessions and sessions[0].status in (0, 1):
        rate = sessions[0].rate(remembered) if remembered and not sessions[0].status else RATE
        chosen = choose((name for name in GROUPS if name not in MAKE_TEST), MINUTES * 60 - (time.time() - began), rate)
        for name in chosen:
            if packages := GROUPS[name].packages:
                subprocess.run([ROOT / ".ci" / "install", *packages])
            if failed := prepare(name):
                sessions.append(failed)
        for names in _sessions([name for name in chosen if not any(name in one.groups for one in sessions)]):
            done = "cluster" in names and not sessions[0].groups.get("", Tally()).count("failed")
            sessions.append(run(names, ["--deselect", ALWAYS] if done else [], whole=True))
    return _report([lint, *sessions], reasons, began)


def _lint() -> Session:
    before, began = sum(os.times()[2:4]), time.monotonic()  # of children
    status = subprocess.run(["make", "--no-print-directory", "lint"], cwd=ROOT).returncode
    cpu_s, wall_s = sum(os.times()[2:4]) - before, time.monotonic() - began
    return Session(status, wall_s, {"lint": Tally({"lint": "failed" if status else "passed"}, cpu_s, wall_s)})


def _report(sessions: Sequence[Session], reasons: dict[str, str], began: float) -> int:
    """Print a line for each group and session, what was left out, and the sums; return the exit status."""
    total = collections.Counter[str]()
    ran = set[str]()
    print(f"\n{'group':14}{'passed':>8}{'failed':>8}{'skipped':>9}{'CPU s':>8}{'minutes of its tests':>22}")
    for session in sessions:
        for name, tally in session.groups.items():
            numbers = tally.count("passed"), tally.count("failed")
            skipped = len(tally.outcomes) - sum(numbers)
            total.update(passed=numbers[0], failed=numbers[1], skipped=skipped)
            ran.add(name)
            line = f"{name or 'preempted job':14}{numbers[0]:8}{numbers[1]:8}{skipped:9}"
            print(f"{line}{tally.cpu_s:8.0f}{tally.wall_s / 60:22.1f}")
        for path in session.unforeseen:
            print(f"FAILED: tests read {path}, and tests.inputs does not know that they depend on it")
        print(f"{'':14}together {session.wall_s / 60:.1f} minutes, {session.cpu_s:.0f} CPU s with workers' start")
    for name, reason in reasons.items():
        if name in ran and reason and name not in MAKE_TEST:
            print(f"{name} ran: {reason}")
    if _git("rev-parse", "--is-shallow-repository").strip() == "true":
        print(f"this clone is shallow: which groups have not run for {COMMITS} commits is not known")
    for name, reason in reasons.items():
        if name not in ran:
            print(f"LEFT OUT, stale: {name}: {reason}" if reason else f"not stale: {name}")
    print(f"{(time.time() - began) / 60:.1f} minutes with installations")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if any(session.status or session.unforeseen for session in sessions) else 0


def show() -> int:
    """Print the groups."""
    known = passed()
    for name, group in GROUPS.items():
        cost = f"{known[name]['cpu_s']:5} CPU s, passed {known[name]['when']}" if name in known else ""
        print(f"{name:12} {group.proves}\n{'':12} {cost}{'; ' if cost else ''}{why(name) or 'not stale'}")
    return 0


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.runner", formatter_class=argparse.RawTextHelpFormatter)
    parser.description = __doc__
    verbs = parser.add_subparsers(dest="verb")
    running = verbs.add_parser("run", help="run groups in one session; what else is given is pytest's")
    names = [*GROUPS, "all"]
    running.add_argument("--group", action="append", choices=names, metavar="NAME", help=", ".join(names))
    testing = verbs.add_parser("ci", help="run what .ci/run runs")
    testing.add_argument("--began", type=float, default=time.time(), help="seconds since 1970; default: now")
    given, more = parser.parse_known_args()
    if given.verb == "ci":
        return ci(given.began)
    if given.verb is None:
        return show()
    sessions = [[name] for name in GROUPS] if given.group == ["all"] else _sessions(given.group or MAKE_TEST)
    return int(any([run(names, more).status for names in sessions]))


def _sessions(names: Sequence[str]) -> list[list[str]]:
    """Return the groups of each session: those with an overlay are alone."""
    plain = [name for name in names if not GROUPS[name].overlay]
    return [one for one in (plain, *([name] for name in names if GROUPS[name].overlay)) if one]


if __name__ == "__main__":
    sys.exit(main())
