"""This module tests the command line of rl.evaluate: what is wrong with it is said before anything is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.evaluate.__main__ import main
from rl.quickstart.tasks import make_tasks
from tests.evaluate_kit import HOSTED


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=3, n_train=4, n_heldout=2)
    return out / "train.parquet"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "neither is set"),
        (["policy=x", "endpoint=http://x"], "both are set"),
        (["policy=/no/such/place"], "policy: no directory /no/such/place"),
        (["endpoint=localhost:8000"], "it must be a URL"),
        (["endpoint=http://127.0.0.1:9"], "tasks is not set"),
        (["endpoint=http://127.0.0.1:9", "tasks=/no/tasks.parquet"], "tasks: no file /no/tasks.parquet"),
        (["endpoint=http://127.0.0.1:9", "protocol=messages"], "needs model=NAME"),
        (["endpoint=http://127.0.0.1:9", "protocol=chat"], "protocol=chat needs model=NAME"),
        (["endpoint=http://127.0.0.1:9", "protocol=tokn"], "it must be tokens, messages or chat"),
        ([*HOSTED, "key_env=NO_SUCH_KEY"], "NO_SUCH_KEY, which is not set"),
        ([*HOSTED, "samples=0"], "samples is 0"),
        ([*HOSTED, "grading.timeout_s=-1"], "grading.timeout_s is -1"),
        ([*HOSTED, "tsks=x"], "tsks"),
        ([*HOSTED, "shard=3/2"], "shard: '3/2' is no shard"),
        ([*HOSTED, "shard=1/2", "merge=true"], "merge=true is for all shards"),
        (["compare", "/no/a", "/no/b"], "/no/a has no results.json"),
    ],
)
def test_a_wrong_command_is_reported_in_a_line_with_status_2(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = [f"root={tmp_path}/root"] if arguments and arguments[0] != "compare" else []
    assert main([*arguments, *root] or [f"root={tmp_path}/root"]) == 2
    out, err = capfd.readouterr()
    assert said in err and all(line.startswith("config: ") for line in err.splitlines()) and not out
    assert not (tmp_path / "root").exists()


def test_all_that_is_wrong_with_a_command_is_told_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = ["tsks=x", "samples=many", "+scale=tny", "serve.enforce_eager=perhaps", "sandbox=x"]
    assert main(["endpoint=localhost", f"root={tmp_path}", *wrong]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(
        [
            "config: tsks=x: there is no such key; did you mean tasks?",
            "config: samples is 'many'; it must be a number above 0",
            "config: +scale=tny: there is no scale 'tny'; did you mean tiny? there are cpu, full, gpu, smoke, "
            "smoke_tiny, tiny, tiny_tp2",
            "config: serve.enforce_eager is 'perhaps'; it must be true or false",
            "config: sandbox=x: there is no sandbox 'x'; there are docker, local, ssh",
        ]
    )
    assert main(["endpoint=localhost", f"root={tmp_path}", "protocol=tokn", "key_env=NO_SUCH_KEY"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 4  # and no tasks


def test_an_absent_endpoint_is_reported_before_anything_is_created(
    tasks_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["protocol=messages", "model=m"]):
        assert main(["endpoint=http://127.0.0.1:9", f"tasks={tasks_file}", f"root={tmp_path}/root", *more]) == 2
        err = capfd.readouterr().err
        assert "does not answer" in err and len(err.splitlines()) == 1 and not (tmp_path / "root").exists()
