"""This module tests rows for fine-tuning: those of the records, token for token, and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rl.sft.episodes import rows_of, write_rows
from rl.traces import rows as rows_module
from rl.traces.rows import TOKENIZER, RowsError, TokenRows, digest
from rollout.records import Record, RecordWriter, path_of, unpack_ids
from tests.audit_kit import change_logprob, played, redo_row, sampled
from tests.kit import CharTokenizer, empty_record


def write(place: Path, *records: Record) -> Path:
    writer = RecordWriter(place / "episodes", "w")
    for record in records:
        writer.append(record)
    writer.close()
    return place


def read(path: Path, max_length: int = 10**6) -> TokenRows:
    return TokenRows(str(path), None, SimpleNamespace(max_length=max_length))


async def test_every_trained_token_is_there_once_and_nothing_else_is_trained(tmp_path: Path) -> None:
    """The record has a main thread, a sub-agent's, a side call that is not trained on, and a lost reply."""
    record = await played()
    run = write(tmp_path / "run", record)
    counts = write_rows([run], tmp_path / "rows.parquet", max_length=10**6, tokenizer=CharTokenizer())
    rows = read(tmp_path / "rows.parquet")
    assert len(rows) == len(record.rows) == 2
    for row, item in zip(record.rows, (rows[i] for i in range(2)), strict=True):
        nodes = [record.nodes[n] for n in path_of(record.nodes, max(row.nodes))]
        assert item["input_ids"].tolist() == [token for node in nodes for token in unpack_ids(node.ids)]
        assert item["position_ids"].tolist() == list(range(len(item["input_ids"])))
        trained = [t for t, m in zip(item["input_ids"].tolist(), item["loss_mask"].tolist(), strict=True) if m]
        assert trained == [token for n in row.nodes for token in unpack_ids(record.nodes[n].ids)]
    said = [node for node in record.nodes if node.logprobs is not None and node.delivered and node.trained]
    assert counts.trained == sum(node.length for node in said)
    assert (counts.episodes, counts.rows, counts.tokens) == (1, 2, sum(len(ids) for ids, _ in rows_of(record)))


def test_what_exists_before_the_first_update_is_hidden_from_the_garbage_collector(tmp_path: Path) -> None:
    """verl's trainer collects garbage after each update: for a small model that would be most of its time."""
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}), tmp_path / "rows")
    rows_module._keep_imports.cache_clear()
    rows, kept = read(tmp_path / "rows"), [object()]
    assert any(one is kept for one in gc.get_objects())
    assert rows[0]["input_ids"].tolist() == [1, 2, 3]
    assert not any(one is kept for one in gc.get_objects())


async def test_an_episode_counts_once_and_failures_of_the_infrastructure_do_not(tmp_path: Path) -> None:
    one = await played()
    lost = empty_record(episode="lost", verdict=one.verdict | {"outcome": "infra_failure", "reward": None})
    run, again = write(tmp_path / "run", lost, one), write(tmp_path / "selection", one)
    longest = max(len(ids) for ids, _ in rows_of(one))
    counts = write_rows([run, again], tmp_path / "rows.parquet", max_length=longest - 1)
    assert (counts.episodes, counts.rows, counts.too_long, counts.resolved) == (1, 1, 1, 0)
    assert counts.longest < longest
    with pytest.raises(RowsError, match=r"all 2 rows are longer than 3 tokens \(sft.max_length\)"):
        write_rows([run], tmp_path / "none.parquet", max_length=3)
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == ["rows.parquet"]


