"""This module tests the index over record files: built once, extended, kept, and never wrong about what is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl.config.compose import compose
from rl.metrics import trained
from rl.view.index import Index
from rl.view.library import Library
from rl.view.search import Query, find
from rollout.records import Record, RecordWriter
from tests.export_kit import crowd, repair, without_words, write
from tests.kit import empty_record
from tests.view_kit import keep_trainer, named, run


def names(index: Index) -> list[str]:
    return [entry.name for entry in index.entries]


def record(number: int) -> Record:
    return empty_record(version=3, episode=f"e{number}", patch=b"x" * number)


def test_a_file_is_read_further_where_the_last_look_ended(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "episodes", "w")
    writer.append(record(0))
    index = Index(tmp_path)
    assert index.extend() == 1 and index.extend() == 0
    writer.append(record(1))
    RecordWriter(tmp_path / "episodes", "another").append(record(2))
    assert index.extend() == 2
    assert sorted(names(index)) == ["e0", "e1", "e2"]
    assert all(index.record(entry).episode == entry.name for entry in index.entries)


def test_a_torn_tail_is_said_and_read_when_it_is_whole(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "episodes", "w")
    for number in range(2):
        writer.append(record(number))
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[:-5])
    index = Index(tmp_path)
    assert index.extend() == 1
    assert "incomplete record" in index.torn[0]
    writer.path.write_bytes(whole)
    assert index.extend() == 1 and index.torn == []
    assert names(index) == ["e0", "e1"]


def test_a_broken_frame_is_said_once_and_what_is_behind_it_is_read(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "episodes", "w")
    ends = []
    for number in range(3):
        writer.append(record(number))
        ends.append(writer.path.stat().st_size)
    data = bytearray(writer.path.read_bytes())
    data[ends[1] - 1] ^= 1
    writer.path.write_bytes(data)
    index = Index(tmp_path, tmp_path / "cache")
    index.extend()
    assert names(index) == ["e0", "e2"]
    assert len(index.damage) == 1 and "checksum" in index.damage[0]
    index.save()
    again = Index(tmp_path, tmp_path / "cache")
    assert again.extend() == 0 and again.damage == index.damage
    writer.path.write_bytes(data[: ends[0]])  # replaced by a file that is whole
    again.extend()
    assert names(again) == ["e0"] and again.damage == []


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    for number in range(3):
        RecordWriter(tmp_path / "episodes", f"w{number}").append(record(number))
    index = Index(tmp_path)
    index.extend()
    short = RecordWriter(tmp_path / "other", "w")
    short.append(empty_record(version=3, episode="n"))
    if short.path.stat().st_size >= (tmp_path / "episodes/w2.cep").stat().st_size:
        pytest.fail("the new file has to be shorter")
    shutil.copyfile(short.path, tmp_path / "episodes/w2.cep")
    shutil.rmtree(tmp_path / "other")
    index.extend()
    assert sorted(names(index)) == ["e0", "e1", "n"]
    assert index.find("e2") is None


def test_the_cache_is_believed_only_while_the_files_are_the_same(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    writer = RecordWriter(run / "episodes", "w")
    writer.append(record(0))
    index = Index(run, cache)
    index.extend()
    index.save()
    assert not [path for path in run.rglob("*") if path.is_file() and path.suffix != ".cep"]
    writer.append(record(1))
    again = Index(run, cache)
    assert names(again) == ["e0"]  # without reading any record
    assert again.extend() == 1 and names(again) == ["e0", "e1"]
    writer.path.unlink()
    RecordWriter(run / "episodes", "w").append(empty_record(version=3, episode="other"))
    assert names(Index(run, cache)) == []
    for path in cache.iterdir():
        path.write_bytes(b"no cache")
    assert Index(run, cache).extend() == 1


async def test_a_search_finds_what_is_anywhere_in_a_record(tmp_path: Path) -> None:
    library = Library([await run(tmp_path / "run")], None)
    library.refresh()
    assert search(library, "i GIVE up") == ["train-1-fix-1"]
    assert search(library, "nowhere at all") == []


async def test_a_search_finds_what_an_episodes_own_find_does(tmp_path: Path) -> None:
    """Any part of any text in any case: what was read is token ids alone, arguments are shown as JSON."""
    directory = await run(tmp_path / "run")
    read = await repair("read", prompt="Der STRASSENNAME ist \u00c4rger, \u041f\u0420\u0418\u0412\u0415\u0422: \u20ac!")
    write(directory, without_words(named(read, "read", directory / "policy")), name="more")
    library = Library([directory], None)
    library.refresh()
    assert search(library, "stra\u00dfenname ist \u00e4rger, \u043f\u0440\u0438\u0432\u0435\u0442") == ["read"]
    assert search(library, ": \u20ac!") == ["read"]
    for entry in library.runs[0].index.entries:
        one = library.episode(None, entry.name)
        texts = {text for *_, text in one.reading.texts()} | {one.reading.ending, one.record.patch.decode()}
        texts |= {one.texts.of(node) for node in range(len(one.record.nodes))}
        parts = {text[at : at + 15] for text in texts for at in range(0, len(text), 11)}
        for part in filter(str.strip, parts):
            hits, _ = find(one.reading, one.texts, part)
            assert hits and entry.name in search(library, part.upper()), (entry.name, part)


def search(library: Library, wanted: str) -> list[str]:
    index = library.runs[0].index
    return [entry.name for entry in index.having(index.entries, Query(wanted, library.words)) if entry]


async def test_what_the_trainer_knows_comes_back_to_the_tokens_that_it_is_of(tmp_path: Path) -> None:
    directory = await run(tmp_path / "run")
    one, many = await repair("train-1-fix-0"), await crowd("train-1-crowd-0")
    told = trained.read(directory, one)
    assert told is not None and told.advantages == {0: 0.5}
    for node, values in told.values.items():
        assert len(values.logprobs) == one.nodes[node].length == len(values.entropies)
    assert set(told.values) == {node for row in one.rows for node in row.nodes}
    assert trained.read(directory, many) is None  # nothing was kept of it
    keep_trainer(directory, named(many, "train-1-crowd-0"), "group_2", -0.5)
    kept = trained.read(directory, many)
    assert kept is not None and set(kept.values) == {node for row in many.rows for node in row.nodes}
    assert trained.read(directory, named(one, "train-1-crowd-0")) is None  # rows of another episode do not fit


async def test_a_trainer_that_takes_the_engines_logprobs_has_none_of_its_own(tmp_path: Path) -> None:
    """Else the viewer would show the engine's beside the engine's, as if both had computed the same."""
    config = compose(["+experiment=quickstart"])
    assert trained.columns(config) == ["old_log_probs", "entropy"]
    assert trained.columns(compose(["+experiment=quickstart", "algorithm.rollout_correction.bypass_mode=true"])) == []
    directory = await run(tmp_path / "run")
    many = named(await crowd("train-1-crowd-0"), "train-1-crowd-0")
    trained.write(directory, many.step, [trained.Row(f"group_2_{n}", -0.5, b"", b"") for n in range(len(many.rows))])
    told = trained.read(directory, many)
    assert told is not None and set(told.advantages.values()) == {-0.5} and told.values == {}
