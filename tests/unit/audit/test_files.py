"""The audit finds every kind of damage to the files of a run that can be found."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.metrics import episodes as metrics
from rollout import audit
from rollout.figures import journal_line, line
from rollout.proxy.session import Session
from rollout.records import Record, RecordWriter
from rollout.records.reading import Reader
from tests.audit_kit import played, redo, sampled
from tests.kit import CallReading, CharTokenizer, QueueEngine, char_policy
from tests.unit.audit.test_audit import DAMAGES


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three episodes in one file and one in another, with their metrics."""
    monkeypatch.setattr(audit, "tokenizer_of", lambda model: CharTokenizer())
    monkeypatch.setattr(audit, "FormatReading", lambda spec, trimmed: CallReading())
    names = iter("abcd")
    for file, count in (("one", 3), ("two", 1)):
        write(tmp_path, file, [await named(next(names)) for _ in range(count)])
    return tmp_path


async def named(name: str) -> Record:
    return msgspec.structs.replace(await played(), episode=name)


def write(run: Path, file: str, records: list[Record]) -> None:
    (run / "episode_metrics").mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(run / "episodes", file)
    with (run / "episode_metrics" / f"{file}.jsonl").open("w") as lines:
        for record in records:
            writer.append(record)
            lines.write(json.dumps(line(record)) + "\n")
    writer.close()


def frames(path: Path) -> list[bytes]:
    parts = path.read_bytes().split(b"CEP1")[1:]
    return [b"CEP1" + part for part in parts]


def reorder(run: Path, *order: int) -> None:
    path = run / "episodes" / "one.cep"
    parts = frames(path)
    path.write_bytes(b"".join(parts[i] for i in order))


def edit_line(run: Path, **changes: Any) -> None:
    path = run / "episode_metrics" / "one.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | changes), *lines[1:]]) + "\n")


def flip(run: Path, at: int) -> None:
    path = run / "episodes" / "one.cep"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


FILES: dict[str, Callable[[Path], Any]] = {
    "a frame is missing": lambda run: reorder(run, 0, 2),
    "the first frame is missing": lambda run: reorder(run, 1, 2),
    "the last frame is missing": lambda run: reorder(run, 0, 1),
    "two frames are exchanged": lambda run: reorder(run, 0, 2, 1),
    "a frame is there twice": lambda run: reorder(run, 0, 1, 1, 2),
    "the last frame is there twice": lambda run: reorder(run, 0, 1, 2, 2),
    "a file is missing": lambda run: (run / "episodes" / "two.cep").unlink(),
    "a file is there twice": lambda run: (run / "episodes" / "x.cep").write_bytes(
        (run / "episodes" / "one.cep").read_bytes()
    ),
    "a frame of another file": lambda run: (run / "episodes" / "two.cep").write_bytes(
        frames(run / "episodes" / "one.cep")[1]
    ),
    "a flipped bit in a frame": lambda run: flip(run, 60),
    "a flipped bit in a length": lambda run: flip(run, 5),
    "a flipped bit in a magic": lambda run: flip(run, 0),
    "bytes before the first frame": lambda run: (run / "episodes" / "two.cep").write_bytes(
        b"x" + (run / "episodes" / "two.cep").read_bytes()
    ),
    "another reward": lambda run: edit_line(run, reward=1.0),
    "another outcome": lambda run: edit_line(run, resolved=True),
    "other tokens": lambda run: edit_line(run, tokens_trained=1),
    "other turns": lambda run: edit_line(run, turns=99),
    "another task": lambda run: edit_line(run, task="other"),
    "a line of an episode that is not there": lambda run: edit_line(run, episode="z"),
    "a line is there twice": lambda run: edit_line(run, episode="b"),
}


def test_the_documents_count_the_damages() -> None:
    assert (
        f"Each of {len(DAMAGES) + len(FILES)} damages"
        in Path(__file__).parents[3].joinpath("docs/records.md").read_text()
    )


@pytest.mark.parametrize("damage", FILES)
async def test_the_audit_finds_in_files(damage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(run)]) == 0 and "ok: 4 episodes" in capsys.readouterr().out
    FILES[damage](run)
    assert audit.main([str(run)]) == 1
    assert capsys.readouterr().err


async def test_a_last_record_and_its_line_can_be_taken_away(run: Path) -> None:
    """The audit does not miss what nothing else names; docs/records.md says so."""
    reorder(run, 0, 1)
    path = run / "episode_metrics" / "one.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert audit.main([str(run)]) == 0


async def test_one_damaged_file_does_not_hide_the_findings_of_the_next(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run, 60)
    record = await played()
    sampled(record, 0).text = "hullo"
    write(run, "zzz", [record])
    assert audit.main([str(run)]) == 1
    said = capsys.readouterr().err
    assert "checksum" in said and "the recorded text is 'hullo'" in said


