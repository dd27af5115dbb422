"""This module tests the viewer in headless Chromium: what people do with it, what hostile text does to it, and what axe
says of it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rl.view import bundle
from rl.view.library import Library
from tests.browser_kit import Tab, browser, needed, tab
from tests.view_kit import hostile, planted, run, served

TWO = "a%2Ftwo"
PAGES = (
    "/run",
    "/episodes",
    "/task?id=fix&step=1&split=train",
    "/episode?id=train-1-crowd-1",
    "/tokens?id=train-1-fix-0",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    needed()
    with browser() as address:
        yield address


@pytest.fixture
async def view(chromium: str, tmp_path: Path) -> AsyncIterator[tuple[Tab, str]]:
    """A tab, and the address of a server over an ordinary run and a hostile one."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(
            served(await run(tmp_path / "a" / "one"), await hostile(tmp_path / "a" / "two"))
        )
        page = await stack.enter_async_context(tab(chromium))
        yield page, address
        assert page.problems == []
        assert all(url.startswith((address, "about:", "data:")) for url in page.asked), page.asked


async def test_from_the_run_to_a_turn(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.goto(f"{address}/run")
    await page.until("document.querySelectorAll('.chart canvas').length >= 4")
    legend = """Object.fromEntries([...document.querySelectorAll('.chart[aria-label^=Verdicts] .u-series')].map((one) =>
      [one.querySelector('.u-label').textContent, [one.querySelector('.u-value').textContent,
       one.querySelector('.u-marker')?.style.background]]))"""
    told = await page.js(legend)
    assert {name: value for name, (value, _) in told.items()} == {"step": "2", "resolved": "1", "tests failed": "1"}
    assert (told["resolved"][1], told["tests failed"][1]) == ("rgb(29, 154, 108)", "rgb(201, 70, 61)")
    await page.click(".histogram a:last-of-type")
    await page.loaded()
    assert "reward=1%3A1" in await page.js("location.search")
    assert await page.js("document.querySelectorAll('tbody tr').length") == 3
    await page.key("j")
    await page.key("Enter")
    await page.loaded()
    assert await page.js("document.title") == "fix"
    await page.key("j")
    await page.key("j")
    assert await page.js("location.hash") == "#t2"
    await page.key("u")
    await page.loaded()
    assert await page.js("location.pathname") == "/task"
    await page.goto(f"{address}/episodes")
    await page.js("document.querySelector('select[name=verdict]').value = 'infra', 1")
    await page.click(".filters button")
    await page.loaded()
    assert await page.js("document.querySelectorAll('tbody tr').length") == 1


async def test_nested_folded_and_loaded(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.goto(f"{address}/episode?id=train-1-crowd-0#t3")
    assert await page.js("document.querySelector('.inner .turn').id") == "t3"
    assert "begins anew" in await page.js("document.querySelector('.break').textContent")
    await page.js("document.querySelector('#t3 details.context').open = true, 1")
    await page.until("document.querySelector('#t3 details.context pre').textContent.includes('find it')")
    await page.key("t")
    await page.loaded()
    assert await page.js("location.pathname") == "/tokens"


async def test_finding_goes_to_what_is_found(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.goto(f"{address}/episode?id=train-1-fix-0")
    await page.key("/")
    await page.find("content of a")
    await page.until("document.querySelectorAll('.hits button').length === 1")
    await page.key("Enter")
    await page.until("CSS.highlights.get('found')?.size === 1")
    assert await page.js("document.querySelector('#t1').classList.contains('here')")
    await page.find("fix it")
    await page.until("document.querySelector('.hits .what')?.textContent.includes('asked')")
    await page.find("system:")
    await page.until("document.querySelector('.hits .what')?.textContent.includes('read')")
    await page.click(".hits button")
    await page.until("CSS.highlights.get('found')?.size === 1")  # what was read is loaded for it


async def test_tokens_jumps_links_and_colours(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.goto(f"{address}/tokens?id=train-1-fix-0")
    await page.until("document.querySelectorAll('.node.trained .t').length > 10")
    await page.click(".jumps a")
    await page.until("document.querySelector('.t.here')")
    chosen = await page.js("document.querySelector('.t.here').id")
    assert await page.js("location.hash") == f"#{chosen}"
    told = await page.js("document.querySelector('[data-token]').textContent")
    assert "Log-probability, trainer" in told and "Ratio" in told and "Mask1" in told
    least = await page.js("Math.min(...[...document.querySelectorAll('.t[data-p]')].map((one) => +one.dataset.p))")
    assert await page.js("+document.querySelector('.t.here').dataset.p") == least
    plain = await page.js("getComputedStyle(document.querySelector('.t.here')).backgroundColor")
    await page.click("input[value=by-version]")
    await page.click("input[value=by-entropy]")
    assert await page.js("document.body.className") == "by-entropy"
    assert plain != await page.js("getComputedStyle(document.querySelector('.t.here')).backgroundColor")
    await page.goto("about:blank")
    await page.goto(f"{address}/tokens?id=train-1-fix-0#{chosen}")  # as somebody who was sent the link
    await page.until(f"document.querySelector('.t.here')?.id === '{chosen}'")
    assert await page.js("document.querySelectorAll('.map rect').length") >= 4


async def test_a_hostile_episode_does_no_harm(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.goto(f"{address}/run?run={TWO}")
    await page.until("document.querySelectorAll('.charts canvas, .charts .note').length")
    for place in ("#tasks + div a", ".card h3 a"):
        await page.click(place)
        await page.loaded()
        assert await page.js("window.harmed === undefined && getComputedStyle(document.body).display") == "block"
    assert "<script>window.harmed" in await page.js("document.querySelector('h1').textContent")
    assert await page.js("document.documentElement.outerHTML.length") < 400_000  # of 10 MB
    assert not await page.js("/[\\u202a-\\u202e\\x1b\\x00]/.test(document.body.textContent)")
    await page.find("<script>")
    await page.until("document.querySelectorAll('.hits button').length > 3")
    await page.click("a[href^='/tokens']")
    await page.loaded()
    await page.until("document.querySelectorAll('.node.trained .t').length > 10")
    await page.js("document.querySelector('.strip').scrollIntoView(), 1")
    assert await page.js("window.harmed") is None
    other = await page.js("encodeURIComponent(new URLSearchParams(location.search).get('id'))")
    await page.goto(f"{address}/compare?a=train-1-fix-0&brun={TWO}&b={other}")
    assert await page.js("window.harmed") is None


@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_no_serious_fault(view: tuple[Tab, str], dark: bool) -> None:
    page, address = view
    await page.dark(dark)
    others = ("/", "/compare?a=train-1-fix-0&b=train-1-fix-1", "/compare_runs", "/search?q=fix")
    for path in (*PAGES, *others):
        await page.goto(address + path)
        if path.startswith("/tokens"):
            await page.until("document.querySelectorAll('.node.trained .t').length > 10")
        if path == "/run":
            await page.until("document.querySelectorAll('.chart canvas').length >= 4")
        assert await page.axe() == [], path


async def test_a_narrow_screen_does_not_scroll_sideways(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.size(390, 800)
    for path in PAGES:
        await page.goto(address + path)
        assert await page.js("document.documentElement.scrollWidth") <= 390, path


async def test_a_narrow_screen_begins_with_the_content(view: tuple[Tab, str]) -> None:
    page, address = view
    await page.size(390, 844)
    wide = "[...document.querySelectorAll('.fold')].every((one) => one.open)"
    for path, content in {PAGES[1]: "tbody tr", PAGES[3]: ".turn", PAGES[4]: ".node .t"}.items():
        await page.goto(address + path)
        await page.until(f"document.querySelector('{content}')")
        assert await page.js(f"document.querySelector('{content}').getBoundingClientRect().top") < 420, path
        assert await page.js("document.querySelector('.fold') && !document.querySelector('.fold[open]')"), path
    await page.key("/")
    assert await page.js("document.activeElement.id === 'find' && document.querySelector('#find').offsetHeight > 0")
    shown = "document.querySelector('[data-token]').getBoundingClientRect()"
    assert await page.js(f"{shown}.height") == 0
    await page.click(".node .t")  # its values are in sight wherever it is
    assert await page.js(f"{shown}.height > 0 && Math.round({shown}.bottom)") == 844
    assert await page.axe() == []
    await page.click(".node .t")
    assert await page.js(f"{shown}.height") == 0
    await page.size(1400, 900)
    await page.until(wide)


async def test_a_bundle_needs_no_server_of_ours(chromium: str, tmp_path: Path) -> None:
    library = Library([await run(tmp_path / "a" / "one"), await hostile(tmp_path / "a" / "two", 1000)], None)
    library.refresh()
    library.static = True
    bundle.write(library, tmp_path / "out")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/out/"
        async with tab(chromium) as page:
            await page.goto(address)
            await page.click("tbody tr td a")
            await page.loaded()
            await page.until("document.querySelectorAll('.chart canvas').length >= 4")
            assert await page.axe() == []
            await page.click(".tiles a")
            await page.loaded()
            await page.click("a[href^='episode-train-1-fix-0']")
            await page.loaded()
            assert await page.js("document.querySelectorAll('.turn').length") > 0 and await page.axe() == []
            await page.key("/")  # there is nothing to find with
            await page.key("t")
            await page.loaded()
            link = await page.js("location.href") + "#n0t2"
            await page.goto("about:blank")
            await page.goto(link)
            await page.until("document.querySelector('.t.here')?.id === 'n0t2'")
            assert "of node 0" in await page.js("document.querySelector('[data-token]').textContent")
            assert await page.axe() == [] and await page.js("window.harmed") is None
            await page.key("u")
            await page.loaded()
            await page.until("location.pathname.startsWith('/out/episode-')")
            assert page.problems == [] and all(url.startswith((address, "about:", "data:")) for url in page.asked)
        server.shutdown()


async def test_planted_faults_are_found_by_clicking(chromium: str, tmp_path: Path) -> None:
    """The clicks are those of docs/records.md."""
    async with served(await planted(tmp_path / "run")) as address, tab(chromium) as page:

        async def click(*places: str) -> str:
            """Return the name of the episode to which the clicks lead."""
            await page.goto(address)
            for place in places:
                await page.click(place)
                await page.loaded()
            return await page.js("document.querySelector('.state code')?.textContent")

        async def says(text: str) -> bool:
            return await page.js(f"document.querySelector('main').innerText.includes({json.dumps(text)})")

        found, wrong = (
            "a[href$='audit=findings']",
            {
                "train-1-mask-0": "row 0: the trainer got other ids, masks or logprobs than those of its nodes",
                "train-1-logprob-0": "node 1: its prompt, ids, logprobs or versions are not those that crossed",
                "train-1-agent-0": "the agent reports 1 reply that is not recorded",
            },
        )
        for row in (1, 2, 3):
            name = await click(found, f"tbody tr:nth-child({row}) td a")
            assert await says(wrong.pop(name)), name
            if name == "train-1-logprob-0":  # which token it is: the ratio to the trainer's
                await page.click(".tabs a:nth-child(2)")
                await page.loaded()
                await page.click(".jumps ~ .jumps a")
                assert await page.js("location.hash") == "#n1t3"
        assert not wrong
        await click("#tasks + div tr:nth-child(2) a")
        assert await says('if "pytest" in sys.modules:')
