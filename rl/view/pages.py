"""The viewer's pages: a handler takes the library and a request's query, and returns a ``Page``.

A handler reads no file by itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from msgspec.structs import asdict as asdict_of

from rl.data import labels
from rl.evaluate.compare import compare as compared
from rl.metrics.report import summary
from rl.view import render, runs
from rl.view import search as finding
from rl.view.index import IndexEntry
from rl.view.library import EpisodeView, Library, NotFound
from rl.view.render import url
from rl.view.runs import FilterError, RunView
from rl.view.tokens import MOST, improbable, tilted, tokens
from rl.view.turns import Turn
from rollout.figures import suspicious

_PAGE = 200  # rows of a list
_STEPS, _TASKS, _ATTEMPTS = 60, 100, 12
_SIDE = 6  # runs side by side
_FOUND = 60  # episodes that a search shows
_SEARCH_S = 10.0  # after which it shows what it has, and a link to go on


class BadLink(ValueError):
    """A link is not one of ours. The message is one line."""


@dataclass(frozen=True)
class Page:
    """A page is an answer. ``to``: an address to go to instead; ``status``: that of HTTP."""

    body: str = ""
    type: str = "text/html"
    headers: dict[str, str] = field(default_factory=dict)
    to: str = ""
    status: int = 200


Query = dict[str, str]
Handler = Callable[[Library, Query], Page]


def _html(name: str, library: Library, **values: Any) -> Page:
    return Page(render.page(name, library=library, **values))


def _json(value: Any) -> Page:
    return Page(json.dumps(value, ensure_ascii=False, default=repr), "application/json")


def _number(query: Query, key: str, default: int = 0) -> int:
    try:
        number = int(query.get(key, default))
    except ValueError:
        raise BadLink(f"{key}={query[key]}: not a number") from None
    if not 0 <= number < 1 << 31:
        raise BadLink(f"{key}={query[key]}: out of range")
    return number


def _episode(library: Library, query: Query, which: str = "id", run: str = "run") -> EpisodeView:
    return library.episode(query.get(run), query.get(which))


def home(library: Library, query: Query) -> Page:
    """Show the runs."""
    if len(library.runs) == 1:
        return Page(to=url("/run", run=library.runs[0].key))
    return _html("home.html", library, runs=[(run, runs.steps(run.index.entries)[:1]) for run in library.runs])


def run_page(library: Library, query: Query) -> Page:
    """Show a run: curves, steps, rewards, failures, tasks."""
    run = library.run(query.get("run"))
    entries = list(run.index.entries)
    split = query.get("split") or ("train" if any(one.facts["split"] == "train" for one in entries) else "")
    mine = [one for one in entries if not split or one.facts["split"] == split]
    rows = runs.steps(entries)
    last = next((row for row in rows if split in ("", row["split"])), {"step": 0, **dict.fromkeys(runs.MEANS)})
    shown = rows if query.get("steps") == "all" else rows[:_STEPS]
    return _html(
        "run.html", library, run=run, entries=entries, split=split, steps=shown, all_steps=len(rows),
        bins=runs.histogram(mine), figures=last, causes=_causes(entries), tasks=_tasks(mine),
        flags=Counter(flag for one in entries for flag in one.facts["flags"]).most_common(),
        splits=runs.values_of(entries)["split"],
    )  # fmt: skip


def _causes(entries: Sequence[IndexEntry]) -> list[tuple[str, int, bool]]:
    """Return (reason, episodes, whether it is the infrastructure's) of what was not resolved."""
    found = Counter((one.facts["reason"], one.facts["infra"]) for one in entries if one.facts["reason"])
    return [(reason, count, infra) for (reason, infra), count in found.most_common()]


def _graded(entries: Sequence[IndexEntry]) -> dict[str, list[IndexEntry]]:
    """Return the graded episodes by task."""
    return runs.grouped((one for one in entries if not one.facts["infra"]), lambda one: one.facts["task"])


def _tasks(entries: Sequence[IndexEntry]) -> list[dict[str, Any]]:
    """Return a row per task, those with most attempts first; among equals, those whose rate is nearest to one half."""
    rows: list[dict[str, Any]] = []
    for task, members in _graded(entries).items():
        resolved = sum(one.facts["resolved"] for one in members)
        row: dict[str, Any] = {"task": task, "repo": members[0].facts["repo"], "episodes": len(members)}
        row |= {"resolved": resolved / len(members), "last": members[-1].facts["step"]}
        rows.append(row | {"flagged": sum(bool(suspicious(one.facts)) for one in members)})
    return sorted(rows, key=lambda one: (-one["episodes"], abs(one["resolved"] - 0.5), one["task"]))[:_TASKS]


def curves_json(library: Library, query: Query) -> Page:
    """Return the curves of a run, or of several to compare."""
    named = {"run": library.runs[0].key, **query}
    return _json(runs.curves({run.key: run.metrics() for run in _runs(library, named)}))


def _runs(library: Library, query: Query) -> list[RunView]:
    """Return the runs that a link names, one per line of ``run``, or as ``a`` and ``b``."""
    named = query["run"].split("\n") if "run" in query else [query[key] for key in ("a", "b") if key in query]
    return [library.run(name) for name in dict.fromkeys(named)][:_SIDE] or library.runs[:_SIDE]


def state_json(library: Library, query: Query) -> Page:
    """Return how far a run is, for pages that follow it."""
    run = library.run(query.get("run"))
    told = run.dir / "metrics.jsonl"
    size = told.stat().st_size if told.exists() else 0  # grows with each step
    share = run.index.share
    return _json({"episodes": len(run.index.entries), "steps": size, "phase": run.phase, "read": share})


def episodes(library: Library, query: Query) -> Page:
    """List episodes by filters."""
    run = library.run(query.get("run"))
    entries = list(run.index.entries)
    found = runs.chosen(entries, query, run.masked)
    start = _number(query, "from")
    asked = {key: value for key, value in query.items() if key != "from" and value}
    shown = found[start : start + _PAGE]
    return _html(
        "episodes.html", library, run=run, found=len(found), shown=shown, start=start, size=_PAGE, asked=asked,
        total=len(entries), values=runs.values_of(entries),
    )  # fmt: skip


def task(library: Library, query: Query) -> Page:
    """Show a task: one group side by side, the statement, patches, hidden tests, and all other attempts."""
    run, name = library.run(query.get("run")), query.get("id", "")
    attempts = run.attempts(name)
    if not attempts:
        raise NotFound(f"{run.name} has no episode of task {name}")
    last = attempts[-1].facts
    split, step = query.get("split", last["split"]), _number(query, "step", last["step"])
    members = runs.group(attempts, name, split, step)
    if not members:
        raise NotFound(f"{run.name} has no episode of task {name} at step {step} ({split})")
    shown = [library.episode(query.get("run"), one.name) for one in members[:_ATTEMPTS]]
    steps = runs.by_step(attempts).items()
    groups = [(*at, len(lines), sum(one["resolved"] for one in lines)) for at, lines in steps]
    told = {one.entry.name: one.trained for one in shown}
    computed = runs.advantages(members, runs.by_deviation(run), run.masked)
    exact = {n: next(iter(t.advantages.values())) for n, t in told.items() if t and t.advantages}
    return _html(
        "task.html", library, run=run, task=name, split=split, step=step, members=members, shown=shown,
        advantages=computed | exact, exact=exact, by_deviation=runs.by_deviation(run), row=run.task(name),
        tests=runs.hidden_tests({one.entry.name: one.record.verdict for one in shown}),
        nothing=runs.taught_nothing(members, run.masked), beside=_counterparts(library, shown[0]),
        groups=sorted(groups, key=lambda one: -one[1]),
        others=[(one, found) for one in library.runs if one is not run and (found := one.attempts(name))],
    )  # fmt: skip


def episode(library: Library, query: Query) -> Page:
    """Show an episode as a person reads it."""
    one = _episode(library, query)
    before, after = _beside(one)
    return _html(
        "episode.html", library, run=one.run, one=one, before=before, after=after, tests=_tests(one),
        beside=_counterparts(library, one), labels=one.run.labels.read().get(one.entry.name, []),
    )  # fmt: skip


def label(library: Library, query: Query) -> Page:
    """Write what somebody says of an episode or a turn, and return all that is said of it."""
    one = _episode(library, query)
    what, comment = (query.get(key, "").strip() for key in ("label", "comment"))
    try:
        labels.say(one.run.dir, labels.Label(one.entry.name, what, comment, _number(query, "turn"), library.who))
    except (ValueError, OSError) as error:
        raise BadLink(str(error)) from None
    return _json([asdict_of(said) for said in one.run.labels.read().get(one.entry.name, [])])


def _counterparts(library: Library, one: EpisodeView) -> list[tuple[str, str]]:
    """Return what an episode can be put beside: its task at its run's first and last step, and last in other runs."""
    facts, found = one.entry.facts, list[tuple[str, RunView, IndexEntry]]()
    for run in library.runs[:_SIDE]:
        mine = run.attempts(facts["task"])
        if run is one.run:
            same = sorted((o for o in mine if o.facts["split"] == facts["split"]), key=lambda o: o.facts["step"])
            ends = {other.facts["step"]: other for other in (*same[:1], *same[-1:])}
            found += [(f"step {step}", run, other) for step, other in ends.items() if step != facts["step"]]
        else:
            found += [(f"{run.key}, step {other.facts['step']}", run, other) for other in mine[-1:]]
    here = {"b": one.entry.name, "brun": one.run.key}
    return [(label, url("/compare", a=other.name, arun=run.key, **here)) for label, run, other in found]


def _tests(one: EpisodeView) -> list[runs.HiddenTest]:
    return runs.hidden_tests({"result": one.record.verdict})


def _beside(one: EpisodeView) -> tuple[IndexEntry | None, IndexEntry | None]:
    members = one.group
    at = next((n for n, member in enumerate(members) if member.name == one.entry.name), 0)
    return members[at - 1] if at else None, members[at + 1] if at + 1 < len(members) else None


def export(library: Library, query: Query) -> Page:
    """Return an episode as one HTML file that needs nothing else."""
    one = _episode(library, query)
    body = render.page("export.html", run=one.run, one=one, tests=_tests(one))
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in one.entry.name)
    return Page(body, headers={"Content-Disposition": f'attachment; filename="{name}.html"'})


