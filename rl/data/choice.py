"""Choose episodes of runs by rules over what was measured of them. ``rl.data.select`` is the command for it.

chosen = choose([Path(run)], ChoiceRules(resolved=True, best=1))
for record in chosen.records(): ...
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rewards.verdict import Reason
from rl.config.overrides import nearest
from rl.data.labels import Label, of_runs
from rl.data.rates import ResolveRate, rated
from rollout.agent.events import blocks
from rollout.audit import audit_heard, audit_tokens
from rollout.figures import Line, line, suspicious
from rollout.records import Record
from rollout.records.reading import Reader, record_at

Made = TypeVar("Made")
Progress = Callable[[int, int], object]  # takes how much is done, and how much there is


class SelectError(ValueError):
    """A selection is impossible. The message is one line."""


@dataclass(frozen=True)
class ChoiceRules:
    """These rules say which episodes are chosen. A rule that is None, False or empty is off.

    audited: no finding of the audit's checks 1 to 3 and 5. splits, models, instances (ids of tasks), repos: shell
    patterns, one of which must fit. labels, not_labels: such patterns of what people have said of episodes
    (``rl.data.labels``); it must have one of the first and none of the second. rate: bounds of the task's measured
    resolve rate, neither included. min_episodes: the fewest graded episodes of the task. resolved: what the verdict
    must be. unflagged: nothing is suspicious. ranges: least and greatest value of figures (``rollout.figures.line``),
    both included. same: "said" (patch and all sampled ids) or "patch"; of a task's episodes in which this is the same,
    only the first is chosen. best: at most so many of each task, ranked by reward, then without flags, then fewest
    turns, then fewest sampled tokens. per_task, limit: at most so many of each task and in all, drawn at random. seed:
    of these draws.
    """

    audited: bool = True
    splits: Sequence[str] = ()
    models: Sequence[str] = ()
    instances: Sequence[str] = ()
    repos: Sequence[str] = ()
    labels: Sequence[str] = ()
    not_labels: Sequence[str] = ()
    rate: tuple[float, float] | None = None
    min_episodes: int = 1
    resolved: bool | None = None
    unflagged: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    same: str | None = None
    best: int | None = None
    per_task: int | None = None
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class ChoiceEntry:
    """A choice entry is what is known of an episode while it is chosen. ``facts``: its figures and ``model``; ``path``
    and ``offset``: where its record is; ``said``, ``patch``: digests of what was sampled and of the patch."""

    facts: Line
    path: Path
    offset: int
    said: bytes
    patch: bytes
    sound: bool
    labels: Sequence[Label] = ()

    @property
    def task(self) -> str:
        """Return the task's id."""
        return self.facts["task"]

    @property
    def graded(self) -> bool:
        """Tell whether the verdict says something about the patch: no dry run, no infrastructure failure."""
        return not self.facts["infra"] and self.facts["reason"] != Reason.NOT_GRADED

    @property
    def merit(self) -> tuple[Any, ...]:
        """Return a key by which the best episode of a task comes first."""
        facts = self.facts
        reward = -math.inf if facts["reward"] is None else facts["reward"]
        return -reward, bool(suspicious(facts)), facts["turns"], facts["tokens_sampled"]

    def figure(self, name: str) -> float:
        """Return a figure as a number, NaN if the episode has none. Raises SelectError if there is no such figure."""
        if name not in self.facts or isinstance(self.facts[name], str | list):
            numbers = [key for key, value in self.facts.items() if not isinstance(value, str | list)]
            raise SelectError(f"--range {name}: there is no such figure; {nearest(name, numbers)}".rstrip("; "))
        return math.nan if self.facts[name] is None else float(self.facts[name])

    def record(self) -> Record:
        """Read the record. Raises CorruptRecordError if it has changed."""
        return record_at(self.path, self.offset)


