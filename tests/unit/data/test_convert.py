"""This module tests the conversion command: sources, filters, splits, output and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.data import source
from rl.data.convert import main
from rl.data.filters import Selection, split
from rl.data.source import SourceError, read_rows
from tests import datasets


def rows(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Return rows that differ in repository (one of 7), number of failing tests, statement and difficulty."""
    return [
        datasets.swe_bench(
            instance_id=f"acme__calc{number % 7}-{number}",
            repo=f"Acme/calc{number % 7}",
            FAIL_TO_PASS=json.dumps([f"t{i}" for i in range(1 + number % 3)]),
            problem_statement="x" * (1 + number),
            difficulty=["<15 min fix", "1-4 hours"][number % 2],
            **changes,
        )
        for number in range(count)
    ]


def jsonl(path: Path, some: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


def parquet(path: Path, some: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), path)
    return path


def run(tmp_path: Path, rows_at: Path | str, *options: str, name: str = "swe-bench", status: int = 0) -> list[str]:
    """Convert, check the exit status, and return the instance ids that were written."""
    out = tmp_path / "out" / "tasks.parquet"
    assert main([name, str(rows_at), "--out", str(out), *options]) == status
    return [task.instance_id for task in load_tasks(out)] if status == 0 else []


def report(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "tasks.convert.json").read_text())


@pytest.mark.parametrize(
    "write",
    [
        lambda d: jsonl(d / "a.jsonl", rows(3)),
        lambda d: parquet(d / "a.parquet", rows(3)),
        lambda d: parquet(d / "test-00000-of-00001.parquet", rows(3)).parent,
        lambda d: parquet(d / "data/test-00000-of-00001.parquet", rows(3)).parent.parent,
    ],
)
def test_local_sources(write: Callable[[Path], Path], tmp_path: Path) -> None:
    place = tmp_path / "source"
    place.mkdir()
    assert run(tmp_path, write(place)) == [row["instance_id"] for row in rows(3)]


def test_a_json_file_is_a_list_or_a_map(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(rows(2)))
    (tmp_path / "map.json").write_text(json.dumps({row["instance_id"]: row for row in rows(2)}))
    assert run(tmp_path, tmp_path / "list.json") == run(tmp_path, tmp_path / "map.json") != []


def test_a_split_selects_files_or_rows(tmp_path: Path) -> None:
    place = tmp_path / "source"
    place.mkdir()
    parquet(place / "train-00000-of-00002.parquet", rows(2))
    parquet(place / "train-00001-of-00002.parquet", rows(4)[2:])
    parquet(place / "test.parquet", rows(5)[4:])
    assert len(run(tmp_path, place, "--split", "train")) == 4
    assert len(run(tmp_path, place)) == 5
    run(tmp_path, place, "--split", "dev", status=2)
    marked = [row | {"split": name} for row, name in zip(rows(3), ["dev", "test", "test"], strict=True)]
    assert len(run(tmp_path, jsonl(tmp_path / "marked.jsonl", marked), "--split", "test")) == 2
    run(tmp_path, jsonl(tmp_path / "plain.jsonl", rows(2)), "--split", "test", status=2)


