"""What holds of the viewer for any bytes that a run may have, and any text that a policy may say."""

from __future__ import annotations

import asyncio
import json
import tempfile
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl.view import pages
from rl.view.index import Index
from rl.view.library import Library
from rl.view.search import Query
from rl.view.texts import clean, compared, patch
from rl.view.tokens import Vocabulary
from rl.view.turns import composed
from rollout.records import NodeRecord, RecordWriter, pack_ids
from tests.export_kit import Play, write
from tests.kit import empty_record

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("<>&\"'\x1b\u202e\r\n[]{}%#/"), max_size=60)


def _file() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        writer = RecordWriter(Path(name), "w", synced=False)
        for number in range(5):
            writer.append(empty_record(version=3, episode=f"e{number}", patch=b"x" * 40 * number))
        writer.close()
        return writer.path.read_bytes()


DATA = _file()


@given(st.lists(st.integers(0, len(DATA)), max_size=8))
def test_an_index_that_grew_is_the_one_that_was_built_at_once(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path, cache = Path(name, "run", "w.cep"), Path(name, "cache")
        path.parent.mkdir()
        path.touch()
        index = Index(path.parent, cache)
        for number, end in enumerate([*sorted(cuts), len(DATA)]):
            path.write_bytes(DATA[:end])
            index.extend()
            if number % 2:  # as after a new start
                index.save()
                index = Index(path.parent, cache)
        index.extend()
        whole = Index(path)
        whole.extend()
        assert [entry.name for entry in index.entries] == [entry.name for entry in whole.entries]
        assert [entry.offset for entry in index.entries] == [entry.offset for entry in whole.entries]
        assert not index.torn and not index.damage


BIDIRECTIONAL = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@given(TEXTS)
def test_a_clean_text_has_nothing_that_acts(text: str) -> None:
    for character in clean(text):
        assert character in "\n\t" or unicodedata.category(character) != "Cc"
        assert unicodedata.bidirectional(character) not in BIDIRECTIONAL


@given(TEXTS, TEXTS)
def test_any_text_is_a_patch_or_two(old: str, new: str) -> None:
    patch(old)
    assert all(kind in ("same", "add", "del") for kind, _ in compared(old, new))


class _Shape(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))


def _shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    async def made() -> Play:
        play = Play("Done.")
        await play.ask([{"role": "user", "content": "fix it"}])
        return play

    play = asyncio.run(made())
    with tempfile.TemporaryDirectory() as name:
        record = play.record("e", task="t" + text, patch=b"diff --git a/x b/x\n@@ -1 +1 @@\n+" + text.encode())
        block = {"type": "tool_use", "id": "i", "name": "N" + text, "input": {"k" + text: "v" + text}}
        node = next(one for one in record.nodes if one.logprobs is not None)
        node.blocks = [{"type": "text", "text": "x" + text}, {"type": "thinking", "thinking": "y" + text}, block]
        result = {"type": "tool_result", "tool_use_id": "i", "content": "z" + text}
        record.events.append({"type": "user", "message": {"content": [result]}})
        record.verdict |= {"detail": text, "log_tail": "l" + text}
        library = Library([write(Path(name), record)], None)
        library.refresh()
        shape = _Shape()
        for path in ("/episode", "/tokens", "/export"):
            page = pages.PAGES[path](library, {"id": "e"})
            shape.feed(page.body if isinstance(page.body, str) else page.body.decode())
        return shape.tags


@settings(max_examples=40)
@given(TEXTS.map(lambda text: text.replace("\n", "").replace("\r", "")))
def test_a_text_never_changes_the_tags_of_a_page(text: str) -> None:
    assert _shape("x" + "".join(text.splitlines())) == _shape("xx")


VALUES = st.recursive(
    TEXTS | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NO_WORDS = Vocabulary(Path("none"))


@settings(max_examples=100)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3), VALUES, st.booleans())
@example("", "", {}, float("-inf"), False)
@example("Bash", "\x1bnowhere\nfoo", {"true": ["x1e5", 1e16, None]}, "\u00e9t\u00e9", True)
def test_a_search_finds_any_part_of_what_is_composed(
    name: str, text: str, given: dict[str, object], told: object, ascii_only: bool
) -> None:
    """A search composes a record's texts only where its strings make a hit possible; it must not miss one."""
    call = {"type": "tool_use", "id": "i", "name": name, "input": given}
    result = {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": text}, told, text]}
    message = {"role": "user", "content": [result, {"type": "text", "text": text}, {"type": "image", "text": told}]}
    says = json.dumps([message], ensure_ascii=ascii_only).encode("utf-8", "replace").replace(b"NaN", b"0")
    nodes = [NodeRecord(-1, b"", says=says.replace(b"-Infinity", b"0").replace(b"Infinity", b"0"))]
    nodes.append(NodeRecord(0, pack_ids([7]), blocks=[call, {"type": text, "more": told}]))
    record = empty_record(version=4, nodes=nodes, events=[{"type": "system", "subtype": "compact_boundary"}])
    data = msgspec.msgpack.encode(record)
    for whole in composed(msgspec.msgpack.decode(data, type=type(record))):
        for at in range(len(whole)):
            for size in (1, 2, 3, 5, 9, 14):
                part = whole[at : at + size]
                asked = "".join(one.upper() if one.isascii() else one for one in part) if at % 2 else part
                assert Query(asked, lambda _: NO_WORDS).finds(data), part