def token_page(library: Library, query: Query) -> Page:
    """Show an episode's tokens inside of its tree."""
    one = _episode(library, query)

    def inside(node: int) -> str:
        return strip(library, {**query, "node": str(node)}).body

    return _html(
        "tokens.html", library, run=one.run, one=one, tree=one.tree, strip=inside,
        low=improbable(one.record, one.words), tilted=tilted(one.record, one.words, one.trained),
        turns={turn.node: turn for turn in one.reading.turns},
    )  # fmt: skip


def _node(library: Library, query: Query) -> tuple[EpisodeView, int]:
    one, node = _episode(library, query), _number(query, "node")
    if node >= len(one.record.nodes):
        raise NotFound(f"the episode has no node {node}")
    return one, node


def strip(library: Library, query: Query) -> Page:
    """Return some tokens of a node, for the token page."""
    one, node = _node(library, query)
    start = _number(query, "from") // MOST * MOST
    shown = tokens(one.record, node, one.words, one.trained, start)
    length = one.record.nodes[node].length
    return _html("strip.html", library, node=node, shown=shown, start=start, size=MOST, length=length)


def context(library: Library, query: Query) -> Page:
    """Return what a node says, as a part of a page."""
    one, node = _node(library, query)
    return _html("context.html", library, one=one, run=one.run, node=node, text=one.texts.of(node))


