"""This module tests the ladder of proofs on a GPU: its table, what is run again, and rungs that fail, each a real
process.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
RUNGS = '''
import os, subprocess, sys, time
from pathlib import Path
from rl.metrics.figures import Figure

def good(place):
    with open(Path(place.shared, "calls"), "a") as file:
        file.write("good ")
    yield Figure("weight | of a feather", "< 1 g", "0.5 g", True)
    yield Figure("seconds", "", str(len(place.keys)))

def wrong(place):
    yield Figure("two and two", "4", "5", False)

def broken(place):
    yield Figure("before", "", "seen")
    print("on its way", flush=True)
    raise RuntimeError("the end of the world")

def dies(place):
    os._exit(9)
    yield

def slow(place):
    """Starts a process that leaves its session and loses its parent."""
    code = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code + " # " + place.directory])
    yield Figure("seen", "", "before the end")
    time.sleep(600)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu_ladder, whose rungs are found in ``fake_rungs``."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    (tmp_path / "fake_rungs.py").write_text(RUNGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return importlib.import_module("gpu_ladder")


def ladder(module: Any, where: Path, *names: str, device: str = "cuda", **more: Any) -> Any:
    rungs = tuple(module.Rung(name, f"{name} is expected", f"fake_rungs:{name}") for name in names)
    return module.Ladder(rungs, device, where / "out", where / "work", **{"limit_s": 60, **more})


def test_a_rung_that_fails_stops_no_other_and_says_what_was_seen(module: Any, tmp_path: Path) -> None:
    climbed = ladder(module, tmp_path, "wrong", "broken", "dies", "nothing", "good", keys=("a=1", "b=2"))
    results = climbed.climb()
    assert [result["state"] for result in results.values()] == [
        "failed: not as expected",
        "failed: it ended with 1",
        "failed: it ended with 9",
        "failed: it ended with 1",
        "passed",
    ]
    assert results["broken"]["figures"][0]["seen"] == "seen"
    assert "on its way" in results["broken"]["log"] and results["broken"]["log"][-1].endswith("the end of the world")
    assert results["good"]["figures"][1]["seen"] == "2" and results["good"]["log"] == []

    written = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert written["rungs"] == results and written["device"] == "cuda"
    table = (tmp_path / "out" / "ladder.md").read_text()
    assert "|  | two and two | 4 | 5 | **no** |" in table
    assert "|  | weight \\| of a feather | < 1 g | 0.5 g | yes |" in table
    assert "    RuntimeError: the end of the world" in table
    assert sorted(os.listdir(tmp_path / "out")) == ["ladder.json", "ladder.md"]


def test_the_time_limit_ends_a_rung_and_all_that_it_started(module: Any, tmp_path: Path) -> None:
    results = ladder(module, tmp_path, "slow", limit_s=15).climb()
    assert results["slow"]["state"] == "failed: not done after 15 s"
    assert results["slow"]["figures"][0]["seen"] == "before the end"
    mine = str(tmp_path / "work" / "slow")
    for process in psutil.process_iter(["cmdline"]):
        assert not any(mine in word for word in process.info["cmdline"] or []), process


def test_what_has_a_result_is_run_again_only_when_asked(module: Any, tmp_path: Path) -> None:
    def calls() -> int:
        return (tmp_path / "work" / "shared" / "calls").read_text().count("good")

    first = ladder(module, tmp_path, "good", "wrong").climb(only=["good"])
    assert list(first) == ["good"]
    assert "**not run yet**" in (tmp_path / "out" / "ladder.md").read_text()
    second = ladder(module, tmp_path, "good", "wrong").climb()
    assert second["good"] == first["good"] and list(second) == ["good", "wrong"] and calls() == 1
    ladder(module, tmp_path, "good", "wrong").climb(only=["good"], again=True)
    assert calls() == 2
    with pytest.raises(ValueError, match="results of device cuda; give another --out"):
        ladder(module, tmp_path, "good", device="cpu").climb()


def test_nothing_is_started_that_the_budget_may_not_last_for(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert ladder(module, tmp_path, "good", "wrong", limit_s=60).climb(budget_s=59) == {}
    longer = module.Rung("good", "", "fake_rungs:good", limits=1.6)
    assert module.Ladder((longer,), "cuda", tmp_path / "out", tmp_path / "work", limit_s=60).climb(budget_s=95) == {}
    assert "good: not started, too little is left of the budget" in capsys.readouterr().out


def test_on_a_cpu_a_rung_that_needs_a_gpu_is_not_measured(module: Any, tmp_path: Path) -> None:
    rung = module.Rung("good", "", "fake_rungs:good", needs_gpu=True)
    results = module.Ladder((rung,), "cpu", tmp_path / "out", tmp_path / "work").climb()
    assert results["good"]["state"] == "not measured: needs a GPU" and not (tmp_path / "work").exists()


def test_the_ladder_of_this_project(module: Any) -> None:
    rungs = importlib.import_module("ladder_rungs")
    assert [rung.name for rung in module.RUNGS] == [
        "versions",
        "engine",
        "grpo",
        "size",
        "lora",
        "experts",
        "hybrid",
        "episodes",
        "ahead",
    ]
    for rung in module.RUNGS:
        name, _, function = rung.function.partition(":")
        assert name == "ladder_rungs" and callable(getattr(rungs, function))
    page = (ROOT / "docs" / "planning.md").read_text()
    assert all(f"| {number} `{rung.name}` |" in page for number, rung in enumerate(module.RUNGS, 1))


def test_an_engine_without_the_new_weights_and_one_that_disagrees_are_seen(module: Any) -> None:
    rungs = importlib.import_module("ladder_rungs")
    old, new = {"ids": [1, 2], "logprobs": [-1.0, -2.0]}, {"ids": [1, 2], "logprobs": [-1.0, -2.5]}
    assert rungs._changed("reply", [old, new]).ok and rungs._changed("reply", [old, {**new, "ids": [1, 3]}]).ok
    assert not rungs._changed("reply", [old, old]).ok and not rungs._changed("reply", [old]).ok
    steps = [
        {"training/rollout_actor_probs_pearson_corr": correlation, "rollout_corr/kl": kl}
        for correlation, kl in ((0.999, 0.001), (0.98, -0.02))
    ]
    assert [figure.ok for figure in rungs._agreement(steps[:1])] == [True, True]
    assert [(figure.seen, figure.ok) for figure in rungs._agreement(steps)] == [("0.9800", False), ("-0.02", False)]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_the_command_without_a_gpu_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "gpu_ladder.py", "--out", tmp_path / "out"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu_ladder: no GPU here") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
