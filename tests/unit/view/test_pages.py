"""This module tests the pages over HTTP: what they show, what they refuse, and that nothing of an episode becomes a
part of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import msgspec
import pytest

from rl.run import phases
from rl.view import pages, render
from rl.view.index import Index
from rl.view.library import Library, NotFound
from rl.view.runs import FilterError, RunView, advantages, chosen, histogram
from rl.view.terminal import fitting
from rl.view.texts import compared
from tests.export_kit import lines, repair, write
from tests.view_kit import HOSTILE, hostile, named, run, served, tokenizer

WRONG = {
    "/run?run=7": 404,
    "/episode?id=no": 404,
    "/episodes?turns=x": 400,
    "/nothing": 404,
    "/static/../pages.py": 404,
    "/strip?id=train-1-fix-0&node=99": 404,
}


@pytest.fixture
async def library(tmp_path: Path) -> Library:
    made = Library([await run(tmp_path / "one"), await hostile(tmp_path / "two", 1000)], None)
    made.refresh()
    return made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def text(page: pages.Page) -> str:
    return page.body if isinstance(page.body, str) else page.body.decode()


def queries(library: Library) -> list[tuple[str, dict[str, str]]]:
    """Every page that there is for a run."""
    out: list[tuple[str, dict[str, str]]] = [("/", {}), ("/search", {"q": "script"})]
    out.append(("/compare_runs", {"run": "\n".join(one.key for one in library.runs)}))
    for made in library.runs:
        number = {"run": made.key}
        out += [("/run", number), ("/episodes", number), ("/curves.json", number), ("/state.json", number)]
        for entry in made.index.entries:
            one = {**number, "id": entry.name}
            out += [(path, one) for path in ("/episode", "/tokens", "/export", "/episode.json")]
            out += [("/task", {**number, "id": entry.facts["task"]}), ("/find.json", {**one, "q": "e"})]
            out += [("/compare", {"a": entry.name, "arun": number["run"], "b": "train-1-fix-0"})]
            nodes = library.episode(number["run"], entry.name).record.nodes
            out += [(path, {**one, "node": str(n)}) for path in ("/strip", "/context") for n in range(len(nodes))]
    return out


class Strict(HTMLParser):
    """Refuses all that only an episode could have brought in."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("img", "iframe", "object", "base"), tag
        names = dict(attrs)
        assert not any(name.startswith("on") or name == "style" for name in names), attrs
        if tag == "script":
            assert (names.get("src") or "").startswith("/static/"), attrs
        for name in ("href", "src", "action"):
            value = names.get(name)
            assert value is None or value.startswith(("/", "#")), attrs


def test_no_page_has_anything_of_an_episode_but_text(library: Library) -> None:
    for path, query in queries(library):
        page = pages.PAGES[path](library, query)
        if page.type == "text/html":
            Strict().feed(text(page))
            assert "<script>" not in text(page) and "\x1b" not in text(page) and "\u202e" not in text(page), path
            if path == "/episode" and query["run"] == library.runs[1].key:
                assert "{{ 7 * 7 }}" in text(page)


