"""This module tests requests that take long: what cannot fit is not encoded, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.quickstart.policy import make_tokenizer
from rollout.proxy import marks, messages, texts
from rollout.proxy import session as sessions
from rollout.proxy import wire as wiring
from rollout.proxy.messages import RequestError, Span, WireMessage
from rollout.proxy.render import ChatTemplateRenderer
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy, Session
from rollout.proxy.wire import decode_request
from tests.kit import CharRenderer, CharTokenizer, QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine
MANY = 8_000_000


class Counting(CharTokenizer):
    """Counts the characters that it has encoded, and does something before each call."""

    def __init__(self, before: Callable[[], Any] = lambda: None) -> None:
        self.encoded, self.calls, self.before = 0, 0, before

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.calls += 1
        self.before()
        self.encoded += len(text)
        return super().encode(text)


class Held(CharRenderer):
    """Holds prompts that say "hold" until ``go`` is set, as a tokenizer does that has much to do."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.go = threading.Event(), threading.Event()

    def start(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        if "hold" in messages[-1]["content"]:
            self.held.set()
            assert self.go.wait(LONG)
        return super().start(messages, tools)


def body(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def talk(*said: str, **more: Any) -> bytes:
    """Return a request whose messages are the user's and the assistant's, in turn."""
    sides = ("user", "assistant")
    messages = [{"role": sides[at % 2], "content": text} for at, text in enumerate(said)]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def policy(context: int, tokenizer: Any = None, **more: Any) -> Policy:
    return replace(char_policy(QueueEngine(), CharRenderer(tokenizer), max_context=context), **more)


@pytest.mark.parametrize(
    "limits, status, says",
    [
        ({"context": 100_000}, 400, r"prompt is too long: at least 1\d{5} tokens > 100000 maximum"),
        ({"context": 10**7, "max_session_tokens": 100_000}, 413, "at most 100000 tokens"),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_encoded(limits: Any, status: int, says: str) -> None:
    tokenizer = Counting()
    session = Session("e", policy(tokenizer=tokenizer, **limits))
    with pytest.raises(RequestError, match=says) as raised:
        await session.ahead(decode_request(body("x" * MANY)))
    assert raised.value.status == status and tokenizer.encoded < 200_000
    renderer = session.policy.renderer
    assert isinstance(renderer, CharRenderer) and renderer.encoded == 0 and session.tree.nodes == []
    assert session.counters.context_full == (status == 400)


async def test_what_is_hardly_too_long_is_counted_exactly_and_not_kept() -> None:
    session = Session("e", policy(context=100_000))
    wire = decode_request(body("x" * 100_000))
    place = await session.ahead(wire)
    assert place is not None and place.length > 100_000
    with pytest.raises(RequestError, match=f"too long: {place.length} tokens"):
        session.prepare(wire, retry=False, place=place)
    assert session.tree.nodes == []


async def test_a_text_with_few_tokens_is_not_refused() -> None:
    """A real tokenizer makes few tokens of white space."""

    class Sparse(Counting):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return super().encode(text)[::100]

    place = await Session("e", policy(context=100_000, tokenizer=Sparse())).ahead(decode_request(body(" " * MANY)))
    assert place is not None and MANY // 100 <= place.length < 100_000


def real_policy(context: int) -> tuple[Policy, list[int]]:
    """A policy with the quickstart's chat template; the list gets the number of characters of each text encoded."""
    tokenizer = make_tokenizer()
    renderer, encoded = ChatTemplateRenderer(tokenizer, "qwen3"), []
    whole, renderer._encoder._ids = renderer._encoder._ids, lambda text: encoded.append(len(text)) or whole(text)
    return replace(char_policy(QueueEngine("a"), renderer, max_context=context), tokenizer=tokenizer), encoded


@pytest.mark.parametrize("parts", [("x y", 10**6), ("<|im_end|>", 300_000), ("<|im_end|>" + "x y z " * 50, 1000)])
async def test_a_real_renderer_encodes_no_more_than_fits(parts: tuple[str, int]) -> None:
    text = parts[0] * parts[1]
    used, encoded = real_policy(10_000)
    session = Session("e", used)
    request = {"system": "Fix it.", "messages": [{"role": "user", "content": text}]}
    with pytest.raises(RequestError, match=r"prompt is too long: at least \d{5} tokens > 10000 maximum"):
        await session.ahead(decode_request(json.dumps(request).encode()))
    assert sum(encoded) < 150_000 and session.tree.nodes == []


async def test_what_the_chat_template_leaves_out_needs_no_room() -> None:
    """The quickstart's writes the signatures of tools only, and those of Qwen3 leave old thinking out."""
    used, _ = real_policy(1000)
    tool = {"name": "Do", "description": "It does. " * 20_000, "input_schema": {}}
    request = {"tools": [tool], "messages": [{"role": "user", "content": "fix it"}]}
    session = Session("e", used)
    place = await session.ahead(decode_request(json.dumps(request).encode()))
    assert place is not None and 0 < place.length < 1000
    assert session.prepare(decode_request(json.dumps(request).encode()), False, place).context.length == place.length


@pytest.fixture
async def http(proxy: ProxyServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{proxy.port}") as client:
        yield client


async def post(http: aiohttp.ClientSession, session: Session, text: str, path: str = "/v1/messages") -> tuple[int, Any]:
    async with http.post(path, data=body(text), headers={"x-api-key": session.secret}) as response:
        return response.status, await response.json()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not done():
            await asyncio.sleep(0.005)


async def test_others_are_answered_while_a_large_request_is_encoded(
    proxy: ProxyServer, http: aiohttp.ClientSession
) -> None:
    held = Held()
    busy = await proxy.open_session("busy", char_policy(QueueEngine("large", "small"), held))
    other = await proxy.open_session("other", char_policy(QueueEngine("other")))
    large = asyncio.create_task(post(http, busy, "hold" + "x" * 50_000))
    await until(held.held.is_set)
    status, reply = await asyncio.wait_for(post(http, other, "hi"), LONG)
    assert (status, reply["content"][0]["text"]) == (200, "other")
    # The same session's next request waits: its tree does not change under the one that is being encoded.
    small = asyncio.create_task(post(http, busy, "hi"))
    counting = asyncio.create_task(post(http, busy, "hi", "/v1/messages/count_tokens"))
    await asyncio.sleep(0.1)
    assert not small.done() and not counting.done() and busy.tree.nodes == []
    held.go.set()
    replies = [(await asyncio.wait_for(task, LONG))[1] for task in (large, small)]
    assert [reply["content"][0]["text"] for reply in replies] == ["large", "small"]
    assert (await counting)[1]["input_tokens"] == replies[1]["usage"]["input_tokens"]


@pytest.mark.parametrize("ending", ["closed", "hung up"])
async def test_an_encoding_that_nobody_waits_for_ends(
    proxy: ProxyServer, http: aiohttp.ClientSession, ending: str
) -> None:
    began, go = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert go.wait(LONG)

    tokenizer = Counting(hold)
    session = await proxy.open_session("e", policy(context=1_000_000, tokenizer=tokenizer))
    asking = asyncio.create_task(post(http, session, "x" * MANY))
    await until(began.is_set)
    if ending == "closed":
        await proxy.close_session(session)
    else:
        asking.cancel()
        await until(lambda: all(c.transport is None for c in proxy._runner.server.connections))
        await asyncio.sleep(0.05)  # its handler is cancelled
    go.set()
    if ending == "closed":
        assert (await asyncio.wait_for(asking, LONG))[0] == 410
    async with asyncio.timeout(LONG), session.entrance:
        assert tokenizer.calls <= 2 and session.tree.nodes == []


async def test_a_request_has_the_same_place_in_a_thread() -> None:
    one, other = (Session("e", char_policy(QueueEngine("a", "b"))) for _ in range(2))
    text = "fix it\n" * 10_000
    for session in (one, other):
        wire = decode_request(body(text))
        place = await session.ahead(wire) if session is one else None
        node = await session.prepare(wire, False, place).reply()
        assert node.ids
    assert [node.ids for node in one.tree.nodes] == [node.ids for node in other.tree.nodes]
    small = decode_request(talk(text, "a", "and now"))
    place = await one.ahead(small)
    assert place is not None and place.ids is None  # what the tree has is not encoded again, so this is left to prepare
    assert (await one.prepare(small, False, place).reply()).parent is one.tree.nodes[-2]


class Threads(CharRenderer):
    """Remembers whether each prompt was encoded in the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self.main: list[bool] = []

    def start(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        self.main.append(threading.current_thread() is threading.main_thread())
        return super().start(messages, tools)


async def test_what_was_refused_is_encoded_in_a_thread_again(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    """It was decoded before, but is not in the tree: an agent that sent it again held up all others for a second."""
    renderer = Threads()
    session = await proxy.open_session("e", char_policy(QueueEngine(), renderer, max_context=100_000))
    for _ in range(3):
        assert (await post(http, session, "x" * 100_000))[0] == 400
    assert renderer.main == [False] * 3


async def test_what_is_in_the_tree_is_encoded_in_a_thread_in_another_place() -> None:
    """Such as after another system prompt, where nothing of it is new."""
    renderer = Threads()
    session = Session("e", char_policy(QueueEngine("a", "b", "c"), renderer))
    text = "fix it\n" * 10_000
    for wire in (body(text), talk(text, "a", "go on"), talk(text, "a", "go on", system="Be brief.")):
        request = decode_request(wire)
        await session.prepare(request, False, await session.ahead(request)).reply()
    assert renderer.main == [False] * 2  # the second one extends the first


async def test_a_large_message_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = messages.decoded
    monkeypatch.setattr(messages, "decoded", lambda *given: decoded.append(given[2]) or decode(*given))
    request = decode_request(talk("x" * 100_000, "a", "go on"))
    await Session("e", char_policy(QueueEngine("b"))).ahead(request)
    assert decoded.count("messages[0]") == 1


@pytest.mark.parametrize(
    "field, message",
    [
        ("the body", {}),
        ("messages[0]", {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": [[]] * 100_000}}]}),
        ("messages[0]", {"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}),
        ("tools", {}),
    ],
)
async def test_too_many_values_are_refused_before_they_are_decoded(field: str, message: Any) -> None:
    """While they were, for 5 s, no session of the process was answered."""
    asked = {"role": "user", "content": "x" * 2**20}
    request: dict[str, Any] = {"messages": [message, asked] if message else [asked]}
    if not message:
        request |= {"tools": [[]] * 100_000} if field == "tools" else {"stop_sequences": [[]] * 600_000}
    with pytest.raises(RequestError, match=rf"{re.escape(field)}: more than \d+ values"):
        await Session("e", char_policy(QueueEngine())).ahead(decode_request(json.dumps(request).encode()))


@pytest.mark.parametrize("text", [",[{" * 500_000, '\\",' * 500_000, "\\" * 1_000_001 + '",' * 300_000])
async def test_commas_in_a_text_are_no_values(text: str) -> None:
    place = await Session("e", policy(context=10**7)).ahead(decode_request(body(text)))
    assert place.length > len(text)


VALUE = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('",[{\\\\a\n'), max_size=9),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=3), inner, min_size=1),
    max_leaves=20,
)


@given(VALUE, st.integers(1, 9))
def test_values_are_counted_however_the_text_is_cut(value: Any, piece: int) -> None:
    def marks(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return len(inner) + sum(map(marks, inner))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "PIECE", piece)
        text, count = json.dumps(value).encode(), marks(value)
        assert not wiring._more_values(text, count) and (not count or wiring._more_values(text, count - 1))


async def test_a_request_has_at_most_so_many_stop_sequences() -> None:
    """Each is looked for in each reply."""
    asked = [{"role": "user", "content": "a"}]
    assert decode_request(json.dumps({"messages": asked, "stop_sequences": ["a"] * 100}).encode())
    with pytest.raises(RequestError, match="stop_sequences: at most 100 "):
        decode_request(json.dumps({"messages": asked, "stop_sequences": ["a"] * 101}).encode())
    # They are kept as long as the session, also those of calls that were given up.
    assert decode_request(json.dumps({"messages": asked, "stop_sequences": ["a" * 4000, "b" * 96]}).encode())
    with pytest.raises(RequestError, match="stop_sequences: at most 4096 characters"):
        decode_request(json.dumps({"messages": asked, "stop_sequences": ["a" * 4000, "b" * 97]}).encode())


async def test_a_session_keeps_only_so_many_bytes_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template need not write out all of a tool or an image, so the limit of tokens does not see them."""
    monkeypatch.setattr("rollout.proxy.calls._MOST", 10_000)
    session = Session("e", policy(1_000_000))
    for name, size in (("a", 4000), ("b", 4000), ("c", 4000)):
        tool = {"name": name, "description": "", "input_schema": {"$comment": "x" * size}}
        session.prepare(decode_request(talk(f"{name} {size}", tools=[tool])), False)
    assert [bool(node.head) for node in session.tree.nodes] == [True, True, False] and session.talk.lost == 1


async def test_a_head_that_still_takes_long_is_encoded_in_a_thread_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder does not keep every head: one that spells a control token is encoded anew each time."""
    renderer, takes = Threads(), (1.0, 1.0, 0.001, 0.001, 1.0, 0.001)
    clock = iter([reading for took in takes for reading in (0.0, took)])
    ticking = SimpleNamespace(thread_time=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(sessions, "time", ticking)
    for _ in takes:
        session = Session("e", char_policy(QueueEngine("a"), renderer))
        request = decode_request(talk("q", system="s" * 20_000))
        session.prepare(request, False, await session.ahead(request))
    assert renderer.main == [False, False, False, True, True, False]


async def test_a_request_has_at_most_so_many_messages() -> None:
    """Each costs a little before anything is known of it: 400,000 of them, 17 MB, held up all others for 0.1 s."""
    tiny = {"role": "user", "content": ""}
    assert decode_request(json.dumps({"messages": [tiny] * 10_000}).encode())
    with pytest.raises(RequestError, match="messages: at most 10000"):
        decode_request(json.dumps({"messages": [tiny] * 10_001}).encode())


async def test_a_session_can_have_a_lower_limit_of_its_bodies(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", replace(char_policy(QueueEngine("a")), max_body=1000))
    status, error = await post(http, session, "x" * 1000)
    assert (status, error["error"]["message"]) == (413, "request body over 1000 bytes")
    assert (await post(http, session, "x" * 100))[0] == 200


PARTS = ("<system-reminder>", "</system-reminder>", " ", "\n", "a", "bc", "<system-", "é")


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join), st.integers(1, 8))
def test_reminders_and_white_space_are_left_out_however_the_text_is_cut(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", piece)
        wanted = re.sub("<system-reminder>.*?</system-reminder>", "", text, flags=re.DOTALL)
        assert texts.squeezed(text) == "".join(wanted.split())


def test_reminders_without_an_end_are_text() -> None:
    """Looking for the end of each would take minutes."""
    span = Span.of([WireMessage("user", "<system-reminder>" * 500_000)], assistant=False)
    assert span.key


class Vocabulary:
    all_special_tokens = ("<a>", "<a><b>", "[b", "<b>")
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012


@given(st.text("<>ab[", max_size=60), st.integers(1, 8))
def test_marks_are_found_however_the_text_is_cut(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "PIECE", piece)
        found = marks.Marks(Vocabulary())
        hidden = found.hide(text)
    pattern = "|".join(re.escape(mark) for mark in sorted(Vocabulary.all_special_tokens, key=len, reverse=True))
    assert found._placeholder.sub(lambda place: found._texts[int(place[1])], hidden) == text
    assert found._placeholder.sub("#", hidden) == re.sub(pattern, "#", text)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_is_nested_too_deeply_is_the_clients_error(
    proxy: ProxyServer, http: aiohttp.ClientSession, path: str
) -> None:
    """JSON that the decoder takes may still be too deep for what is written in Python."""
    session = await proxy.open_session(
        "e", replace(char_policy(QueueEngine(*"abcd")), renderer=real_policy(10_000)[0].renderer)
    )
    statuses = set()
    for depth in (200, 600, 900, 3000):
        deep = '{"a":' * depth + "1" + "}" * depth
        use = f'{{"type": "tool_use", "id": "t{depth}", "name": "f", "input": {deep}}}'
        said = f'{{"role": "user", "content": "x"}}, {{"role": "assistant", "content": [{use}]}}'
        data = f'{{"model": "m", "messages": [{said}, {{"role": "user", "content": "y"}}]}}'
        async with http.post(path, data=data, headers={"x-api-key": session.secret}) as response:
            statuses.add(response.status)
    assert 400 in statuses and statuses <= {200, 400}
