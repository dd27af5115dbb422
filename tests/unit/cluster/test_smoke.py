"""This module tests the table of the smoke test: what a run's own files prove, and what they do not."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl.metrics.figures import Figure
from rl.run import checkpoints, stop
from rl.smoke import Start, Starts, rows, table
from tests.check_kit import composed

AUDIT = "every sampled token is trained on once, with its log-probability"


def step(number: int, **changes: Any) -> dict[str, Any]:
    figures = {"actor/grad_norm": 0.5, "training/rollout_actor_probs_pearson_corr": 0.9999, "timing_s/step": 9.0}
    return {"step": number, "timing_s/update_weights": 0.2, **figures, **changes}


def episode(number: int, engine: str, **changes: Any) -> dict[str, Any]:
    verdict = {"resolved": True, "infra": False, "reason": None, "reward": 1.0}
    return {"step": number, "engine": engine, "turns": 3, "calls": 4, **verdict, **changes}


class Made:
    """The files of a run of two nodes with two GPUs each, stopped after its second step."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        keys = {"trainer__nnodes": 2, "trainer__n_gpus_per_node": 2, "run__dir": str(directory)}
        keys |= {"actor_rollout_ref__rollout__agent__num_workers": 2, "trainer__total_training_steps": 3}
        config = composed("+experiment=quickstart", **keys)
        OmegaConf.save(config, directory / "config.yaml", resolve=True)
        self.steps = [step(1), step(2), step(3)]
        engines = (["a:1", "a:2", "b:1", "b:2"], ["a:7", "a:8", "b:7", "b:8"])
        self.episodes: dict[str, list[Any]] = {}
        for start, numbers in ((0, (1, 2)), (1, (3,))):
            for place, host in enumerate("ab"):
                played = [episode(n, one) for n in numbers for one in engines[start][2 * place : 2 * place + 2]]
                self.episodes[f"host-{host}-{start}{place}"] = played
        disks = {name: {"write": 500.0, "read": 900.0, "gpus": 2} for name in "ab"}
        self.preflight = {"disks": disks, "links": {"gloo": {"a - b": {"gbs": 1.5}}}}
        self.starts = [Start(75, 2, 60.0), Start(0, 3, 40.0)]
        self.shards = 4

    def rows(self) -> dict[str, Figure]:
        (self.dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in self.steps))
        (self.dir / "preflight.json").write_text(json.dumps(self.preflight))
        (self.dir / "episode_metrics").mkdir(exist_ok=True)
        for name, lines in self.episodes.items():
            text = "".join(json.dumps(one) + "\n" for one in lines)
            (self.dir / "episode_metrics" / f"{name}.jsonl").write_text(text)
        actor = self.dir / "checkpoints" / "global_step_3" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        for rank in range(self.shards):
            (actor / f"model_world_size_4_rank_{rank}.pt").touch()
        checkpoints.seal(self.dir / "checkpoints", 3)
        for start in (1, 2):
            log = self.dir / "wandb" / f"offline-run-{start}" / "run.wandb"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("x")
        return {row.what: row for row in rows(self.dir, self.starts)}

    def missing(self) -> list[str]:
        """What is not proven; the audit needs real records, which tests of the audit have."""
        return [row.what for row in self.rows().values() if row.ok is False and row.what != AUDIT]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_whole_run_proves_everything(made: Made) -> None:
    found = made.rows()
    assert made.missing() == [] and "no episode" in found[AUDIT].seen and found[AUDIT].ok is False
    assert found["engines that played episodes, in each start"].seen == "4, 4"
    assert found["machines on which they were played, by name"].seen == "2"
    assert "| SIGUSR1 during a step | checkpoint, code 75 | code 75, checkpoint of step 2 | yes |" in table(
        list(found.values())
    )


@pytest.mark.parametrize(
    ("broken", "row"),
    [
        (lambda made: made.episodes["host-b-01"].clear(), "engines that played episodes, in each start"),
        (lambda made: made.episodes["host-b-11"].clear(), "agent loop workers that played episodes, in each start"),
        (lambda made: made.steps[2].update({"actor/grad_norm": 0.0}), "updates: norm of the gradient"),
        (
            lambda made: made.steps[1].update({"training/rollout_actor_probs_pearson_corr": 0.5}),
            "weight sync: correlation of the engine's and the trainer's probabilities",
        ),
        (
            lambda made: made.episodes["host-a-00"][0].update(infra=True, reward=None, reason="no_engine"),
            "boxes (local)",
        ),
        (lambda made: made.episodes["host-a-00"][0].update(reward=None), "grading"),
        (lambda made: made.steps.pop(), "the same command again"),
        (lambda made: setattr(made, "shards", 3), "parts of the checkpoint, one of each rank of the trainer"),
        (lambda made: made.starts.__setitem__(0, Start(0, 2, 1.0)), "SIGUSR1 during a step"),
        (lambda made: made.preflight["disks"].pop("b"), "nodes that answer"),
        (
            lambda made: made.preflight["links"]["gloo"].update({"a - b": {"error": "x"}}),
            "GB/s of all-reduces with gloo, the slowest",
        ),
    ],
)
def test_what_a_run_has_not_shown_is_not_proven(made: Made, broken: Any, row: str) -> None:
    broken(made)
    assert row in made.missing()


TRAIN = """
import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
stopped = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: stopped.append(1))
step = len(list((run / "checkpoints").glob("global_step_*")))
while step < 3:
    time.sleep(0.6)
    step += 1
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
    (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (run / "checkpoints" / f"global_step_{step}" / "complete").touch()
    if stopped:
        sys.exit(75)
"""


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    """Starts of a program that behaves as rl.train does with signals and checkpoints."""
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    made = Starts(tmp_path, [])
    made._command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_run_is_stopped_after_a_step_and_started_again(starts: Starts) -> None:
    first, last = starts.run(stop_after=1), starts.run()
    assert first.code == stop.STOPPED and first.checkpoint in (1, 2)
    assert (last.code, last.checkpoint, starts.stopped) == (0, 3, False)


def test_a_signal_to_the_smoke_test_is_passed_on(starts: Starts, tmp_path: Path) -> None:
    def end() -> None:
        while not (tmp_path / "metrics.jsonl").exists():  # before that it may not handle signals yet
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    assert starts.run().code == stop.STOPPED and starts.stopped