def raw(library: Library, query: Query) -> Page:
    """Return one text of an episode whole, as plain text."""
    one, what = _episode(library, query), query.get("what", "")
    wanted = _number(query, "turn"), what, _number(query, "part")
    text = next((text for turn, *which, text in one.reading.texts() if (turn.number, *which) == wanted), None)
    if text is None:
        raise NotFound(f"turn {wanted[0]} has no text {what} {wanted[2]}")
    return Page(text, "text/plain")


def _turn(one: EpisodeView, query: Query) -> Turn:
    number = _number(query, "turn")
    if not 0 < number <= len(one.reading.turns):
        raise NotFound(f"the episode has no turn {number}")
    return one.reading.turns[number - 1]


def find_json(library: Library, query: Query) -> Page:
    """Find a text in an episode."""
    one, wanted = _episode(library, query), query.get("q", "")
    hits, count = finding.find(one.reading, one.texts, wanted) if wanted else ([], 0)
    return _json({"count": count, "hits": [asdict(hit) for hit in hits]})


def episode_json(library: Library, query: Query) -> Page:
    """Return an episode, or one of its turns, as JSON."""
    one = _episode(library, query)
    if "turn" in query:
        return Page(render.plain(asdict(_turn(one, query))), "application/json")
    record = one.record
    told = {
        "figures": one.entry.facts,
        "verdict": record.verdict,
        "agent": record.agent,
        "timing": record.timing,
        "patch": record.patch.decode("utf-8", "replace"),
        "findings": one.reading.findings,
        "turns": [asdict(turn) for turn in one.reading.main],
    }
    return Page(render.plain(told), "application/json")


