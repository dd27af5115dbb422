"""Fine-tuning in rounds: collect, select, fine-tune, evaluate.

    RUN/iteration_0/evaluation/           the policy as it is, on the held-out tasks
    RUN/iteration_N/collection/           the training tasks as the policy of the round before played them
    RUN/iteration_N/data/                 what was selected of that (a selection: it reads like a run)
    RUN/iteration_N/model/, rows.parquet  the policy, and what it was trained on (rl.sft.fine_tune)
    RUN/iteration_N/evaluation/           the policy on the held-out tasks
    RUN/iteration_N/report.json           all figures of the round
    RUN/rounds.md                         the table

Each step's result is whole or not there, and evaluation and collection know which episodes they have. So a run that is
killed goes on with the step that it was in and, within these two steps, with the episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task, load_tasks
from rl.data.choice import ChoiceRules, choose
from rl.data.select import summary, write
from rl.evaluate.config import evaluation_of
from rl.evaluate.run import Purpose, play_all
from rl.evaluate.serve import start_server
from rl.run.forks import Forks
from rl.run.screen import Screen
from rl.run.vllm_server import CPU_SERVER, VllmServer
from rl.run.weights import Weights
from rl.sft.fine_tune import tune
from rl.sft.trainer import TRAINER, on_device
from rl.traces.collect.outputs import Collection
from rl.traces.rows import RowsError
from rollout import files


def play_rounds(config: DictConfig, model: str, run: Path, screen: Screen) -> None:
    """Evaluate ``model``, then do the rounds that ``run`` lacks. Raises what ``rl.sft``'s command reports."""
    rounds = _Rounds(config, model, run, screen)
    reports: list[dict[str, Any]] = []
    try:
        for number in range(config.sft.rounds + 1):
            reports.append(rounds.one(number))
            _show(reports, run, screen)
            if rounds.spent(number) >= (config.sft.budget or float("inf")):
                screen.say(f"the budget of {config.sft.budget} episodes is spent")
                break
    finally:
        rounds.end_server()