@dataclass
class Choice:
    """A Choice is the episodes that the rules leave, in the order of the sources.

    ``read``: by file, how many records could be read; ``damage``: lines about those that could not; ``taken``: (rule,
    number of episodes that it removed) in order; ``rates``: of the tasks that were measured and that fit ``rate`` and
    ``min_episodes``.
    """

    rules: ChoiceRules
    entries: list[ChoiceEntry] = field(default_factory=list)
    read: dict[Path, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    taken: list[tuple[str, int]] = field(default_factory=list)
    rates: dict[str, ResolveRate] = field(default_factory=dict)

    def records(self) -> Iterator[Record]:
        """Iterate over the records; one is in memory at a time. Raises CorruptRecordError if one has changed."""
        return (entry.record() for entry in self.entries)


def choose(
    runs: Sequence[Path], rules: ChoiceRules, progress: Progress = lambda done, total: None, failed: bool = False
) -> Choice:
    """Read what runs have recorded and apply the rules; only figures are kept in memory.

    progress: called with the bytes of records that were read and those of all. failed: keep the episodes that the
    infrastructure failed. Raises FileNotFoundError and SelectError.
    """
    chosen = Choice(rules)
    readers = [Reader(run.resolve(), damage=chosen.damage) for run in runs]
    sizes = {path: path.stat().st_size for reader in readers for path in reader.files()}
    done, said_of = 0, of_runs(reader.source for reader in readers)
    for reader in readers:
        for path in reader.files():
            chosen.read[path] = 0
            for offset, record in reader.placed(path):
                try:
                    chosen.entries.append(_entry(path, offset, record, rules, said_of.get(record.episode, ())))
                except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    chosen.damage.append(f"{path}, offset {offset}: not the record of an episode ({error!r})")
                chosen.read[path] += 1
                progress(done + offset, sum(sizes.values()))
            done += sizes[path]
        chosen.damage += [f"{t.path}, offset {t.offset}: incomplete, {t.lost} bytes" for t in reader.torn]
    for name, rule in _steps(chosen, rules, failed):
        before = len(chosen.entries)
        chosen.entries = list(rule(chosen.entries))
        chosen.taken.append((name, before - len(chosen.entries)))
    return chosen


def _entry(path: Path, offset: int, record: Record, rules: ChoiceRules, labels: Sequence[Label]) -> ChoiceEntry:
    sound = not rules.audited or not any(True for check in (audit_tokens, audit_heard) for _ in check(record))
    facts = {**line(record), "model": record.model}
    return ChoiceEntry(facts, path, offset, said(record), hashlib.sha256(record.patch).digest(), sound, labels)


def paired(
    entries: Iterable[ChoiceEntry], part: Callable[[ChoiceEntry, ChoiceEntry], Made | None]
) -> Iterator[tuple[ChoiceEntry, ChoiceEntry | None, Made | None]]:
    """Pair each resolved episode with an unresolved one of its task, none of them twice; None for one without a match.

    part: returns what a pair gives, None if the two are no pair.
    """
    tasks: dict[str, tuple[list[ChoiceEntry], list[ChoiceEntry]]] = defaultdict(lambda: ([], []))
    for entry in entries:
        if entry.graded:
            tasks[entry.task][not entry.facts["resolved"]].append(entry)
    for good, bad in tasks.values():
        for better in good if bad else ():
            found = ((worse, made) for worse in bad if (made := part(better, worse)) is not None)
            worse, made = next(found, (None, None))
            if worse is not None:
                bad.remove(worse)
            yield better, worse, made


def said(record: Record) -> bytes:
    """Return a digest of all that the policy sampled: token ids, or, of a hosted model, content without its ids."""
    digest = hashlib.sha256()
    sampled = [node.ids for node in record.nodes if node.logprobs is not None]
    if not sampled:
        replies = [call.reply.get("content", []) for call in record.calls]
        replies = replies or [blocks(event, "assistant") for event in record.events]
        told = [[{k: v for k, v in block.items() if k not in ("id", "signature")} for block in one] for one in replies]
        sampled = [msgspec.json.encode(one, order="sorted") for one in told]
    for one in sampled:
        digest.update(len(one).to_bytes(8, "little") + one)
    return digest.digest()


_Step = Callable[[list[ChoiceEntry]], Iterable[ChoiceEntry]]


def _steps(chosen: Choice, rules: ChoiceRules, failed: bool) -> Iterator[tuple[str, _Step]]:
    """Yield the rules that are on: the name of each, and what it leaves of entries."""

    def only(fits: Callable[[ChoiceEntry], object]) -> _Step:
        return lambda entries: filter(fits, entries)

    yield "there twice", lambda entries: _first(entries, lambda one: one.facts["episode"])
    if rules.audited:
        yield "audit", only(lambda one: one.sound)
    yield "infrastructure failure", only(lambda one: failed or not one.facts["infra"])
    for flag, (name, key) in PATTERNS.items():
        if wanted := getattr(rules, name):
            yield flag, only(lambda one, k=key, w=wanted: any(fnmatch.fnmatchcase(one.facts[k], p) for p in w))
    for flag, patterns, wanted in (("--label", rules.labels, True), ("--no-label", rules.not_labels, False)):
        if patterns:
            yield flag, only(lambda one, p=patterns, w=wanted: _labelled(one, p) is w)
    # The episodes that are left now are those by which tasks are measured.
    low, high = rules.rate or (-math.inf, math.inf)
    chosen.rates = {
        name: rate
        for name, rate in rated((one.task, one.facts["resolved"]) for one in chosen.entries if one.graded).items()
        if low < rate.value < high and rate.episodes >= rules.min_episodes
    }
    if rules.rate or rules.min_episodes > 1:
        yield "--rate, --min-episodes", only(lambda one: one.task in chosen.rates)
    if rules.resolved is not None:
        name = "--resolved" if rules.resolved else "--unresolved"
        yield name, only(lambda one: one.graded and one.facts["resolved"] is rules.resolved)
    if rules.unflagged:
        yield "--no-flags", only(lambda one: not suspicious(one.facts))
    for figure, (least, most) in rules.ranges.items():
        yield f"--range {figure}", only(lambda one, n=figure, a=least, b=most: a <= one.figure(n) <= b)
    if rules.same:
        yield f"--dedup {rules.same}", lambda entries: _first(entries, ALIKE[rules.same or ""])
    lot = functools.partial(_lot, rules.seed)
    if rules.best:
        yield "--best", lambda entries: _few(entries, rules.best, lambda one: (*one.merit, lot(one)))
    if rules.per_task:
        yield "--per-task", lambda entries: _few(entries, rules.per_task, lot)
    if rules.limit:
        yield "--limit", lambda entries: _few(entries, rules.limit, lot, lambda one: "")


def _labelled(entry: ChoiceEntry, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(one.label, pattern) for one in entry.labels for pattern in patterns)


# Options of patterns: the rule, and the figure that must fit one of them.
PATTERNS = {
    "--split": ("splits", "split"),
    "--model": ("models", "model"),
    "--instance-ids": ("instances", "task"),
    "--repo": ("repos", "repo"),
}
# What two episodes have in common if one of them is enough.
ALIKE: dict[str, Callable[[ChoiceEntry], Any]] = {
    "said": lambda one: (one.task, one.patch, one.said),
    "patch": lambda one: (one.task, one.patch),
}


def _first(entries: Iterable[ChoiceEntry], key: Callable[[ChoiceEntry], Any]) -> Iterator[ChoiceEntry]:
    seen = set()
    for one in entries:
        if (found := key(one)) not in seen:
            seen.add(found)
            yield one


def _few(
    entries: Sequence[ChoiceEntry],
    most: int | None,
    order: Callable[[ChoiceEntry], Any],
    group: Callable[[ChoiceEntry], str] = lambda one: one.task,
) -> Iterator[ChoiceEntry]:
    """Yield at most ``most`` entries of each group, the first ones by ``order``, in the order of the entries."""
    groups = defaultdict(list)
    for one in entries:
        groups[group(one)].append(one)
    kept = {id(one) for members in groups.values() for one in sorted(members, key=order)[:most]}
    return (one for one in entries if id(one) in kept)


def _lot(seed: int, entry: ChoiceEntry) -> bytes:
    """Return a key that depends on nothing but seed and episode, so that later additions change no other draw."""
    return hashlib.sha256(f"{seed}:{entry.facts['episode']}".encode()).digest()