async def test_answers_forbid_everything_but_our_own_files(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with served(await run(tmp_path)) as address:
        async with session.get(f"{address}/run") as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for path, status in WRONG.items():
            async with session.get(address + path) as answer:
                assert answer.status == status, path
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with session.post(f"{address}/run") as answer:
            assert answer.status == 405
        async with session.get(f"{address}/run", headers={"Host": "evil.example:80"}) as answer:
            assert answer.status == 403


async def test_elsewhere_a_token_is_needed(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with served(await run(tmp_path), token="right") as address:
        for query in ("", "?token=wrong", "?token="):
            async with session.get(f"{address}/{query}") as answer:
                assert answer.status == 403
        async with session.get(f"{address}/static/view.css") as answer:
            assert answer.status == 403
        async with session.get(f"{address}/run?token=right", allow_redirects=False) as answer:
            assert answer.status == 302 and answer.headers["Location"] == "/run"
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        headers = {"Cookie": cookie.partition(";")[0], "Host": "node7.example:80"}
        async with session.get(f"{address}/run", headers=headers) as answer:
            assert answer.status == 200


async def test_a_run_is_followed_while_it_is_written(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    whole, growing = await run(tmp_path / "whole"), tmp_path / "growing"
    (growing / "episodes").mkdir(parents=True)
    (record,) = (whole / "episodes").iterdir()
    data = record.read_bytes()
    (growing / "episodes" / "w.cep").write_bytes(data[: len(data) // 2])
    async with served(growing) as address:

        async def episodes() -> int:
            async with session.get(f"{address}/state.json") as answer:
                return (await answer.json())["episodes"]

        assert 0 < await episodes() < 7
        (growing / "episodes" / "w.cep").write_bytes(data)
        async with asyncio.timeout(20):
            while await episodes() != 7:
                await asyncio.sleep(0.05)


def test_filters_and_orders(library: Library) -> None:
    entries = library.runs[0].index.entries

    def names(**query: str) -> list[str]:
        return [entry.name for entry in chosen(entries, query)]

    assert names() == [entry.name for entry in entries][::-1]
    assert names(verdict="infra") == ["train-1-lost-0"]
    assert set(names(verdict="unresolved")) == {"train-1-fix-1", "train-1-crowd-1"}
    assert names(flag="touches_tests") == names(flag="any") == ["train-1-fix-1"]
    assert names(step="2") == ["train-2-fix-0"] and set(names(step="2:")) == {"train-2-fix-0"}
    assert "train-2-fix-0" not in names(step=":1", split="train")
    assert names(reward="0.9:", sort="task", task="crowd") == ["train-1-crowd-0"]
    rewards = [entry.facts["reward"] for entry in chosen(entries, {"sort": "-reward"})]
    assert rewards == [1.0] * 4 + [0.0] * 2 + [None]
    assert names(audit="findings") == [] and len(names(audit="sound")) == 7
    assert names(q="CROWD-1") == ["train-1-crowd-1"]
    with pytest.raises(FilterError, match="turns=many"):
        names(turns="many")


def test_a_task_shows_its_group_with_advantages_and_what_differs(library: Library) -> None:
    page = text(pages.PAGES["/task"](library, {"id": "fix", "step": "1", "split": "train"}))
    assert page.count('class="card ') == 3
    assert "+0.500" in page and "\u2212" in page  # the trainer's own, and the other one's
    assert "test_a" in page and "differs" in page and "tests/x.py" in page and "touches_tests" in page
    computed = advantages(library.runs[0].index.entries[2:4], True)
    assert [round(value, 3) for value in computed.values()] == [0.707, -0.707]
    assert advantages(library.runs[0].index.entries[:1], True) == {}


async def test_an_episode_that_a_limit_ended_is_masked_on_all_of_its_pages(tmp_path: Path) -> None:
    record = msgspec.structs.replace(await repair("e"), overlong=True)
    trained = '<span class="chip trained">sampled, mask 1</span>'
    for masked in (False, True):
        directory = write(tmp_path / str(masked), named(record, "e", tokenizer(tmp_path / "policy")))
        (directory / "config.yaml").write_text(f"episode: {{mask_overlong: {str(masked).lower()}}}\n")
        library = Library([directory], None)
        library.refresh()
        page = text(pages.token_page(library, {"id": "e"}))
        assert ("Not trained: a limit ended the episode" in page) is masked
        assert (trained in page) is not masked
        assert ('<rect class="trained"' in page) is not masked  # the map
        assert ('<section class="node trained"' in page) is not masked  # what the token's own box reads


def test_two_episodes_part_where_they_say_something_else(library: Library) -> None:
    query = {"a": "train-1-fix-0", "b": "train-1-fix-1"}
    page = text(pages.PAGES["/compare"](library, query))
    assert "They say the same in the first 1 turn;" in page and 'id="bt2"' in page
    assert "They say the same in every turn" in text(pages.PAGES["/compare"](library, {**query, "b": "train-1-fix-0"}))


def test_an_export_stands_alone(library: Library) -> None:
    page = pages.PAGES["/export"](library, {"id": "train-1-crowd-0"})
    body = text(page)
    assert "attachment" in page.headers["Content-Disposition"]
    assert "/static/" not in body and "<script" not in body and "http" not in body.replace("http-equiv", "")
    assert "sha256-" in body and "I found it." in body and "Sub-agent" in body
    hostile_one = library.runs[1].index.entries[0].name
    exported = text(pages.PAGES["/export"](library, {"run": library.runs[1].key, "id": hostile_one}))
    Strict().feed(exported.partition("</style>")[2])


def test_what_is_copied_is_what_was_recorded(library: Library) -> None:
    told = json.loads(text(pages.PAGES["/episode.json"](library, {"id": "train-1-fix-1"})))
    assert told["verdict"]["flags"] == ["touches_tests"] and told["figures"]["reward"] == 0.0
    turn = json.loads(text(pages.PAGES["/episode.json"](library, {"id": "train-1-fix-1", "turn": "1"})))
    assert turn["parts"][2]["result"]["text"] == "total 0"
    raw = pages.PAGES["/raw"](library, {"id": "train-1-fix-1", "turn": "1", "part": "2", "what": "result"})
    assert raw.type == "text/plain" and text(raw) == "total 0"
    of = library.runs[1]
    harmful = {"run": of.key, "id": of.index.entries[0].name, "turn": "1", "part": "1", "what": "result"}
    whole = pages.PAGES["/raw"](library, harmful)
    assert text(whole).startswith(HOSTILE[:20]) and len(text(whole)) > 1000
    with pytest.raises(NotFound):
        pages.PAGES["/raw"](library, {"id": "train-1-fix-1", "turn": "99", "what": "text"})


def test_curves_of_a_run_and_of_two(library: Library) -> None:
    panels = {one["title"]: one for one in json.loads(text(pages.PAGES["/curves.json"](library, {})))}
    assert panels["Resolve rate"]["steps"] == [1, 2]
    assert panels["Resolve rate"]["series"] == [{"label": "training", "values": [0.5, 1.0]}]
    assert panels["Where a step's time goes"]["stacked"]
    named = {"run": "\n".join(one.key for one in library.runs)}
    both = {one["title"]: one for one in json.loads(text(pages.PAGES["/curves.json"](library, named)))}
    assert len(both["Reward"]["series"]) == 2 and not both["Where a step's time goes"]["stacked"]


def evaluated(place: Path, name: str, resolved: list[bool]) -> Path:
    made = []
    for number, good in enumerate(resolved):
        record = asyncio.run(repair(f"eval-{number}", reward=float(good)))
        made.append(msgspec.structs.replace(record, split="eval", task=f"t{number}"))
    return write(place / name, *made)


def test_evaluations_side_by_side_have_intervals_and_the_tasks_that_changed(tmp_path: Path) -> None:
    results = {"before": [False] * 9 + [True], "after": [True] * 7 + [False] * 2 + [True], "other": [False] * 10}
    made = Library([evaluated(tmp_path, name, found) for name, found in results.items()], None)
    made.refresh()
    page = text(pages.compare_runs(made, {}))
    assert "McNemar, exact" in page and "0.0156" in page and "8 of 10 differ" in page
    assert ">10.0 % <" in page and ">80.0 % <" in page and "+70.0 %" in page
    first = page.index("/compare?a=eval-0")
    assert first < page.index(">t8<") and "training" not in page and "data-curves" not in page
    assert text(pages.curves_json(made, {})).count('"held-out"') and "training" not in text(pages.curves_json(made, {}))
    # A held-out group has no advantages, and links name their runs.
    assert "Advantage</dt><dd>\u2013" in text(pages.episode(made, {"run": made.runs[1].key, "id": "eval-0"}))
    assert f"run={quote(made.runs[1].key, safe='')}" in page


async def test_a_group_that_taught_nothing_says_why_and_is_found(tmp_path: Path) -> None:
    def one(name: str, task: str, **changes: Any) -> Any:
        return msgspec.structs.replace(kinds[name], episode=f"train-1-{task}-{name}", task=task, step=1, **changes)

    good, bad = await repair("good"), await repair("bad", "No.", 0.0)
    kinds = {"good": good, "bad": bad}
    lost = {**bad.verdict, "outcome": "infra_failure", "reason": "engine_failed", "reward": None}
    records = [one("good", "spread"), one("bad", "spread")]
    records += [one("good", "easy"), msgspec.structs.replace(one("good", "easy"), episode="train-1-easy-2")]
    records += [one("bad", "hard"), msgspec.structs.replace(one("bad", "hard"), episode="train-1-hard-2")]
    records += [one("bad", "alone"), msgspec.structs.replace(one("bad", "alone"), episode="train-1-lost", verdict=lost)]
    records += [msgspec.structs.replace(one("good", "hard"), episode="val-1-hard", split="val")]
    made = Library([write(tmp_path / "run", *records)], None)
    made.refresh()
    said = {task: text(pages.task(made, {"id": task, "split": "train", "step": "1"})) for task in
            ("spread", "easy", "hard", "alone")}  # fmt: skip
    assert "taught nothing" not in said["spread"] and "all its episodes resolved the task" in said["easy"]
    assert "none resolved the task (tests failed in 2 of 2)" in said["hard"]
    assert "1 of its 2 episodes were lost" in said["alone"]
    assert "no advantages" in text(pages.task(made, {"id": "hard", "split": "val", "step": "1"}))
    entries = made.runs[0].index.entries
    assert {e.facts["task"] for e in chosen(entries, {"group": "taught nothing"})} == {"easy", "hard", "alone"}
    assert {e.name[:13] for e in chosen(entries, {"group": "taught"})} == {"train-1-sprea"}


async def test_a_run_that_leaves_out_what_a_limit_ended_compares_without_it(tmp_path: Path) -> None:
    good, bad = await repair("good"), await repair("bad", "No.", 0.0)
    records = [
        msgspec.structs.replace(good, task="t", step=1),
        msgspec.structs.replace(bad, task="t", step=1, overlong=True),
    ]
    made = Library([write(tmp_path / "run", *records)], None)
    (tmp_path / "run" / "config.yaml").write_text("episode: {mask_overlong: true}\n")
    made.refresh()
    page = text(pages.task(made, {"id": "t"}))
    assert "1 of its 2 episodes were lost or ended by a limit (episode.mask_overlong), and one alone" in page
    (run,) = made.runs
    assert made.episode(run.key, "good").advantage is None
    assert len(chosen(run.index.entries, {"group": "taught nothing"}, run.masked)) == 2
    assert len(fitting(run.index.entries, ["group=taught nothing"], run.masked)) == 2


async def test_an_episode_is_beside_others_of_its_task_in_one_click(tmp_path: Path) -> None:
    def at(step: int, name: str) -> Any:
        return msgspec.structs.replace(records[name], episode=f"{name}-{step}", split="val", step=step, task="t")

    records = {name: await repair(name) for name in ("a", "b")}
    places = [write(tmp_path / "one", *(at(step, "a") for step in (1, 2, 3))), write(tmp_path / "two", at(9, "b"))]
    made = Library(places, None)
    made.refresh()
    page = text(pages.episode(made, {"id": "a-2"}))
    for label in ("Beside step 1", "Beside step 3", f"Beside {made.runs[1].key}, step 9"):
        assert f">{label}</a>" in page, label
    address = page.partition("Beside step 3")[0].rpartition('href="')[2].rstrip('">').replace("&amp;", "&")
    query = dict(pair.split("=") for pair in address.partition("?")[2].split("&"))
    assert "They say the same" in text(pages.compare(made, {key: unquote(value) for key, value in query.items()}))


def test_runs_of_the_same_name_have_links_of_their_own(tmp_path: Path) -> None:
    places = [evaluated(tmp_path / name / "a", "run", [True]) for name in ("one", "two")]
    made = Library(places, None)
    assert made.runs[0].key == "a/run" and made.runs[1].key == str(places[1])
    assert [made.run(one.key) for one in made.runs] == made.runs and made.run(None) is made.runs[0]


def test_binary_rewards_have_a_bar_each() -> None:
    def entry(reward: float) -> Any:
        return SimpleNamespace(facts={"reward": reward})

    bins = histogram([entry(1.0), entry(0.0), entry(0.0)])
    assert [(one.low, one.high, one.count) for one in bins] == [(0.0, 0.0, 2), (1.0, 1.0, 1)]
    assert [one.count for one in histogram([entry(1.0)])] == [0, 1]
    assert len(histogram([entry(n / 20) for n in range(21)])) == 10


def test_a_run_that_nobody_works_on_says_so(tmp_path: Path) -> None:
    made = RunView(Index(evaluated(tmp_path, "run", [True])))
    phases.note(made.dir, 15, "update")
    assert made.phase == "ended in step 15: update"
    (made.dir / "run.lease").write_text("somebody")
    assert made.phase == "step 15: update"
    os.utime(made.dir / "run.lease", (1, 1))
    assert made.phase == "ended in step 15: update"


def test_a_large_edit_costs_little() -> None:
    """Lines that are much alike are what difflib takes longest for."""
    old = [f"line {n % 7}" for n in range(990)]
    new = [f"line {n % 5}" for n in range(990)]
    began = time.process_time()
    for _ in range(20):
        made = compared("\n".join(["same", *old, "end"]), "\n".join(["same", *new, "end"]))
    assert time.process_time() - began < 2 and made[0] == ("same", " same") and made[-1] == ("same", " end")
    assert [kind for kind, _ in compared("a\nb\nc", "a\nx\nc")] == ["same", "del", "add", "same"]


def test_a_run_without_metrics_has_curves_of_its_episodes(tmp_path: Path, library: Library) -> None:
    shutil.copytree(library.runs[0].dir / "episodes", tmp_path / "bare" / "episodes")
    bare = RunView(Index(tmp_path / "bare"))
    bare.index.extend()
    assert [one["step"] for one in bare.metrics()] == [1, 2]
    assert len(lines(library.runs[0].dir / "metrics.jsonl")) == 2


def test_numbers_are_written_as_people_read_them() -> None:
    values = [render.number(value) for value in (None, 12345, 0.5, 1234.5, 3.0)]
    assert values == ["\u2013", "12,345", "0.50", "1,234", "3"]
    assert render.signed(-0.5) == "\u22120.500" and render.signed(0.0) == "0" and render.percent(0.256) == "26 %"


async def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    directory = await run(tmp_path / "run")
    before = sorted(path for path in directory.rglob("*"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout.view", str(directory), "--port", "0", stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    async with session.get(address) as answer:
        assert answer.status == 200 and "Episodes" in await answer.text()
    async with asyncio.timeout(20):
        while b'"episodes": 7' not in await (await session.get(f"{address}state.json")).read():
            await asyncio.sleep(0.05)
    process.terminate()
    assert await process.wait() == 0
    assert sorted(path for path in directory.rglob("*")) == before
    assert list((tmp_path / "cache" / "rollout-view").iterdir())


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rl.view.command import main

    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.strip().endswith("no such run directory or record file")