def compare(library: Library, query: Query) -> Page:
    """Show two episodes side by side."""
    left = _episode(library, query, "a", "arun")
    right = _episode(library, query, "b", "brun")
    pairs = list(zip_longest(left.reading.main, right.reading.main))
    parts = next((n for n, (a, b) in enumerate(pairs) if not _alike(a, b)), None)
    tests = runs.hidden_tests({f"{n} {one.entry.name}": one.record.verdict for n, one in (("a", left), ("b", right))})
    return _html("compare.html", library, left=left, right=right, pairs=pairs, parts=parts, tests=tests)


def _alike(left: Turn | None, right: Turn | None) -> bool:
    def said(turn: Turn | None) -> Any:
        return turn and [(part.kind, part.text, part.name, part.arguments) for part in turn.parts]

    return said(left) == said(right)


def compare_runs(library: Library, query: Query) -> Page:
    """Show runs side by side, the first being what the others are compared with: resolve rates with intervals, tasks
    that changed, curves, figures."""
    shown = _runs(library, query)
    sums = [dict(summary(run.metrics())) for run in shown]
    names = list(dict.fromkeys(name for one in sums for name in one))
    results = [_results(run.index.entries) for run in shown]
    named = [{"name": run.key, "by_task": one} for run, one in zip(shown, results, strict=True)]
    found = [compared(named[0], one, common=True) if results[0].keys() & one["by_task"] else None for one in named]
    tasks = [task for task in results[0] if all(task in one for one in results)]
    table = [(task, [one[task] for one in results]) for task in tasks]
    rate = [{task: row["resolved"] / row["episodes"] for task, row in one.items()} for one in results]
    table.sort(key=lambda one: (-max(abs(of[one[0]] - rate[0][one[0]]) for of in rate), one[0]))
    return _html(
        "compare_runs.html", library, runs=shown, found=found, table=table[:_TASKS], tasks=len(table),
        changed=sum(len({of[task] for of in rate}) > 1 for task, _ in table),
        rows=[(name, [one.get(name, "") for one in sums]) for name in names],
        curves=any(len(run.metrics()) > 1 for run in shown),
    )  # fmt: skip


def _results(entries: Sequence[IndexEntry]) -> dict[str, dict[str, Any]]:
    """Return, by task, the graded episodes of the run's held-out split if it has one, else of all splits."""
    mine = [one for one in entries if one.facts["split"] == "val"] or entries
    made: dict[str, dict[str, Any]] = {}
    for task, found in _graded(mine).items():
        resolved = sum(one.facts["resolved"] for one in found)
        made[task] = {"row": "", "episodes": len(found), "resolved": resolved, "last": found[-1].name}
    return made


def search(library: Library, query: Query) -> Page:
    """Search the text of all episodes of one run after the other, the newest first."""
    wanted, only, start = query.get("q", ""), query.get("run", ""), _number(query, "from")
    found: list[tuple[RunView, IndexEntry]] = []
    looked = total = 0
    asked, end = finding.Query(wanted, library.words), time.monotonic() + _SEARCH_S
    for run in [library.run(only)] if only else library.runs:
        entries = list(run.index.entries)[::-1]
        rest = entries[max(0, start - total) :]
        total += len(entries)
        for entry in run.index.having(rest, asked) if wanted else ():
            if len(found) >= _FOUND or time.monotonic() > end:
                break
            looked += 1
            if entry is not None:
                found.append((run, entry))
    return _html("search.html", library, q=wanted, only=only, found=found, start=start, looked=looked, total=total)


PAGES: dict[str, Handler] = {
    "/": home, "/run": run_page, "/curves.json": curves_json, "/state.json": state_json, "/episodes": episodes,
    "/task": task, "/episode": episode, "/export": export, "/tokens": token_page, "/strip": strip, "/context": context,
    "/raw": raw, "/find.json": find_json, "/episode.json": episode_json, "/compare": compare,
    "/compare_runs": compare_runs, "/search": search,
}  # fmt: skip


def answer(library: Library, path: str, query: Query) -> Page:
    """Return a page by its path in ``PAGES``, or the page that says what is wrong with the link."""
    try:
        return PAGES[path](library, query)
    except (NotFound, FilterError, BadLink) as error:
        status = 404 if isinstance(error, NotFound) else 400
        return Page(render.page("problem.html", library=library, text=str(error)), status=status)


# What is written, beside a run; only with a name.
WRITES: dict[str, Handler] = {"/label": label}
