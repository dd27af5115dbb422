"""This module tests sending records to a store that fails in every way, and reading records while they are written."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.traces.collect.spans import spans_of
from rl.traces.store.sending import Sender
from rl.traces.store.stores import StoredAttempt, StoreError, StoreRefusal
from rollout.records import Record
from rollout.records.reading import Position, Reader
from rollout.trace import trace
from tests.export_kit import without_words
from tests.kit import empty_record
from tests.store_kit import told, write

FAULTS = ("ok", "ok", "lost before", "lost after", "refused", "forgets")


class FaultyStore:
    """Fails as ``faults`` say, one for each request, and then no more. It keeps a span once, as the real one does."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults, self.rollouts, self.count = list(faults), dict[str, dict[str, Any]](), itertools.count()

    def fault(self) -> bool:
        """Tell whether the answer is to get lost after the request was done."""
        fault = self.faults.pop(0) if self.faults else "ok"
        if fault == "lost before":
            raise StoreError(fault)
        if fault == "refused":
            raise StoreRefusal(fault)
        if fault == "forgets":
            self.rollouts.clear()
        return fault == "lost after"

    def rollout(self, name: str) -> dict[str, Any]:
        if name not in self.rollouts:
            raise StoreRefusal(f"there is no {name}")
        return self.rollouts[name]

    def answered(self, lost: bool) -> None:
        if lost:
            raise StoreError("lost after")

    async def known(self) -> dict[str, StoredAttempt]:
        self.answered(self.fault())
        return {one["episode"]: self.place(name) for name, one in self.rollouts.items()}

    async def has(self, rollout: str) -> bool:
        self.answered(self.fault())
        return rollout in self.rollouts

    async def start(self, rollout: Mapping[str, Any]) -> StoredAttempt:
        lost, name = self.fault(), f"r{next(self.count)}"
        self.rollouts[name] = {"episode": rollout["metadata"]["episode"], "attempts": [[None, {}]]}
        self.answered(lost)
        return self.place(name)

    async def again(self, rollout: str) -> StoredAttempt:
        lost = self.fault()
        self.rollout(rollout)["attempts"].append([None, {}])
        self.answered(lost)
        return self.place(rollout)

    async def add(self, spans: Iterable[Mapping[str, Any]]) -> None:
        for span in spans:  # one request each: the real one may fail between two batches
            lost = self.fault()
            attempts = self.rollout(span["rollout_id"])["attempts"]
            attempts[int(span["attempt_id"])][1].setdefault(span["span_id"], span)
            self.answered(lost)

    async def end(self, place: StoredAttempt, status: str, metadata: Mapping[str, Any]) -> None:
        lost = self.fault()
        self.rollout(place.rollout)["attempts"][int(place.attempt)][0] = (status, metadata.get("episode"))
        self.answered(lost)

    def place(self, name: str) -> StoredAttempt:
        attempts = self.rollouts[name]["attempts"]
        return StoredAttempt(name, str(len(attempts) - 1), len(attempts), attempts[-1][0] is not None)


def attempts() -> list[Record]:
    """Three episodes: one at once, one after two lost attempts, one that was lost for good."""
    lost = {"outcome": "infra_failure", "reason": "engine_failed", "reward": None, "detail": "x", "flags": []}
    return [
        empty_record(episode="a"),
        empty_record(episode="b", attempt=0, verdict=lost),
        empty_record(episode="b.1", attempt=1, verdict=lost),
        empty_record(episode="c.0", attempt=0, verdict=lost),
        empty_record(episode="b.2", attempt=2),
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FAULTS), max_size=40))
def test_every_attempt_is_there_once_whatever_the_store_did(faults: list[str]) -> None:
    store = FaultyStore(faults)

    async def send_everything(run: Path) -> None:
        sender, calm = Sender([run], store), False
        while not calm:
            calm = not store.faults
            with contextlib.suppress(StoreError):
                if calm or sender.refused:
                    await sender.connect()
                await sender.round()

    with TemporaryDirectory() as directory:
        asyncio.run(send_everything(write(attempts(), Path(directory))))
    found = {one["episode"]: one["attempts"] for one in store.rollouts.values()}
    assert len(found) == len(store.rollouts) == 3
    for name, tries in (("a", ["a"]), ("b", ["b", "b.1", "b.2"]), ("c.0", ["c.0"])):
        ends = [("failed" if last != tries[-1] or name == "c.0" else "succeeded", last) for last in tries]
        assert [end for end, _ in found[name]] == ends
        for (_, spans), episode in zip(found[name], tries, strict=True):
            assert [one["resource"]["attributes"]["claude_code_rl.episode"] for one in spans.values()] == [episode]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=8), st.integers(0, 5))
def test_each_record_is_read_once_however_its_file_grows(cuts: list[int], stops: int) -> None:
    with TemporaryDirectory() as directory:
        (whole,) = (write(attempts(), Path(directory)) / "episodes").iterdir()
        data, grows = whole.read_bytes(), Path(directory) / "grows"
        at, seen = Position(), list[str]()
        for cut in [*sorted(cut % len(data) for cut in cuts), len(data)]:
            grows.write_bytes(data[:cut])
            for _, record in Reader(grows).placed(grows, at):
                if len(seen) == stops:  # whoever reads it fails once, and gets the same record again
                    stops = -1
                    break
                seen.append(record.episode)
        seen += [record.episode for _, record in Reader(grows).placed(grows, at)]
        assert seen == [record.episode for record in attempts()]
        assert at.offset == len(data)


async def test_a_record_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    strange = [empty_record(episode="d", verdict={}), empty_record(episode="e")]
    (path,) = (write([*attempts(), *strange], tmp_path) / "episodes").iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    sender, ended = Sender([tmp_path], FaultyStore([])), asyncio.Event()
    await sender.round()
    await sender.round()
    broken, other = sender.damage
    assert sender.sent == 5 and broken.startswith(f"{path}, offset 0: ")
    assert "not the record of an episode" in other
    path.write_bytes(data)  # a file of another machine may be seen before all of it is
    ended.set()
    assert not await sender.follow(ended, lambda _: None)
    assert sender.sent == 6 and sender.damage == [other]


async def test_of_a_record_before_version_4_tokens_and_replies_are_sent() -> None:
    one = (await told(2, "read"))[1]
    *spans, _ = spans_of(trace(without_words(one.record)))
    assert [span["attributes"]["claude_code_rl.message_id"] for span in spans[::2]] == [*one.calls]
    for span, said in zip(spans[1::2], one.calls.values(), strict=True):
        values = span["attributes"]
        assert (values["prompt_token_ids"], values["response_token_ids"]) == (said.prompt_ids, said.ids)
        assert values["gen_ai.completion.0.content"] == "".join(block["text"] for block in said.reply)
