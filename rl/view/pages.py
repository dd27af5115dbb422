"""This module makes the pages. A handler takes the library and a request's query, and returns a ``Page``; it reads no
file by itself."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl.report import summary
from rl.view import finding, render
from rl.view.index import Entry
from rl.view.library import Episode, Library, NotFound
from rl.view.reading import Part, Turn
from rl.view.render import url
from rl.view.runs import (
    HiddenTest,
    Run,
    advantages,
    by_deviation,
    chosen,
    curves,
    group,
    hidden_tests,
    histogram,
    steps,
    values_of,
)  # fmt: skip
from rl.view.tokens import MOST, improbable, tilted, tokens

_PAGE = 200  # rows of a list
_STEPS, _TASKS, _ATTEMPTS = 60, 100, 12
_FOUND = 60  # episodes that a search shows
_SEARCH_S = 10.0  # after which it shows what it has, and a link to go on


class BadLink(ValueError):
    """A link is not one of ours. The message is one line."""


@dataclass(frozen=True)
class Page:
    """A page is an answer. ``to``: an address to go to instead."""

    body: str | bytes = ""
    type: str = "text/html"
    headers: dict[str, str] = field(default_factory=dict)
    to: str = ""


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


def _episode(library: Library, query: Query, which: str = "id", run: str = "run") -> Episode:
    return library.episode(query.get(run), query.get(which))


def problem(library: Library, text: str) -> Page:
    """Return the page that says what is wrong with a link."""
    return _html("problem.html", library, text=text)


def home(library: Library, query: Query) -> Page:
    """Show the runs."""
    if len(library.runs) == 1:
        return Page(to=url("/run", run=0))
    return _html("home.html", library, runs=[(run, steps(run.index.entries)[:1]) for run in library.runs])


def run_page(library: Library, query: Query) -> Page:
    """Show a run: curves, steps, rewards, failures, tasks."""
    run = library.run(query.get("run"))
    entries = list(run.index.entries)
    split = query.get("split") or ("train" if any(one.facts["split"] == "train" for one in entries) else "")
    mine = [one for one in entries if not split or one.facts["split"] == split]
    rows = steps(entries)
    shown = rows if query.get("steps") == "all" else rows[:_STEPS]
    return _html(
        "run.html", library, run=run, entries=entries, split=split, steps=shown, all_steps=len(rows),
        bins=histogram(mine), figures=_figures(run, mine), causes=_causes(entries), tasks=_tasks(mine),
        flags=Counter(flag for one in entries for flag in one.facts["flags"]).most_common(),
        splits=values_of(entries)["split"],
    )  # fmt: skip


def _figures(run: Run, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the figures at the head of a run: over its last step."""
    last = max((one.facts["step"] for one in entries), default=0)
    lines = [one.facts for one in entries if one.facts["step"] == last and not one.facts["infra"]]

    def mean(key: str) -> float | None:
        values = [float(one[key]) for one in lines if one[key] is not None]
        return statistics.fmean(values) if values else None

    means = {key: mean(key) for key in ("resolved", "reward", "turns", "tokens_sampled")}
    return {"last": last, "count": len(lines), **means}


def _causes(entries: Sequence[Entry]) -> list[tuple[str, int, bool]]:
    """Return (reason, episodes, whether it is the infrastructure's) of what was not resolved."""
    found = Counter((one.facts["reason"], one.facts["infra"]) for one in entries if one.facts["reason"])
    return [(reason, count, infra) for (reason, infra), count in found.most_common()]


