"""This module tests episodes as people read them: nested sub-agents, compaction, branches, what was lost, and why it is
not trained.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rl.view.search import find
from rl.view.texts import clean, compared, cut, patch
from rl.view.tokens import MOST, Texts, Vocabulary, improbable, tokens, tree, vocabulary
from rl.view.turns import EpisodeReading, Turn, read
from rollout.records import Record, pack_ids, unpack_ids
from tests.audit_kit import change_logprob, played, sampled
from tests.export_kit import Play, crowd, nested, repair, without_words
from tests.kit import END
from tests.view_kit import bytewise, named, run, tokenizer


def said(turn: Turn) -> str:
    return " ".join(part.text or part.name for part in turn.parts)


def kinds(reading: EpisodeReading) -> list[tuple[str, str]]:
    return [(turn.kind, said(turn)) for turn in reading.main]


async def test_calls_have_their_results_whatever_their_order() -> None:
    reading = read(without_words(await repair("e")))
    thinking, text, ls, cat = reading.turns[0].parts
    assert (thinking.kind, thinking.text, text.text) == ("thinking", "Hm.", "I look.")
    assert ls.arguments == {"command": "ls -l"} and ls.result and ls.result.text == "total 0"
    assert cat.result and cat.result.text == "content of a"
    assert [said(turn) for turn in reading.turns] == [said(reading.turns[0]), "Done."]
    assert not reading.findings and all(turn.rows for turn in reading.turns)


@pytest.mark.parametrize("kept", [False, True])
async def test_a_sub_agent_is_inside_of_the_call_that_started_it(kept: bool) -> None:
    record = await crowd("e")
    reading = read(record if kept else without_words(record))
    assert kinds(reading) == [
        ("side", "A title"), ("main", "Agent"), ("main", "So far."), ("main", "Summary."), ("main", "After it."),
        ("main", "The end."),
    ]  # fmt: skip
    (inner,) = reading.main[1].parts[0].inner
    assert (inner.kind, said(inner)) == ("agent", "I found it.")
    notices = {said(turn): turn.notice for turn in reading.main if turn.notice}
    assert list(notices) == ["After it."] and "begins anew" in notices["After it."]
    if kept:
        assert reading.main[1].asked == [("user", "fix it")]


async def test_sub_agents_of_sub_agents_and_of_a_hosted_model() -> None:
    reading = read(await nested("e"))
    (outer, later) = reading.main[0].parts[0].inner
    assert said(outer.parts[0].inner[0]) == "Inner." and said(later) == "Outer."
    assert outer.parts[0].result and outer.parts[0].result.text == "Inner."
    assert all("hosted" in turn.untrained for turn in reading.turns)
    events = read(without_words(await nested("e")))
    assert [said(turn) for turn in events.main] == ["Agent", "Done."]


async def test_each_reply_that_is_not_trained_says_why() -> None:
    record = await played()
    why = {said(turn): turn.untrained for turn in read(record).turns if turn.untrained}
    assert "never delivered" in why["lost"] and "side call" in why["title"]
    assert len(why) == 2
    lost = msgspec.structs.replace(record, verdict={**record.verdict, "outcome": "infra_failure"}, rows=[])
    assert all("infrastructure" in turn.untrained for turn in read(lost).turns)
    limited = msgspec.structs.replace(record, overlong=True)
    assert all(turn.untrained for turn in read(limited, mask_overlong=True).turns)
    assert {place.kind for place in tree(record).places} == {"context", "trained", "lost", "served"}
    assert {place.kind for place in tree(limited, masked=True).places} == {"context", "lost", "served"}


async def test_a_malformed_call_is_shown_as_it_was_sampled_and_as_it_was_received() -> None:
    spec = "hermes"
    play = Play('<tool_call>\n{"name": "Bash", "arguments": ', "Done.")
    main: list[Any] = [{"role": "user", "content": "fix it"}]
    await play.ask(main)
    main.append({"role": "user", "content": "go on"})
    await play.ask(main)
    record = msgspec.structs.replace(play.record("e"), parser=spec)
    first, last = read(record).turns
    assert "not well-formed" in first.differs[0] and first.sampled.startswith("<tool_call>")
    assert not last.differs


async def test_a_damage_is_said_at_its_turn() -> None:
    record = await repair("e")
    change_logprob(sampled(record, 1), 0, -9.0)
    reading = read(record)
    assert reading.findings and reading.turns[1].findings and not reading.turns[0].findings


async def test_what_a_record_may_have_does_no_harm() -> None:
    record = await repair("e")
    odd: list[dict[str, Any]] = [
        {}, {"type": "user"}, {"type": "user", "message": {"content": [{"type": "tool_result"}, 3, None]}},
        {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": 3, "content": [{"type": 1}]}]}},
        {"type": "assistant", "message": {"id": 3, "content": [{"type": "tool_use", "id": [], "input": []}]}},
        {"type": "result", "result": {}}, {"type": "system", "subtype": "compact_boundary"},
    ]  # fmt: skip
    read(msgspec.structs.replace(record, events=[*odd, *record.events, *odd]))
    read(msgspec.structs.replace(record, nodes=[], rows=[], events=odd))


async def test_the_tree_draws_what_is_shared_once(tmp_path: Path) -> None:
    record = await played()
    made = tree(record)
    assert made.longest == max(place.end for place in made.places)
    for place in made.places:
        before = made.places[place.parent].end if place.parent >= 0 else 0
        assert place.start == before and place.end - before == record.nodes[place.node].length
    for lane in {place.lane for place in made.places}:
        spans = sorted((place.start, place.end) for place in made.places if place.lane == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert {place.kind for place in made.places} == {"context", "trained", "lost", "served"}
    assert sorted(row for place in made.places for row in place.ends) == list(range(len(record.rows)))


async def test_tokens_have_their_values_and_jumps_go_to_the_least_probable(tmp_path: Path) -> None:
    record, words = await played(), vocabulary(tokenizer(tmp_path / "policy"))
    node = next(n for n, one in enumerate(record.nodes) if one.text == "hello")
    shown = tokens(record, node, words, None)
    assert "".join(one.text for one in shown) == "hello<e>" and shown[-1].special
    assert [one.logprob for one in shown] == [-(n + 1) / 4 for n in range(6)]
    assert [one.version for one in shown] == [4, 4, 4, 5, 5, 5]
    low = improbable(record, words)
    assert low[0].value == min(jump.value for jump in low) and low == sorted(low, key=lambda one: one.value)
    assert "numbers" not in words.problem and "--model" in vocabulary(tmp_path).problem
    big = msgspec.structs.replace(record.nodes[0], ids=record.nodes[0].ids * 500)
    assert len(tokens(msgspec.structs.replace(record, nodes=[big]), 0, words, None, MOST)) == MOST
    short = msgspec.structs.replace(record.nodes[node], ids=b"")  # of a record in which the audit finds that
    assert improbable(msgspec.structs.replace(record, nodes=[short]), words) == []


async def test_a_text_is_found_wherever_it_is(tmp_path: Path) -> None:
    words = vocabulary(tokenizer(tmp_path / "policy"))
    record = without_words(await repair("e"))
    reading, texts = read(record), Texts(record, words)

    def places(wanted: str) -> list[tuple[str, int]]:
        return [(hit.what, hit.turn) for hit in find(reading, texts, wanted)[0]]

    assert places("content of A") == [("result", 1)]
    assert places("I look") == [("said", 1)]
    assert places("fix it") == [("read", 1)]
    assert places("diff --git") == [("patch", 0)]
    (hit,), count = find(reading, texts, "I look")
    ids = unpack_ids(record.nodes[hit.node].ids)
    assert count == 1 and words.text(ids[hit.token : hit.token + 6]) == "I look" == hit.text


def test_texts_are_shown_and_do_nothing() -> None:
    assert clean("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x") == "red x"
    assert clean("a\u202eb\u200bc") == "a\u27e8U+202E\u27e9b\u27e8U+200B\u27e9c"
    assert clean("a\x00\rb\r\nc\td") == "a\u2400\u240db\nc\td"
    assert clean("\ud800") == "\ufffd"
    short = cut("x" * 50, 10, 5)
    assert (short.head, short.left_out, short.tail) == ("x" * 10, 35, "x" * 5)


def test_patches_are_cut_into_files_and_texts_compared() -> None:
    first = "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+y\n z\n"
    (one, two) = patch(first + "diff --git a/b b/b\nBinary files differ\n")
    assert (one.name, one.added, one.removed) == ("a", 1, 1) and two.name == "b"
    assert [kind for kind, _ in one.lines] == ["meta", "meta", "meta", "hunk", "del", "add", "same"]
    assert compared("a\nb", "a\nc") == [("same", " a"), ("del", "-b"), ("add", "+c")]


async def test_every_kind_of_record_in_a_run_can_be_read(tmp_path: Path) -> None:
    from rollout.records.reading import Reader

    records: list[Record] = list(Reader(await run(tmp_path / "run")))
    assert len(records) == 7
    for record in records:
        read(named(record, record.episode))
        tree(record)


def test_the_bytes_of_ids_are_their_text(tmp_path: Path) -> None:
    """A byte-level tokenizer is read by a table of its own."""
    alphabet = sorted(ByteLevel.alphabet())
    words = Vocabulary(bytewise(tmp_path, *(a + b for a in alphabet[:20] for b in alphabet[-20:])))
    assert words._bytes is not None and words.text([*range(0x41, 0x45), 0xC3, 0xA4]) == "ABCD\u00e4"
    lot = random.Random(1)
    for _ in range(50):
        ids = [lot.choice([*range(656), END, 700, -1]) for _ in range(200)]
        known = [one for one in ids if 0 <= one < 656 or one == END]
        assert words.data([pack_ids(ids)]).decode("utf-8", "replace") == words.text(known)
    assert words.data([]) == b"" and words.data([pack_ids([0x41]), b"", pack_ids([0x42])]) == b"A\0\0B"