def test_a_hub_dataset_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `datasets` takes a local directory as the dataset of that name, so no hub is needed."""
    import datasets as library

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me/mine").mkdir(parents=True)
    parquet(
        tmp_path / "me/mine/train.parquet", [datasets.swe_rebench(), datasets.swe_rebench(instance_id="acme__calc-9")]
    )
    found = list(source._hub("me/mine", "train"))
    assert [row["instance_id"] for row in found] == ["acme__calc-8", "acme__calc-9"]
    assert (
        found[0]["install_config"]["log_parser"] == "parse_log_pytest" and found[0]["FAIL_TO_PASS"] == datasets.FAILING
    )
    with pytest.raises(SourceError, match=r"hub dataset me/mine, split test: .*train"):
        list(source._hub("me/mine", "test"))


def test_the_default_source_is_the_sets_own_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(source, "_hub", lambda name, split: asked.append((name, split)) or [datasets.swe_smith()])
    out = tmp_path / "tasks.parquet"
    assert main(["swe-smith", "--out", str(out)]) == 0
    assert main(["swe-smith", "me/mine", "--split", "dev", "--out", str(out)]) == 0
    assert asked == [("SWE-bench/SWE-smith", "train"), ("me/mine", "dev")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.parquet", None, "no such file"),
        ("no parquet.parquet", "x", "cannot be read"),
        ("half.jsonl", '{"instance_id": ', "cannot be read"),
        ("list.jsonl", "[1]\n", "line 1: list, not a row"),
        ("text.json", '"x"', "neither a list"),
        ("number.json", "[5]", "row 0: int, not a row"),
        ("rows.csv", "a,b", "must end in"),
    ],
)
def test_a_bad_source_is_reported_in_one_line(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SourceError) as failure:
        list(read_rows(str(tmp_path / name), None, "test"))
    assert words in str(failure.value) and name in str(failure.value) and "\n" not in str(failure.value)
    run(tmp_path, tmp_path / name, status=2)


def test_swe_bench_pros_scripts_are_read_from_a_checkout(tmp_path: Path) -> None:
    rows_at, checkout = jsonl(tmp_path / "a.jsonl", [datasets.swe_bench_pro()]), tmp_path / "pro"
    run(tmp_path, rows_at, name="swe-bench-pro", status=1)
    assert report(tmp_path)["refused"] == {"no_recipe": 1} and "--scripts" in report(tmp_path)["rows"][0]["detail"]
    options = ("--scripts", str(datasets.write_pro_scripts(checkout)))
    assert run(tmp_path, rows_at, *options, name="swe-bench-pro") == [datasets.swe_bench_pro()["instance_id"]]
    assert load_tasks(tmp_path / "out" / "tasks.parquet")[0].workdir == "/app"


def test_refused_rows_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        datasets.swe_bench(instance_id="a__b-1", patch=None),
        datasets.swe_bench(instance_id="a__b-2", patch=""),
        datasets.swe_bench(instance_id="a__b-3", FAIL_TO_PASS=[]),
    ]
    assert len(run(tmp_path, jsonl(tmp_path / "a.jsonl", [*rows(2), *bad]))) == 2
    found = report(tmp_path)
    assert found["refused"] == {"no_gold_patch": 2, "no_failing_test": 1} and found["read"] == 5
    assert [(row["number"], row["instance_id"]) for row in found["rows"]] == [
        (2, "a__b-1"),
        (3, "a__b-2"),
        (4, "a__b-3"),
    ]
    shown = capsys.readouterr().out
    assert "no_gold_patch" in shown and "no_failing_test" in shown


def test_the_command_fails_if_no_row_can_be_converted(tmp_path: Path) -> None:
    run(tmp_path, jsonl(tmp_path / "a.jsonl", [datasets.swe_bench(patch=None)]), status=1)
    assert report(tmp_path)["refused"] == {"no_gold_patch": 1} and not (tmp_path / "out/tasks.parquet").exists()


def test_filters_select_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", rows(30))

    def numbers(*options: str) -> list[int]:
        return [int(name.rpartition("-")[2]) for name in run(tmp_path, file, *options)]

    everything = range(30)
    assert numbers("--repo", "acme/calc3", "ACME/*4") == [n for n in everything if n % 7 in (3, 4)]
    assert numbers("--min-failing", "2", "--max-failing", "2") == [n for n in everything if n % 3 == 1]
    assert numbers("--min-statement", "5", "--max-statement", "9") == [4, 5, 6, 7, 8]
    assert numbers("--difficulty", "1-4 hours", "--limit", "3") == [1, 3, 5]
    assert report(tmp_path)["dropped"] == {"--difficulty": 15, "--limit": 12}
    (tmp_path / "ids").write_text("acme__calc2-9\nacme__calc3-10\n")
    assert numbers("--instance-ids", f"@{tmp_path / 'ids'}", "acme__calc0-0") == [0, 9, 10]
    run(tmp_path, file, "--instance-ids", "acme__calc0-0", "acme__calc0-1", status=2)
    run(tmp_path, file, "--repo", "nobody/*", status=2)


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", rows(30))
    options = ("--shuffle", "7", "--limit", "20", "--heldout-share", "0.3")
    contents = []
    for name in ("one", "two"):
        run(tmp_path / name, file, *options)
        contents.append([path.read_bytes() for path in sorted((tmp_path / name / "out").glob("*.parquet"))])
    assert contents[0] == contents[1] and len(contents[0]) == 2


def test_the_seed_alone_decides_the_order_of_a_shuffle(tmp_path: Path) -> None:
    made = [{"instance_id": str(n), "repo": "a/b"} | BASE for n in range(50)]
    first, _ = Selection(shuffle=1).apply(made)
    again, _ = Selection(shuffle=1).apply(made[::-1])
    other, _ = Selection(shuffle=2).apply(made)
    assert first == again != other and sorted(map(id, first)) == sorted(map(id, made)) and first != made
    # Rows that are added do not change the order of the others.
    fewer, _ = Selection(shuffle=1).apply(made[:25])
    assert [row for row in first if row in fewer] == fewer


BASE = {"FAIL_TO_PASS": ["t"], "problem_statement": "x", "difficulty": None}


@pytest.mark.parametrize("by", ["repo", "instance"])
def test_rows_that_are_added_move_no_other_row_to_the_other_side(by: Any) -> None:
    made = [{"instance_id": f"i{n}", "repo": f"R/{n % 97}"} for n in range(2000)]
    training, heldout = split(made, 0.25, by, seed=3)
    assert len(training) + len(heldout) == 2000 and 350 < len(heldout) < 650
    key = "repo" if by == "repo" else "instance_id"
    assert not {row[key] for row in training} & {row[key] for row in heldout}
    fewer = split(made[500:700], 0.25, by, seed=3)
    assert all(row in side for part, side in zip(fewer, (training, heldout), strict=True) for row in part)
    assert split(made, 0.25, by, seed=4)[1] != heldout


def test_held_out_rows_are_written_to_a_second_file(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", rows(70))
    training = run(tmp_path, file, "--heldout-share", "0.3")
    heldout = [task.instance_id for task in load_tasks(tmp_path / "out/tasks.heldout.parquet")]
    assert sorted([*training, *heldout]) == sorted(row["instance_id"] for row in rows(70))
    assert not {name.split("-")[0] for name in training} & {name.split("-")[0] for name in heldout}
    run(tmp_path, file, "--repo", "acme/calc3", "--heldout-share", "0.001")
    assert not (tmp_path / "out/tasks.heldout.parquet").exists()  # its rows are for training now


@pytest.mark.parametrize("name", ["tasks.parquet", "tasks.heldout.parquet"])
def test_a_source_is_never_an_output(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = parquet(tmp_path / name, [{"no": "task"}])
    with pytest.raises(SystemExit):
        main(["swe-gym", str(source), "--out", str(tmp_path / "tasks.parquet")])
    assert source.exists() and "--out would overwrite the tasks" in capsys.readouterr().err


def test_rows_from_before_version_5_are_completed_from_recipes(tmp_path: Path) -> None:
    old = jsonl(tmp_path / "old.jsonl", [datasets.swe_bench_4()])
    new = parquet(tmp_path / "new.parquet", [datasets.swe_bench()])
    run(tmp_path, old, status=1)
    assert run(tmp_path, old, "--recipes", str(new), name="swe-bench-lite") == ["acme__calc-7"]


def test_the_output_is_a_task_file(tmp_path: Path) -> None:
    run(tmp_path, jsonl(tmp_path / "a.jsonl", [datasets.swe_smith()]), name="swe-smith")
    task = load_tasks(tmp_path / "out/tasks.parquet")[0]
    assert task.setup_patch == datasets.BUG and task.patch == datasets.GOLD
    assert task.hidden_paths == ("tests/test_calc.py", "tests/test_more.py")
    row = pyarrow.parquet.read_table(tmp_path / "out/tasks.parquet").to_pylist()[0]
    assert row["set"] == "swe-smith" and row["difficulty"] is None