def _tasks(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return a row per task, those with most attempts first; among equals, those whose rate is nearest to one half."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for one in entries:
        if not one.facts["infra"]:
            found[one.facts["task"]].append(one)
    rows: list[dict[str, Any]] = []
    for task, members in found.items():
        resolved = sum(one.facts["resolved"] for one in members)
        row: dict[str, Any] = {"task": task, "repo": members[0].facts["repo"], "episodes": len(members)}
        row |= {"resolved": resolved / len(members), "last": members[-1].facts["step"]}
        rows.append(row | {"flagged": sum(bool(one.facts["flags"]) for one in members)})
    return sorted(rows, key=lambda one: (-one["episodes"], abs(one["resolved"] - 0.5), one["task"]))[:_TASKS]


def curves_json(library: Library, query: Query) -> Page:
    """Return the curves of a run, or of two to compare."""
    runs = [library.run(number) for number in query.get("run", "0").split(",")[:4]]
    names = {f"{run.number + 1} {run.name}" if len(runs) > 1 else run.name: run.metrics() for run in runs}
    return _json(curves(names))


def state_json(library: Library, query: Query) -> Page:
    """Return how far a run is, for pages that follow it."""
    run = library.run(query.get("run"))
    told = run.dir / "metrics.jsonl"
    size = told.stat().st_size if told.exists() else 0  # grows with each step
    share = run.index.state.share
    return _json({"episodes": len(run.index.entries), "steps": size, "phase": run.phase, "read": share})


def episodes(library: Library, query: Query) -> Page:
    """List episodes by filters."""
    run = library.run(query.get("run"))
    entries = list(run.index.entries)
    found = chosen(entries, query)
    start = _number(query, "from")
    asked = {key: value for key, value in query.items() if key != "from" and value}
    shown = found[start : start + _PAGE]
    return _html(
        "episodes.html", library, run=run, found=len(found), shown=shown, start=start, size=_PAGE, asked=asked,
        total=len(entries), values=values_of(entries),
    )  # fmt: skip


def task(library: Library, query: Query) -> Page:
    """Show a task: one group side by side, the statement, patches, hidden tests, and all other attempts."""
    run, name = library.run(query.get("run")), query.get("id", "")
    attempts = [one for one in run.index.entries if one.facts["task"] == name]
    if not attempts:
        raise NotFound(f"{run.name} has no episode of task {name}")
    last = attempts[-1].facts
    split, step = query.get("split", last["split"]), _number(query, "step", last["step"])
    members = group(attempts, name, split, step)
    if not members:
        raise NotFound(f"{run.name} has no episode of task {name} at step {step} ({split})")
    shown = [library.episode(query.get("run"), one.name) for one in members[:_ATTEMPTS]]
    groups = Counter((one.facts["split"], one.facts["step"]) for one in attempts)
    resolved = Counter((one.facts["split"], one.facts["step"]) for one in attempts if one.facts["resolved"])
    others = [
        (other, [one for one in other.index.entries if one.facts["task"] == name])
        for other in library.runs
        if other is not run
    ]
    told = {one.entry.name: one.trained for one in shown}
    computed = advantages(members, by_deviation(run))
    exact = {n: next(iter(t.advantages.values())) for n, t in told.items() if t and t.advantages}
    return _html(
        "task.html", library, run=run, task=name, split=split, step=step, members=members, shown=shown,
        advantages=computed | exact, exact=exact, by_deviation=by_deviation(run), row=run.task(name),
        tests=hidden_tests({one.entry.name: one.record.verdict for one in shown}),
        groups=[(*key, count, resolved[key]) for key, count in sorted(groups.items(), key=lambda one: -one[0][1])],
        others=[(other, found) for other, found in others if found],
    )  # fmt: skip


def episode(library: Library, query: Query) -> Page:
    """Show an episode as a person reads it."""
    one = _episode(library, query)
    before, after = _beside(one)
    return _html("episode.html", library, run=one.run, one=one, before=before, after=after, tests=_tests(one))


def _tests(one: Episode) -> list[HiddenTest]:
    return hidden_tests({"result": one.record.verdict})


def _beside(one: Episode) -> tuple[Entry | None, Entry | None]:
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
    return _html(
        "tokens.html", library, run=one.run, one=one, tree=one.tree, low=improbable(one.record, one.words),
        tilted=tilted(one.record, one.words, one.trained), turns={turn.node: turn for turn in one.reading.turns},
    )  # fmt: skip


def strip(library: Library, query: Query) -> Page:
    """Return some tokens of a node, for the token page."""
    one, node = _episode(library, query), _number(query, "node")
    if node >= len(one.record.nodes):
        raise NotFound(f"the episode has no node {node}")
    start = _number(query, "from") // MOST * MOST
    shown = tokens(one.record, node, one.words, one.trained, start)
    length = one.record.nodes[node].length
    return _html("strip.html", library, node=node, shown=shown, start=start, size=MOST, length=length)


def context(library: Library, query: Query) -> Page:
    """Return what a node says, as a part of a page."""
    one, node = _episode(library, query), _number(query, "node")
    if node >= len(one.record.nodes):
        raise NotFound(f"the episode has no node {node}")
    return _html("context.html", library, one=one, run=one.run, node=node, text=one.texts.of(node))


def raw(library: Library, query: Query) -> Page:
    """Return one text of an episode whole, as plain text."""
    one, what = _episode(library, query), query.get("what", "")
    if what == "patch":
        return Page(one.record.patch, "text/plain")
    if what == "log":
        return Page(str(one.record.verdict.get("log_tail", "")), "text/plain")
    turn = _turn(one, query)
    part = _part(turn, query) if turn.parts else None
    texts: dict[str, Callable[[], str]] = {
        "sampled": lambda: turn.sampled,
        "told": lambda: "\n\n".join(turn.told),
        "asked": lambda: "\n\n".join(text for _, text in turn.asked),
        "result": lambda: part.result.text if part and part.result else "",
        "call": lambda: json.dumps(part.arguments, indent=1, ensure_ascii=False) if part else "",
        "text": lambda: part.text if part else "",
        "thinking": lambda: part.text if part else "",
    }
    if what not in texts:
        raise BadLink(f"what={what}: there is no such text")
    return Page(texts[what](), "text/plain")


def _turn(one: Episode, query: Query) -> Turn:
    number = _number(query, "turn")
    if not 0 < number <= len(one.reading.turns):
        raise NotFound(f"the episode has no turn {number}")
    return one.reading.turns[number - 1]


def _part(turn: Turn, query: Query) -> Part:
    number = _number(query, "part")
    if number >= len(turn.parts):
        raise NotFound(f"turn {turn.number} has no part {number}")
    return turn.parts[number]


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
    pairs = _aligned(left.reading.main, right.reading.main)
    parts = next((n for n, (a, b) in enumerate(pairs) if not _alike(a, b)), None)
    tests = hidden_tests({f"{n} {one.entry.name}": one.record.verdict for n, one in (("a", left), ("b", right))})
    return _html("compare.html", library, left=left, right=right, pairs=pairs, parts=parts, tests=tests)


def _aligned(left: list[Turn], right: list[Turn]) -> list[tuple[Turn | None, Turn | None]]:
    length = max(len(left), len(right))
    return [(left[n] if n < len(left) else None, right[n] if n < len(right) else None) for n in range(length)]


def _alike(left: Turn | None, right: Turn | None) -> bool:
    def said(turn: Turn | None) -> Any:
        return turn and [(part.kind, part.text, part.name, part.arguments) for part in turn.parts]

    return said(left) == said(right)


def compare_runs(library: Library, query: Query) -> Page:
    """Show two runs side by side: curves, figures, and the tasks that both have played."""
    left, right = library.run(query.get("a", "0")), library.run(query.get("b", "1"))
    sums = [dict(summary(run.metrics())) for run in (left, right)]
    names = list(dict.fromkeys(name for one in sums for name in one))
    rates = [{row["task"]: row for row in _tasks(run.index.entries)} for run in (left, right)]
    both = [(task, rates[0][task], rates[1][task]) for task in rates[0] if task in rates[1]]
    both.sort(key=lambda one: -abs(one[1]["resolved"] - one[2]["resolved"]))
    return _html(
        "compare_runs.html", library, left=left, right=right, both=both,
        rows=[(name, sums[0].get(name, ""), sums[1].get(name, "")) for name in names],
    )  # fmt: skip


def search(library: Library, query: Query) -> Page:
    """Search the text of all episodes of one run after the other, the newest first."""
    wanted, only, start = query.get("q", ""), query.get("run", ""), _number(query, "from")
    found: list[tuple[Run, Entry]] = []
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
    return _html(
        "search.html", library, q=wanted, only=only, found=found, start=start, looked=looked, total=total,
    )  # fmt: skip


PAGES: dict[str, Handler] = {
    "/": home, "/run": run_page, "/curves.json": curves_json, "/state.json": state_json, "/episodes": episodes,
    "/task": task, "/episode": episode, "/export": export, "/tokens": token_page, "/strip": strip, "/context": context,
    "/raw": raw, "/find.json": find_json, "/episode.json": episode_json, "/compare": compare,
    "/compare_runs": compare_runs, "/search": search,
}  # fmt: skip
