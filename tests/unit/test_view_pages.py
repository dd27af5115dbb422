"""This module tests the pages over HTTP: what they show, what they refuse, and that nothing of an episode becomes a
part of them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import msgspec
import pytest

from rl.view import pages, render
from rl.view.index import Index
from rl.view.library import Library, NotFound
from rl.view.runs import FilterError, Run, chosen
from tests.export_kit import lines, repair, write
from tests.view_kit import HOSTILE, hostile, named, run, served, tokenizer

WRONG = {
    "/run?run=7": 404,
    "/episode?run=0&id=no": 404,
    "/episodes?run=0&turns=x": 400,
    "/nothing": 404,
    "/static/../pages.py": 404,
    "/strip?run=0&id=train-1-fix-0&node=99": 404,
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
    out.append(("/compare_runs", {"a": "0", "b": "1"}))
    for made in library.runs:
        number = {"run": str(made.number)}
        out += [("/run", number), ("/episodes", number), ("/curves.json", number), ("/state.json", number)]
        for entry in made.index.entries:
            one = {**number, "id": entry.name}
            out += [(path, one) for path in ("/episode", "/tokens", "/export", "/episode.json")]
            out += [("/task", {**number, "id": entry.facts["task"]}), ("/find.json", {**one, "q": "e"})]
            out += [("/compare", {"a": entry.name, "arun": number["run"], "b": "train-1-fix-0", "brun": "0"})]
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
            if path == "/episode" and query["run"] == "1":
                assert "{{ 7 * 7 }}" in text(page)


async def test_answers_forbid_everything_but_our_own_files(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with served(await run(tmp_path)) as address:
        async with session.get(f"{address}/run?run=0") as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for path, status in WRONG.items():
            async with session.get(address + path) as answer:
                assert answer.status == status, path
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with session.post(f"{address}/run?run=0") as answer:
            assert answer.status == 405
        async with session.get(f"{address}/run?run=0", headers={"Host": "evil.example:80"}) as answer:
            assert answer.status == 403


async def test_elsewhere_a_token_is_needed(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with served(await run(tmp_path), token="right") as address:
        for query in ("", "?token=wrong", "?token="):
            async with session.get(f"{address}/{query}") as answer:
                assert answer.status == 403
        async with session.get(f"{address}/static/view.css") as answer:
            assert answer.status == 403
        async with session.get(f"{address}/run?run=0&token=right", allow_redirects=False) as answer:
            assert answer.status == 302 and answer.headers["Location"] == "/run?run=0"
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        headers = {"Cookie": cookie.partition(";")[0], "Host": "node7.example:80"}
        async with session.get(f"{address}/run?run=0", headers=headers) as answer:
            assert answer.status == 200


async def test_a_run_is_followed_while_it_is_written(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    whole, growing = await run(tmp_path / "whole"), tmp_path / "growing"
    (growing / "episodes").mkdir(parents=True)
    (record,) = (whole / "episodes").iterdir()
    data = record.read_bytes()
    (growing / "episodes" / "w.cep").write_bytes(data[: len(data) // 2])
    async with served(growing) as address:

        async def episodes() -> int:
            async with session.get(f"{address}/state.json?run=0") as answer:
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
    page = text(pages.PAGES["/task"](library, {"run": "0", "id": "fix", "step": "1", "split": "train"}))
    assert page.count('class="card ') == 3
    assert "+0.500" in page and "\u2212" in page  # the trainer's own, and the other one's
    assert "test_a" in page and "differs" in page and "tests/x.py" in page and "touches_tests" in page
    computed = pages.advantages(library.runs[0].index.entries[2:4], True)
    assert [round(value, 3) for value in computed.values()] == [0.707, -0.707]
    assert pages.advantages(library.runs[0].index.entries[:1], True) == {}


async def test_an_episode_that_a_limit_ended_is_masked_on_all_of_its_pages(tmp_path: Path) -> None:
    record = msgspec.structs.replace(await repair("e"), overlong=True)
    trained = '<span class="chip trained">sampled, mask 1</span>'
    for masked in (False, True):
        directory = write(tmp_path / str(masked), named(record, "e", tokenizer(tmp_path / "policy")))
        (directory / "config.yaml").write_text(f"episode: {{mask_overlong: {str(masked).lower()}}}\n")
        library = Library([directory], None)
        library.refresh()
        page = text(pages.token_page(library, {"run": "0", "id": "e"}))
        assert ("Not trained: a limit ended the episode" in page) is masked
        assert (trained in page) is not masked
        assert ('<rect class="trained"' in page) is not masked  # the map
        assert ('<section class="node trained"' in page) is not masked  # what the token's own box reads


def test_two_episodes_part_where_they_say_something_else(library: Library) -> None:
    query = {"a": "train-1-fix-0", "arun": "0", "b": "train-1-fix-1", "brun": "0"}
    page = text(pages.PAGES["/compare"](library, query))
    assert "They say the same in the first 1 turn;" in page and 'id="bt2"' in page
    assert "They say the same in every turn" in text(pages.PAGES["/compare"](library, {**query, "b": "train-1-fix-0"}))


def test_an_export_stands_alone(library: Library) -> None:
    page = pages.PAGES["/export"](library, {"run": "0", "id": "train-1-crowd-0"})
    body = text(page)
    assert "attachment" in page.headers["Content-Disposition"]
    assert "/static/" not in body and "<script" not in body and "http" not in body.replace("http-equiv", "")
    assert "sha256-" in body and "I found it." in body and "Sub-agent" in body
    hostile_one = library.runs[1].index.entries[0].name
    Strict().feed(text(pages.PAGES["/export"](library, {"run": "1", "id": hostile_one})).partition("</style>")[2])


def test_what_is_copied_is_what_was_recorded(library: Library) -> None:
    told = json.loads(text(pages.PAGES["/episode.json"](library, {"run": "0", "id": "train-1-fix-1"})))
    assert told["verdict"]["flags"] == ["touches_tests"] and told["figures"]["reward"] == 0.0
    turn = json.loads(text(pages.PAGES["/episode.json"](library, {"run": "0", "id": "train-1-fix-1", "turn": "1"})))
    assert turn["parts"][2]["result"]["text"] == "total 0"
    raw = pages.PAGES["/raw"](library, {"run": "0", "id": "train-1-fix-1", "turn": "1", "part": "2", "what": "result"})
    assert raw.type == "text/plain" and text(raw) == "total 0"
    harmful = {"run": "1", "id": library.runs[1].index.entries[0].name, "turn": "1", "part": "1", "what": "result"}
    whole = pages.PAGES["/raw"](library, harmful)
    assert text(whole).startswith(HOSTILE[:20]) and len(text(whole)) > 1000
    with pytest.raises(NotFound):
        pages.PAGES["/raw"](library, {"run": "0", "id": "train-1-fix-1", "turn": "99", "what": "text"})


def test_curves_of_a_run_and_of_two(library: Library) -> None:
    panels = {one["title"]: one for one in json.loads(text(pages.PAGES["/curves.json"](library, {"run": "0"})))}
    assert panels["Resolve rate"]["steps"] == [1, 2]
    assert panels["Resolve rate"]["series"] == [{"label": "training", "values": [0.5, 1.0]}]
    assert panels["Where a step's time goes"]["stacked"]
    both = {one["title"]: one for one in json.loads(text(pages.PAGES["/curves.json"](library, {"run": "0,1"})))}
    assert len(both["Reward"]["series"]) == 2 and not both["Where a step's time goes"]["stacked"]


def test_a_run_without_metrics_has_curves_of_its_episodes(tmp_path: Path, library: Library) -> None:
    shutil.copytree(library.runs[0].dir / "episodes", tmp_path / "bare" / "episodes")
    bare = Run(0, Index(tmp_path / "bare"))
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
        while b'"episodes": 7' not in await (await session.get(f"{address}state.json?run=0")).read():
            await asyncio.sleep(0.05)
    process.terminate()
    assert await process.wait() == 0
    assert sorted(path for path in directory.rglob("*")) == before
    assert list((tmp_path / "cache" / "rollout-view").iterdir())


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rl.view.__main__ import main

    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.strip().endswith("no such run directory or record file")