class Vocabulary(CharTokenizer):
    """A tokenizer whose vocabulary is known."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


def given(path: Path, ids: list[list[int]], masks: list[list[int]], tokenizer: Any = None) -> Path:
    table = pyarrow.table({"input_ids": ids, "loss_mask": masks, "state_id": ["s"] * len(ids)})
    made_by = {TOKENIZER: digest(tokenizer or Vocabulary())}
    pyarrow.parquet.write_table(table.replace_schema_metadata(made_by), path)
    return path


async def test_given_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    ids, masks = [[1, 2, 3], [4, 5], [6] * 9], [[0, 1, 1], [0, 1], [0] * 8 + [1]]
    rows = given(tmp_path / "given.parquet", ids, masks)
    run = write(tmp_path / "run", empty_record(episode="lost", verdict={"outcome": "infra_failure"}))
    counts = write_rows([rows, run], tmp_path / "rows.parquet", max_length=8, tokenizer=Vocabulary())
    assert (counts.given, counts.rows, counts.too_long, counts.episodes) == (2, 2, 1, 0)
    assert (counts.tokens, counts.trained, counts.longest) == (5, 3, 3)
    made = read(tmp_path / "rows.parquet", 8)
    assert [(item["input_ids"].tolist(), item["loss_mask"].tolist()) for item in made] == [
        ([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]),
    ]  # fmt: skip


def test_given_rows_that_cannot_be_trained_on_are_named(tmp_path: Path) -> None:
    class Other(Vocabulary):
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1, "b": 0}

    def says(path: Path, words: str) -> None:
        with pytest.raises(RowsError, match=words):
            write_rows([path], tmp_path / "rows.parquet", max_length=8, tokenizer=Vocabulary())

    says(given(tmp_path / "a.parquet", [[1, 2]], [[0, 1]], Other()), "a.parquet: its ids are not of the policy's token")
    says(given(tmp_path / "b.parquet", [[1, 2], [1, 2]], [[0, 1], [1, 1]]), "b.parquet: row 2: ")
    says(given(tmp_path / "c.parquet", [[1, 2]], [[0]]), "c.parquet: row 1: ")
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": ["x"]}), tmp_path / "d.parquet")
    says(tmp_path / "d.parquet", "d.parquet has no column input_ids of integers")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 nothing PAR1")
    says(tmp_path / "e.parquet", "e.parquet: ")
    says(tmp_path / "f.parquet", "no file .*f.parquet")
    whole = given(tmp_path / "g.parquet", [[1, 2]] * 9, [[0, 1]] * 9).read_bytes()
    (tmp_path / "g.parquet").write_bytes(whole[:60] + bytes(40) + whole[100:])
    says(tmp_path / "g.parquet", "g.parquet: ")
    assert not (tmp_path / "rows.parquet").exists()


class OtherTokenizer(CharTokenizer):
    """Another tokenizer: its first token is this one's second."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return super().decode([max(0, token - 1) for token in ids])


async def test_what_cannot_be_trained_on_is_named(tmp_path: Path) -> None:
    def says(record: Record, words: str, tokenizer: Any = None) -> None:
        run = write(tmp_path / words[:9].replace(" ", "-"), record)
        with pytest.raises(RowsError, match=f"^e: .*{words}"):
            write_rows([run], tmp_path / "rows.parquet", max_length=10**6, tokenizer=tokenizer)

    changed = await played()
    change_logprob(sampled(changed, 0), 0, -9.0)
    says(changed, "not those that crossed the engine's border; .*rl.data.select. leaves such")
    twice = await played()
    twice.rows[1].nodes = sorted([*twice.rows[1].nodes, twice.rows[0].nodes[0]])
    redo_row(twice, twice.rows[1])
    says(twice, "trained in 2 rows")
    says(await played(), "same tokenizer", OtherTokenizer())
    says(empty_record(agent={"turns": 3}), "hosted model's episode has no token ids")


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [([1] * 5, [0] * 5, "5 tokens"), ([], [], "0 tokens"), ([1, 2], [0], "mask of 1"), ([1, 2], [1, 1], "first")],
)
def test_bad_rows_are_named(tmp_path: Path, ids: list[int], mask: list[int], says: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [ids], "loss_mask": [mask]}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=f"row 0: .*{says}"):
        read(tmp_path / "rows.parquet", max_length=4)