class _Rounds:
    """This plays a run's rounds. A vLLM server lives from a policy's evaluation to the next collection's end."""

    def __init__(self, config: DictConfig, model: str, run: Path, screen: Screen) -> None:
        self.config, self.first, self.run, self.screen = config, model, run, screen
        self.tasks, self.held_out = _tasks(config.data.train_files), _tasks(config.data.val_files)
        self._server: VllmServer | None = None
        self._serves = ""

    @functools.cached_property
    def _forks(self) -> Forks | None:
        """Return what starts server and trainer on a CPU, where most of a toy's round would be their imports."""
        if self.config.trainer.device != "cpu":
            return None
        return Forks(CPU_SERVER, TRAINER, "rl.sft.__main__", environment=on_device(self.config))

    def place(self, number: int) -> Path:
        return self.run / f"iteration_{number}"

    def policy(self, number: int) -> str:
        return str(self.place(number) / "model") if number else self.first

    def spent(self, number: int) -> int:
        """Return how many episodes were selected in the rounds up to ``number``."""
        return sum(_read(self.place(n) / "data" / "selection.json")["episodes"] for n in range(1, number + 1))

    def one(self, number: int) -> dict[str, Any]:
        """Do a round, or what it lacks, and return its report."""
        place = self.place(number)
        if (place / "report.json").exists():
            return _read(place / "report.json")
        place.mkdir(exist_ok=True)
        made: dict[str, Any] = {"iteration": number}
        if number:
            self.screen.say(f"round {number} of {self.config.sft.rounds}")
            made["collection"] = self._collect(number)
            made["selection"] = self._select(number)
            self.end_server()
            made["sft"] = self._tune(number)
        made["policy"] = self.policy(number)
        made["evaluation"] = self._evaluate(number)
        files.write(place / "report.json", json.dumps(made, indent=1) + "\n", synced=True)
        return made

    def _evaluate(self, number: int) -> dict[str, Any]:
        values = {"samples": self.config.actor_rollout_ref.rollout.val_kwargs.n}
        return self._play("evaluation", number, number, self.held_out, values)

    def _collect(self, number: int) -> dict[str, Any]:
        count = min(self.config.sft.tasks or len(self.tasks), len(self.tasks))
        tasks = [self.tasks[n % len(self.tasks)] for n in range((number - 1) * count, number * count)]
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {f"sampling.{name}": rollout[name] for name in ("temperature", "top_p", "top_k")}
        return self._play("collection", number, number - 1, tasks, {"epochs": self.config.sft.samples, **sampling})

    def _play(
        self, what: str, number: int, policy: int, tasks: Sequence[Task], values: dict[str, Any]
    ) -> dict[str, Any]:
        """Play what a round's evaluation or collection lacks, with the policy of a round; return the results."""
        place = self.place(number) / what
        found = _read(place / "results.json") if (place / "results.json").exists() else {}
        if not found.get("complete"):
            model = self.policy(policy)
            called = f"{self.run.name}-{policy}"
            values |= {"policy": model, "out": str(place), "name": called, "store": self.config.store}
            program = {"collection": "collect", "evaluation": "evaluate"}[what]
            config = evaluation_of(self.config, values, program)
            purpose = Collection(config) if program == "collect" else Purpose()
            purpose.quiet = True  # the rounds' table shows the results
            server = self._serve(model, config, place)
            self.screen.say(f"{program}: policy {policy}, {len(tasks)} tasks")
            weights = Weights(model, step=policy)
            asyncio.run(play_all(config, weights, list(tasks), self.screen, purpose, server))
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # asyncio has set the default
            found = _read(place / "results.json")
        keys = ("complete", "tasks", "samples", "episodes", "resolved", "pass_at_1", "verdicts", "infra")
        return {key: found[key] for key in keys}

    def _serve(self, model: str, config: DictConfig, place: Path) -> VllmServer:
        if self._server is None or self._serves != model:
            self.end_server()
            self.screen.say(f"starting a vLLM server of {model}")
            log = place.parent / "vllm.log"
            self._server, self._serves = start_server(model, config.max_context, config.serve, log, self._forks), model
        return self._server

    def end_server(self) -> None:
        """End the server, if one is there."""
        if self._server is not None:
            self._server.close()
        self._server = None

    def _select(self, number: int) -> dict[str, Any]:
        """Choose what is trained on. Raises RowsError if nothing is left."""
        out = self.place(number) / "data"
        if not (out / "selection.json").exists():
            rules: Any = OmegaConf.to_container(self.config.sft.select)
            budget = self.config.sft.budget
            left = None if budget is None else budget - self.spent(number - 1)
            chosen = choose([self.place(number) / "collection"], ChoiceRules(limit=left, **rules))
            told = summary(chosen)
            if not chosen.entries:
                taken = ", ".join(f"{one['rule']} took {one['episodes']}" for one in told["taken"] if one["episodes"])
                raise RowsError(
                    f"round {number}: none of {told['read']} episodes is left to train on ({taken}); take more samples "
                    "(sft.samples), easier tasks, or other rules (sft.select)"
                )
            with files.making(out) as new:
                write(chosen, told, new)
        told = _read(out / "selection.json")
        self.screen.say(f"selected {told['episodes']} of {told['read']} episodes, of {told['tasks']} tasks")
        return {key: told[key] for key in ("read", "episodes", "tasks", "resolved", "taken")}

    def _tune(self, number: int) -> dict[str, Any]:
        every = self.config.sft.accumulate
        sources = [self.place(n) / "data" for n in range(1 if every else number, number + 1)]
        start = self.first if every else self.policy(number - 1)
        place, seed = self.place(number), self.config.seed + number
        return tune(self.config, start, sources, place, seed, self.screen, self._forks)


def _show(reports: Sequence[dict[str, Any]], run: Path, screen: Screen) -> None:
    """Print the table of the rounds so far, and write it to rounds.md."""
    from rich.markdown import Markdown

    head = ("round", "resolved", "selected", "rows", "tokens", "held-out", "95 %", "lost")
    lines = [head, ["---"] * len(head), *map(_row, reports)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    screen.print(Markdown(text))
    files.write(run / "rounds.md", text, synced=True)


def _row(report: dict[str, Any]) -> list[str]:
    """Return round, resolved of the training episodes, what was selected and trained on, held-out pass@1 with its
    interval, and the episodes that were lost to the infrastructure."""
    played, chosen, sft, held_out = (report.get(key, {}) for key in ("collection", "selection", "sft", "evaluation"))
    rate = held_out["pass_at_1"]
    share = (f"{rate['value']:.3f}", f"{rate['low']:.3f} to {rate['high']:.3f}") if rate else ("-", "-")
    lost = sum(one["infra"]["episodes"] for one in (played, held_out) if one)
    resolved = f"{played['resolved']} of {played['episodes']}" if played else "-"
    figures = (chosen.get("episodes", "-"), sft.get("rows", "-"), sft.get("trained", "-"))
    return [str(report["iteration"]), resolved, *map(str, figures), *share, str(lost)]


def _tasks(named: Any) -> list[Task]:
    """Return the tasks of a file, or of all files of a list."""
    return [task for file in ([named] if isinstance(named, str) else named) for task in load_tasks(Path(file))]


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