@pytest.mark.usefixtures("run")
async def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "episodes" / "one.cep"
    path.write_bytes(path.read_bytes()[:-5])
    lines = tmp_path / "episode_metrics" / "one.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:2]) + '{"episode": ')  # killed in both
    assert audit.main([str(tmp_path)]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert audit.main([str(tmp_path / "nowhere")]) == 1
    assert audit.main([str(tmp_path / "episode_metrics")]) == 1
    assert "no episode records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [("iteration_1/data", "", ""), ("iteration_1/data", "x", "another record"), ("iteration_1/other", "", "twice")],
)
async def test_what_a_selection_inside_of_a_run_has_copied_is_the_same(
    place: str, change: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run / place / "episodes"
    record = next(iter(Reader(run / "episodes/one.cep")))
    writer = RecordWriter(directory, "00000-one")
    writer.append(msgspec.structs.replace(record, task=record.task + change, seal=b""))
    writer.close()
    if place.endswith("data"):
        (directory.parent / "selection.json").write_text("{}")
    assert audit.main([str(run)]) == bool(said)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "4 episodes" in printed.out or place.endswith("other")
    if place.endswith("data"):  # a selection by itself has records like any other
        assert audit.main([str(directory.parent)]) == 0


async def test_forged_reports_are_counted_and_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command of the policy's can write events; that is no fault of the record."""
    session = Session("e", char_policy(QueueEngine("hello")))
    session.disown({"msg_forged", "msg_other", "8d7c-an-error-of-the-agents"})
    assert session.counters.unknown_reports == 2
    record = await played()
    record.episode = "forged"
    record.events += [{"type": "assistant", "message": {"id": f"msg_{i}", "content": "hi"}} for i in range(2)]
    record.agent["events"], record.counters["unknown_reports"] = len(record.events), 2
    write(run, "forged", [record])
    assert audit.main([str(run)]) == 0
    assert "2 replies that agents report were sent by nobody" in capsys.readouterr().out


async def test_a_group_has_one_agent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl's asynchronous modes may play a whole group again in a later step."""

    async def plays(name: str, session: str, kind: str, step: int = 1) -> Record:
        record = msgspec.structs.replace(await named(name), step=step, trainer={"session": session})
        return msgspec.structs.replace(record, agent={"kind": kind, **record.agent})

    right = [("k", "g_0", "codex"), ("l", "g_1", "codex"), ("m", "h_0", "opencode"), ("n", "g_0", "opencode", 2)]
    write(run, "right", [await plays(*one) for one in right])
    assert audit.main([str(run)]) == 0
    write(run, "wrong", [await plays("o", "g_2", "opencode")])
    assert audit.main([str(run)]) == 1
    said = capsys.readouterr()
    assert "it was played by opencode, but its group by codex" in said.out + said.err


async def test_a_line_that_a_resumed_run_has_dropped_is_kept_elsewhere(run: Path) -> None:
    """The records of steps that are played again stay; the audit finds a line that is gone by itself."""
    path = run / "episode_metrics" / "one.jsonl"
    shutil.rmtree(run / "episodes")
    records = [msgspec.structs.replace(await named(name), step=1 + number) for number, name in enumerate("abc")]
    shutil.rmtree(run / "episode_metrics")
    write(run, "one", records)
    metrics.rewind(run, 1)
    assert [json.loads(text)["episode"] for text in path.read_text().splitlines()] == ["a"]
    assert audit.main([str(run)]) == 0
    write(run, "again", [msgspec.structs.replace(await named("bb"), step=2)])
    metrics.rewind(run, 1)
    assert audit.main([str(run)]) == 0
    (run / "rewound.jsonl").unlink()
    assert audit.main([str(run)]) == 1


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_runs_of_earlier_versions_are_audited_by_what_they_have(
    version: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their lines name no seal, and some figures did not exist; what the lines have must be the record's."""
    shutil.rmtree(run / "episodes")
    records = [older(await named(name), version) for name in "abc"]
    write(run, "one", records)
    (run / "episode_metrics" / "two.jsonl").unlink()
    path = run / "episode_metrics" / "one.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    old = [{k: v for k, v in one.items() if k not in ("record", "no_call")} | {"engine": "e"} for one in lines[:2]]
    path.write_text("".join(json.dumps(one) + "\n" for one in old))
    assert audit.main([str(run)]) == 0, capsys.readouterr().err
    edit_line(run, cut_replies=3)
    assert audit.main([str(run)]) == 1


def older(record: Record, version: int) -> Record:
    record.version = version
    if version == 2:
        for node in record.nodes:
            node.seal, node.begins, node.says = b"", b"", b""
        for row in record.rows:
            row.versions = (0, 0)
        record.agent = {"status": "finished", "turns": 4, "detail": ""}
    else:
        redo(record)
    return record


async def test_sessions_with_a_seed_may_be_played_twice_but_not_copied(run: Path) -> None:
    record = await named("first")
    record.sampling = {"seed": 7}
    for number, node in enumerate(record.nodes):
        node.started = 100.0 + number
    again = msgspec.structs.replace(copy.deepcopy(record), episode="again")
    for node in again.nodes:
        node.started += 1000
    write(run, "seeded", [record, again])
    assert audit.main([str(run)]) == 0
    write(run, "copied", [msgspec.structs.replace(copy.deepcopy(record), episode="copy", seal=b"")])
    assert audit.main([str(run)]) == 1


async def test_the_journal_of_a_player_is_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = run / "evaluation"
    write(place, "w", [record := await named("eval-3-t-x")])
    shutil.rmtree(place / "episode_metrics")
    (place / "journal.jsonl").write_text(json.dumps(told := journal_line(record)) + "\n")
    assert audit.main([str(run)]) == 0
    for name in ("sample", "patch", "detail", "agent", "missing", "started"):
        (place / "journal.jsonl").write_text(json.dumps({**told, name: "other"}) + "\n")
        assert audit.main([str(place)]) == 1 and f"{name} of eval-3-t-x" in capsys.readouterr().err


async def test_what_makes_no_sense_does_not_end_the_audit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = await named("senseless")
    record.counters["foreign_calls"] = float("nan")
    writer = RecordWriter(run / "episodes", "senseless")
    writer.append(record)
    writer.close()
    assert audit.main([str(run)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert all(one.startswith("senseless.cep, senseless (t): ") for one in said)
    assert sum("it cannot be read: ValueError" in one for one in said) == 1
