"""This module tests selections: which episodes and tasks the rules choose, and that what is written reads like a
run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.task import load_tasks
from rl.data.choice import ChoiceRules, SelectError, choose
from rl.data.select import main
from rl.evaluate.statistics import wilson
from rl.quickstart.tasks import make_tasks
from rollout import audit
from rollout.records import NodeRecord, Record, RecordWriter, pack_ids
from rollout.records.reading import CorruptRecordError, Reader
from tests.audit_kit import played
from tests.kit import CallReading, CharTokenizer, empty_record, full_at

ROOT = Path(__file__).parents[3]


def episode(name: str, task: str = "t", reward: float | None = 1.0, **changes: Any) -> Record:
    """A graded episode; ``reward`` None: one that the infrastructure failed."""
    outcome = {None: "infra_failure", 1.0: "resolved"}.get(reward, "unresolved")
    reason = {None: "no_space", 1.0: None}.get(reward, "tests_failed")
    verdict = {"outcome": outcome, "reason": reason, "reward": reward, "detail": "", "flags": changes.pop("flags", [])}
    agent = {"turns": changes.pop("turns", 3)}
    return empty_record(episode=name, task=task, verdict=verdict, agent=agent, **changes)


def write(run: Path, *records: Record, name: str = "w") -> Path:
    writer = RecordWriter(run / "episodes", name)
    for record in records:
        writer.append(record)
    writer.close()
    return writer.path


def names(run: Path) -> list[str]:
    return [record.episode for record in Reader(run)]


def chosen(run: Path, **rules: Any) -> list[str]:
    return [entry.facts["episode"] for entry in choose([run], ChoiceRules(**rules)).entries]


SOME = [
    episode("a", "t1", turns=9),
    episode("b", "t1", turns=2, patch=b"x", flags=["no_second_opinion"]),  # of how it was graded
    episode("c", "t1", 0.0, patch=b"x", flags=["edits_tests"]),
    episode("d", "t2", 0.0, repo="r/one", model="big-2"),
    episode("e", "t2", 0.0, split="val", repo="r/two"),
    episode("f", "t3", None),
]


def test_what_was_not_graded_is_neither_resolved_nor_unresolved(tmp_path: Path) -> None:
    verdict = {"outcome": "unresolved", "reason": "not_graded", "reward": None, "detail": ""}
    write(tmp_path, empty_record(episode="a", verdict=verdict))
    assert chosen(tmp_path) == ["a"] and not chosen(tmp_path, resolved=True) and not chosen(tmp_path, resolved=False)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({}, "abcde"),
        ({"resolved": True}, "ab"),
        ({"resolved": False}, "cde"),
        ({"unflagged": True}, "abde"),
        ({"splits": ["v*"]}, "e"),
        ({"models": ["big-*", "x"]}, "d"),
        ({"repos": ["r/*"]}, "de"),
        ({"instances": ["t1"]}, "abc"),
        ({"ranges": {"turns": (3, 8)}}, "cde"),
        ({"ranges": {"turns": (3, 9), "reward": (1, 1)}}, "a"),
        ({"ranges": {"proxy_overhead_ms": (0, 9)}}, ""),  # an episode without the figure does not fit
        ({"same": "patch"}, "abd"),
        ({"same": "said"}, "abd"),
        ({"best": 1}, "bd"),
        ({"rate": (0, 1)}, "abc"),
        ({"rate": (0.5, 1.0)}, "abc"),
        ({"rate": (2 / 3, 1)}, ""),  # a bound is not included
        ({"min_episodes": 3}, "abc"),
    ],
)
def test_each_rule(rules: dict[str, Any], left: str, tmp_path: Path) -> None:
    write(tmp_path, *SOME)
    found = choose([tmp_path], ChoiceRules(**rules))
    assert "".join(entry.facts["episode"] for entry in found.entries) == left
    assert sum(count for _, count in found.taken) == len(SOME) - len(left)


def test_best_orders_by_reward_flags_turns_and_tokens(tmp_path: Path) -> None:
    sampled = [NodeRecord(-1, pack_ids([1])), NodeRecord(0, pack_ids([1]), logprobs=b"")]
    write(
        tmp_path,
        episode("long", turns=2, nodes=sampled),
        episode("flagged", turns=1, flags=["x"]),
        episode("failed", reward=0.0, turns=1),
        episode("shaped", reward=0.5, turns=1),
        episode("short", turns=2),
    )
    order = ["short", "long", "flagged", "shaped", "failed"]
    for count in range(1, 6):
        assert set(chosen(tmp_path, best=count, audited=False)) == set(order[:count])


def test_lots_do_not_depend_on_what_else_is_there(tmp_path: Path) -> None:
    write(tmp_path / "a", *(episode(f"a{n}", f"t{n % 3}") for n in range(30)))
    write(tmp_path / "b", *(episode(f"b{n}", f"u{n % 3}") for n in range(30)))
    alone = choose([tmp_path / "a"], ChoiceRules(per_task=2, seed=3)).entries
    both = choose([tmp_path / "b", tmp_path / "a"], ChoiceRules(per_task=2, seed=3)).entries
    assert len(both) == 12 and [one.facts for one in both[6:]] == [one.facts for one in alone]
    assert {one.facts["episode"] for one in alone} != set(chosen(tmp_path / "a", per_task=2, seed=4))
    assert len(chosen(tmp_path / "a", limit=7)) == 7


def test_what_was_said_is_compared_by_ids_or_by_content_without_its_ids(tmp_path: Path) -> None:
    def tokens(*ids: int) -> list[NodeRecord]:
        return [NodeRecord(-1, pack_ids([1])), NodeRecord(0, pack_ids(list(ids)), logprobs=b"")]

    def told(text: str, number: str) -> list[dict[str, Any]]:
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": text, "input": {}}
        return [{"type": "assistant", "message": {"id": f"msg_{number}", "content": [call]}}]

    write(
        tmp_path,
        *(episode(f"i{n}", "ids", nodes=tokens(2, last)) for n, last in enumerate((3, 3, 4))),
        *(episode(f"e{n}", "events", events=told(text, f"{n}")) for n, text in enumerate(("x", "x", "y"))),
    )
    assert chosen(tmp_path, same="said", audited=False) == ["i0", "i2", "e0", "e2"]
    assert chosen(tmp_path, same="patch", audited=False) == ["i0", "e0"]


@settings(max_examples=40)
@given(st.data())
def test_rules_only_take_and_what_is_left_fits(data: st.DataObject) -> None:
    """For any episodes: the counts add up, no task has more than its cap, and equal commands choose equally."""
    import tempfile

    rewards = st.sampled_from([None, 0.0, 0.5, 1.0])
    drawn = data.draw(st.lists(st.tuples(st.sampled_from("tuv"), rewards, st.integers(0, 5)), max_size=12))
    cap, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        write(run, *(episode(f"e{n}", task, reward, turns=turns) for n, (task, reward, turns) in enumerate(drawn)))
        rules = ChoiceRules(ranges={"turns": (1, 4)}, best=cap, limit=most, rate=(-0.5, 0.9))
        found = choose([run], rules)
        left = [entry.facts for entry in found.entries]
        assert len(left) + sum(count for _, count in found.taken) == len(drawn)
        assert len(left) <= most and all(sum(f["task"] == task for f in left) <= cap for task in "tuv")
        for facts in left:
            graded = [reward for task, reward, _ in drawn if task == facts["task"] and reward is not None]
            assert 1 <= facts["turns"] <= 4 and not facts["infra"] and sum(r == 1.0 for r in graded) / len(graded) < 0.9
        assert choose([run, run], rules).entries == found.entries


async def test_a_selection_reads_like_a_run_and_names_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "tokenizer_of", lambda model: CharTokenizer())
    monkeypatch.setattr(audit, "FormatReading", lambda spec, trimmed: CallReading())
    records = [msgspec.structs.replace(await played(), episode=name) for name in "abcd"]
    one, two, out, again = (tmp_path / name for name in ("one", "two", "out", "again"))
    write(one, *records[:2], episode("old", reward=None), name="first")
    write(one, records[2], name="second")
    write(two, records[3], records[0])
    (one / "run.json").write_text('{"key": "k1", "started": 1}')
    (one / "config.yaml").write_text("trainer:\n  project_name: p\n  experiment_name: mine\n")
    assert main([str(one), str(two), "--out", str(out), "--instance-ids", "t"]) == 0
    said = capfd.readouterr().out
    assert "6 episodes read" in said and "1 taken by: there twice" in said and "4 chosen, of 1 tasks" in said
    assert names(out) == ["a", "b", "c", "d"]
    assert [msgspec.structs.replace(r, number=0, previous=b"") for r in Reader(out)] == records
    assert audit.main([str(out)]) == 0
    told = json.loads((out / "selection.json").read_text())
    first, second = told["sources"]
    assert (first["kind"], first["key"], first["experiment"], second["kind"]) == ("training", "k1", "mine", "records")
    assert [(file["read"], file["chosen"]) for file in first["files"] + second["files"]] == [(3, 2), (1, 1), (2, 1)]
    assert told["models"] == {"m": 4} and told["versions"]["records"] == 5 and told["rules"]["seed"] == 0
    # A selection of a selection knows where it is from.
    assert main([str(out), "--out", str(again), "--limit", "1"]) == 0
    assert json.loads((again / "selection.json").read_text())["sources"][0]["sources"] == told["sources"]


def test_a_record_with_fields_of_a_later_version_is_copied_whole(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run" / "episodes", "w")
    later = msgspec.msgpack.decode(msgspec.msgpack.encode(episode("a"))) | {"new": [1, 2]}
    writer._write(msgspec.msgpack.encode(later))
    writer.close()
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    (path,) = Reader(tmp_path / "out").files()
    import zstandard

    frame = path.read_bytes()[12:]
    assert msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(frame))["new"] == [1, 2]


def test_broken_records_are_lines_and_the_others_are_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    path = write(run, *(episode(name) for name in "abcd"), name="flipped")
    data = bytearray(path.read_bytes())
    second = data.index(b"CEP1", 1)
    data[second + 20] ^= 1
    path.write_bytes(data)
    torn = write(run, episode("e"), episode("f"), name="torn")
    torn.write_bytes(torn.read_bytes()[:-3])
    foreign = write(run, episode("g"), empty_record(version=9), episode("h"), name="version")
    headless = write(run, episode("i"), episode("j"), name="x")
    data = bytearray(headless.read_bytes())
    data[data.index(b"CEP1", 1)] ^= 1
    headless.write_bytes(data)
    write(run, episode("k"), empty_record(verdict={}), name="z")
    assert main([str(run), "--out", str(out)]) == 0
    assert names(out) == list("acdeghik")
    warnings = capfd.readouterr().err.splitlines()
    places = [f"{path}, offset {second}: the record's checksum is wrong", f"{foreign}, offset ", f"{headless}, offset "]
    assert len(warnings) == 5 and all(line.startswith(f"warning: {run}/") for line in warnings)
    for place in [
        *places,
        f"{torn}, offset ",
        "record version 9",
        "the rest of the file",
        "not the record of an episode",
    ]:
        assert sum(place in line for line in warnings) == 1, place
    assert json.loads((out / "selection.json").read_text())["left_out"] == [line[9:] for line in warnings]


async def test_what_the_audit_finds_something_in_is_not_chosen(tmp_path: Path) -> None:
    record = await played()
    damaged = msgspec.structs.replace(record, episode="b", rows=[])
    write(tmp_path, msgspec.structs.replace(record, episode="a"), damaged)
    assert chosen(tmp_path) == ["a"] and chosen(tmp_path, audited=False) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN"], "neither --out, for episodes, nor --tasks"),
        (["RUN", "--tasks", "T"], "--tasks needs --tasks-out"),
        (["RUN", "--out", "OUT", "--tasks-out", "T"], "--tasks-out needs --tasks"),
        (["/nowhere", "--out", "OUT"], "/nowhere: no such run directory or record file"),
        (["RUN", "--out", "OUT", "--range", "turn=1:2"], "--range turn: there is no such figure; did you mean turns?"),
        (["RUN", "--out", "OUT", "--range", "task=1:2"], "--range task: there is no such figure"),
        (["RUN", "--out", "RUN/selected"], "is inside of a RUN"),
        (["RUN", "--out", "KEPT"], "KEPT is there already; add --overwrite"),
        (["RUN", "--out", "KEPT", "--overwrite"], "is no selection, so it stays"),
        (["RUN", "--out", "OUT", "--tasks", "/no.parquet"], "/no.parquet: cannot be read as parquet"),
    ],
)
def test_a_wrong_command_is_a_line_and_writes_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "RUN", episode("a"))
    (tmp_path / "KEPT").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("wrong", [["--range", "turns"], ["--range", "turns=2:1"], ["--rate", "x:1"], ["--best", "0"]])
def test_a_wrong_value_is_named(wrong: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["RUN", "--out", "OUT", *wrong])
    assert ended.value.code == 2 and f"argument {wrong[0]}: " in capfd.readouterr().err


def test_overwriting_replaces_a_selection_and_an_empty_one_is_not_written(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, episode("a"), episode("b", reward=0.0))
    command = [str(run), "--out", str(out)]
    assert main([*command, "--resolved"]) == 0 and names(out) == ["a"]
    assert main([*command, "--unresolved", "--overwrite"]) == 0 and names(out) == ["b"]
    assert main([*command, "--split", "none", "--overwrite"]) == 1 and names(out) == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, *(episode(f"e{n}", patch=os.urandom(5000)) for n in range(20)))
    command = [sys.executable, "-m", "rl.data.select", str(run), "--out", str(out)]

    done = subprocess.run(full_at(20_000, command), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "stopped: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_record_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, episode("a"))
    found = choose([tmp_path], ChoiceRules())
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptRecordError, match="has changed since it was read"):
        list(found.records())


def test_tasks_are_chosen_by_their_measured_rates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tasks(tmp_path, seed=3, n_train=4, n_heldout=1)
    tasks = load_tasks(tmp_path / "train.parquet")
    hard, mixed, easy, _ = (task.instance_id for task in tasks)
    resolved = {hard: 0, mixed: 1, easy: 4}
    never, dry = {"outcome": "unresolved", "reason": "not_graded", "reward": None, "detail": ""}, "dry"
    write(
        tmp_path / "probe",
        *(episode(f"{task}-{n}", task, float(n < good)) for task, good in resolved.items() for n in range(4)),
        *(episode(f"lost-{n}", mixed, None) for n in range(3)),
        empty_record(episode=dry, task=mixed, verdict=never),
    )  # fmt: skip
    out = tmp_path / "deeper" / "tasks.parquet"
    command = [str(tmp_path / "probe"), "--tasks", str(tmp_path / "train.parquet"), "--rate", "0.1:0.9"]
    assert main([*command, "--tasks-out", str(out), "--min-episodes", "4"]) == 0
    assert "1 of 4 tasks were measured and fit" in capfd.readouterr().out
    (row,) = pyarrow.parquet.read_table(out).to_pylist()
    low, high = wilson(0.25, 4)
    assert (row["instance_id"], row["episodes"], row["resolve_rate"]) == (mixed, 4, 0.25)
    assert (row["resolve_rate_low"], row["resolve_rate_high"]) == (low, high)
    assert load_tasks(out)[0].snapshot == tasks[1].snapshot
    # Into a selection, and measured anew: the columns are replaced.
    second = [str(tmp_path / "probe"), "--tasks", str(out), "--out", str(tmp_path / "out")]
    assert main(second) == 0
    table = pyarrow.parquet.read_table(tmp_path / "out" / "tasks.parquet")
    assert table.column_names.count("resolve_rate") == 1 and table.num_rows == 1
    assert load_tasks(tmp_path / "out" / "tasks.parquet")[0].snapshot == tasks[1].snapshot
    assert main([*command, "--tasks-out", str(out), "--min-episodes", "9"]) == 1


def test_an_unknown_figure_is_an_error_also_in_the_api(tmp_path: Path) -> None:
    write(tmp_path, episode("a"))
    with pytest.raises(SelectError, match="there is no such figure"):
        choose([tmp_path], ChoiceRules(ranges={"x": (0, 1)}))
