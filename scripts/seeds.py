"""Train with several seeds, one run after the other, and write the table and the figure that a document shows.

    .venv/bin/python scripts/seeds.py quickstart [--seeds 1 2 3] [--out outputs/quickstart-seeds] [key=value ...]
    .venv/bin/python scripts/seeds.py sft tasks=16     # three rounds of fine-tuning on what resolved
    .venv/bin/python scripts/seeds.py curriculum       # tasks drawn by their rates, and uniformly
    .venv/bin/python scripts/seeds.py distill          # a policy learns from a fine-tuned teacher alone
    .venv/bin/python scripts/seeds.py agents           # in agents other than Claude Code
    .venv/bin/python scripts/seeds.py across --seeds 1 # in each agent, and then evaluated in all others
    .venv/bin/python scripts/seeds.py real policy=... data.train_files=... data.val_files=...  # docs/real-model.md

OUT.md is the table, and OUT.png shows the rates of held-out tasks with their 95 % intervals (those of training runs as
if episodes were independent). The runs are below OUT. A run that is finished is not run again, and one that was
interrupted goes on. Every run is audited. key=value: more of the command line of all runs.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from rl.config.compose import compose
from rl.evaluate.statistics import wilson
from rl.metrics.episodes import Line, read_jsonl, resolve_rate
from rl.quickstart.prepare import prepare
from rl.run.screen import Screen
from rollout import program

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.8
ROUNDS = 3
EVERY = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code", "gemini_cli", "openhands")


class Rate(NamedTuple):
    """A rate is the share of ``episodes`` that resolved at a ``place`` (a step or a round), with its interval."""

    place: int
    value: float
    low: float
    high: float
    episodes: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


class Run:
    """A run is a finished run's directory and what is in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def lines(self) -> list[Line]:
        """Return the metrics of rl.train, a line for each step."""
        return read_jsonl(self.directory / "metrics.jsonl")

    @cached_property
    def steps(self) -> list[Line]:
        """Return those lines that are of a training step."""
        return [line for line in self.lines if "timing_s/step" in line]

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """Return the reports of rl.sft; round 0 is the policy before fine-tuning."""
        files = [self.directory / f"iteration_{number}" / "report.json" for number in range(ROUNDS + 1)]
        return [json.loads(file.read_text()) for file in files]

    @cached_property
    def held_out(self) -> list[Rate]:
        """Return the rates of held-out tasks."""
        if (self.directory / "iteration_0").exists():
            found = [(one["evaluation"]["pass_at_1"], one["evaluation"]["episodes"]) for one in self.rounds]
            return [Rate(n, one["value"], one["low"], one["high"], count) for n, (one, count) in enumerate(found)]
        lines = [line for line in self.lines if "val/resolve_rate" in line]
        some = [(line["step"], line["val/resolve_rate"], int(line["val/count"])) for line in lines]
        return [Rate(step, rate, *wilson(rate, count), count) for step, rate, count in some]

    @property
    def trained(self) -> list[tuple[int, float]]:
        """Return the rate of the training tasks of each step."""
        return [(line["step"], rate) for line in self.lines if (rate := resolve_rate(line, "train")) is not None]

    def __getitem__(self, key: str) -> list[float]:
        """Return a metric of each training step."""
        return [step[key] for step in self.steps]

    def after(self, file: str) -> float:
        """Return the seconds from its start until a file was last written, interruptions included."""
        began = json.loads((self.directory / "run.json").read_text())["started"]
        return (self.directory / file).stat().st_mtime - began

    def start(self) -> str:
        """Return the seconds until the first step began, and those of preparing before."""
        first = self["time"][0] - self["timing_s/step"][0] - (self.directory / "config.yaml").stat().st_mtime
        return f"{first:.0f} (+{self.after('config.yaml'):.0f} preparing)"

    def teacher(self) -> str:
        """Return the rate of the teacher on the held-out tasks."""
        found = json.loads((self.directory.parents[2] / "teacher" / "results.json").read_text())
        return f"{found['pass_at_1']['value']:.2f} ({found['resolved']} of {found['episodes']})"

    def played_in(self, agent: str) -> Rate:
        """Return the rate of the held-out tasks in an agent, after playing what is missing."""
        out = self.directory / "across" / agent
        keys = small("agent") if agent == "claude_code" else []
        python("rl.evaluate", f"policy={self.directory}", f"out={out}", f"agent={agent}", *keys)
        found = json.loads((out / "results.json").read_text())
        one = found["pass_at_1"]
        return Rate(self.held_out[-1].place, one["value"], one["low"], one["high"], found["episodes"])


def python(*command: str) -> None:
    """Run ``python -m command``. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)


def audited(run: Run) -> str:
    """Return "ok" if ``rollout.audit`` finds nothing in a run, else "FAILED"."""
    command = [sys.executable, "-m", "rollout.audit", str(run.directory)]
    return "FAILED" if subprocess.run(command, capture_output=True, cwd=ROOT).returncode else "ok"


def finished(parent: Path, *command: str) -> Run:
    """Return the finished run in ``parent``; if there is none, ``python -m command`` makes one or goes on with one.

    Raises CalledProcessError.
    """
    if not list(parent.glob("*/done")):
        python(*command)
    return Run(next(parent.glob("*/done")).parent)


def taught(root: Path) -> list[str]:
    """Make student and teacher, once, with seed 1; return the keys that give them to a run.

    The student is the quickstart's policy after its warm start, which is right in one of four episodes. The teacher is
    that policy, fine-tuned on those episodes of the warm start that are right by chance. The tests' rewards are not in
    the student's loss.
    """
    made = prepare(compose(["+experiment=quickstart", f"run.root={root}"]), Screen())
    chosen = root / "chosen"
    if not chosen.exists():
        warm = Path(made["actor_rollout_ref.model.path"]).parent
        python("rl.data.select", str(warm), "--resolved", "--no-flags", "--out", str(chosen))
    command = ("rl.sft", "+experiment=quickstart", f"data=[{chosen}]", "trainer.logger=[]", f"run.root={root}")
    teacher = finished(root / "quickstart-sft", *command).directory
    python("rl.evaluate", f"policy={teacher}", "samples=2", f"out={root / 'teacher'}")
    keys = ["prepare=null", "~quickstart", *(f"{key}={value}" for key, value in made.items())]
    return [*keys, f"distillation.teacher_models.teacher_model.model_path={teacher / 'model'}"]


@functools.cache
def small(place: str) -> list[str]:
    """Return the keys that make Claude Code, whose settings are at ``place``, as small as the quickstart has it."""
    own: Any = OmegaConf.to_container(compose(["+experiment=quickstart"]).agent, resolve=True)
    usual = compose().agent
    return [f"{place}.{key}={json.dumps(value)}" for key, value in own.items() if value != usual[key]]


def at_home(root: Path) -> list[str]:
    """Make a policy whose warm start was in all agents, once, with seed 1; return the keys that give it to a run."""
    mix = ",".join(f"{agent}:1" for agent in EVERY)
    keys = ["agent=mixed", f"agent.mix={{{mix}}}", *small("agent.claude_code")]
    config = compose(["+experiment=quickstart", *keys, "quickstart.warm_episodes=640", f"run.root={root}"])
    return [f"policy={prepare(config, Screen())['actor_rollout_ref.model.path']}"]


@dataclass(frozen=True)
class Study:
    """A study is what is run for each seed: ``command`` with the keys of each of its ``arms``, which are named as their
    experiments are. ``columns``: of the table, beside minutes and audit. ``axis``: what a place is. ``trained``: the
    rates of training tasks are drawn, too. ``ready`` makes what all runs share and returns keys for them."""

    command: tuple[str, ...]
    arms: dict[str, tuple[str, ...]]
    columns: dict[str, Callable[[Run], object]]
    axis: str = "step"
    trained: bool = True
    ready: Callable[[Path], list[str]] = lambda _: []


QUICKSTART = Study(
    ("rl.train", "+experiment=quickstart"),
    {"quickstart": ()},
    {
        "held-out before": lambda run: run.held_out[0],
        "held-out after": lambda run: run.held_out[-1],
        "s to first step": Run.start,
        "s per step (max)": lambda run: f"{mean(run['timing_s/step']):.0f} ({max(run['timing_s/step']):.0f})",
        "lowest pearson": lambda run: f"{min(run['training/rollout_actor_probs_pearson_corr']):.4f}",
        "rows per episode": lambda run: f"{min(run['episode/rows']):.2f} to {max(run['episode/rows']):.2f}",
        "proxy ms per call": lambda run: f"{mean(run['proxy/overhead_ms']):.1f}",
        "infra failures": lambda run: f"{sum(run['infra/failures']):.0f}",
    },
)
AGENTS = {name: (f"agent={name}", f"trainer.experiment_name={name}") for name in EVERY}
STUDIES = {
    "quickstart": QUICKSTART,
    "agents": replace(QUICKSTART, arms={name: AGENTS[name] for name in ("codex", "mini_swe_agent")}),
    "across": replace(
        QUICKSTART,
        arms=AGENTS,
        columns=QUICKSTART.columns | {f"in {agent}": lambda run, agent=agent: run.played_in(agent) for agent in EVERY},
        ready=at_home,
    ),
    "real": replace(
        QUICKSTART,
        command=(
            "rl.train", "+experiment=qwen2_5_coder_0_5b", "scale=cpu", "agent.tools=[Bash]", "agent.max_turns=8",
            "agent.timeout_s=400", "grading.timeout_s=30", "algorithm.rollout_correction.bypass_mode=true",
            "actor_rollout_ref.actor.optim.lr=3e-4", "actor_rollout_ref.rollout.val_kwargs.n=1",
            "trainer.total_training_steps=8", "trainer.test_freq=8", "trainer.save_freq=1",
        ),
        arms={"qwen2_5_coder_0_5b": ()},
    ),
    "sft": Study(
        ("rl.sft", "+experiment=quickstart", f"rounds={ROUNDS}"),
        {"quickstart-sft": ()},
        {f"round {n}": lambda run, n=n: run.held_out[n] for n in range(ROUNDS + 1)}
        | {
            "played and resolved": lambda run: ", ".join(
                "{resolved}/{episodes}".format_map(one["collection"]) for one in run.rounds[1:]),
            "rows": lambda run: ", ".join(str(one["sft"]["rows"]) for one in run.rounds[1:]),
        },
        axis="round",
        trained=False,
    ),
    # Both runs of a seed have the same tasks and begin with the same policy. Their rates on training tasks cannot be
    # compared, because they draw different ones. There are 32 tasks, so that a run draws each about twice: in a single
    # pass, any order plays every task once; with 16, no policy gets to 0.8.
    "curriculum": Study(
        (
            "rl.train", "+experiment=quickstart", "trainer.logger=[]", "trainer.test_freq=2",
            "quickstart.train_tasks=32", "curriculum.readmit_after=4", "actor_rollout_ref.rollout.val_kwargs.n=1",
        ),
        {
            "uniform": ("curriculum.by_rate=false", "trainer.experiment_name=uniform"),
            "rate": ("curriculum.by_rate=true", "trainer.experiment_name=rate"),
        },
        {
            f"steps to {ENOUGH}": lambda run: next((r.place for r in run.held_out if r.value >= ENOUGH), "never"),
            "held-out, every second step": lambda run: " ".join(f"{rate.value:.2f}" for rate in run.held_out),
            "mean": lambda run: f"{mean(rate.value for rate in run.held_out):.3f}",
            "groups that teach nothing": lambda run: f"{mean(run['group/all_equal']):.2f}",
        },
        trained=False,
    ),
    "distill": Study(
        (
            "rl.train", "+experiment=quickstart", "+distill=on_policy", "ray_kwargs.ray_init.num_gpus=2",
            "trainer.logger=[]", "trainer.total_training_steps=8",
        ),
        {"quickstart": ()},
        {
            "held-out before": lambda run: run.held_out[0],
            "held-out after": lambda run: run.held_out[-1],
            "teacher": Run.teacher,
            "resolved in each step": lambda run: " ".join(f"{rate:.2f}" for _, rate in run.trained),
            "nats apart": lambda run: " to ".join(
                f"{run['actor/distillation/abs_loss'][n]:.3f}" for n in (0, -1)),
        },
        ready=taught,
    ),
}  # fmt: skip


def table(study: Study, runs: dict[tuple[int, str], Run]) -> str:
    """Return the table in Markdown: a row for each run, named by seed and arm."""
    names = ["seed", "arm"] if len(study.arms) > 1 else ["seed"]
    rows: list[Sequence[object]] = [[*names, *study.columns, "minutes", "audit"]]
    rows.append(["---"] * len(rows[0]))
    for name, run in runs.items():
        cells = [column(run) for column in study.columns.values()]
        rows.append([*name[: len(names)], *cells, f"{run.after('done') / 60:.1f}", audited(run)])
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in rows)


def draw(study: Study, runs: dict[tuple[int, str], Run], out: Path) -> None:
    """Draw the rates of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for number, ((seed, arm), run) in enumerate(runs.items()):
        shift = (number - (len(runs) - 1) / 2) * run.held_out[-1].place / 100  # so that no interval hides another
        places, values, low, high, _ = zip(*run.held_out, strict=True)
        errors = [[v - one for v, one in zip(values, low, strict=True)]]
        errors.append([one - v for v, one in zip(values, high, strict=True)])
        label, style = f"seed {seed}" + f", {arm}" * (len(study.arms) > 1), "o" if study.trained else "o-"
        bars = axes.errorbar([place + shift for place in places], values, errors, fmt=style, capsize=3, label=label)
        if study.trained:
            axes.plot(*zip(*run.trained, strict=True), alpha=0.6, linewidth=1.2, color=bars[0].get_color())
    counts = " or ".join(map(str, sorted({rate.episodes for run in runs.values() for rate in run.held_out})))
    title = "lines: the training tasks of each step; dots: " * study.trained + f"{counts} held-out episodes each"
    axes.set(xlabel=study.axis, ylabel="share of episodes resolved", ylim=(-0.02, 1.02))
    axes.set_title(f"{title}, with 95 % intervals", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write table and figure."""
    parser = program.parser("python scripts/seeds.py", __doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="where all goes (default: outputs/STUDY-seeds)")
    options, more = parser.parse_known_args(arguments)
    study, out = STUDIES[options.study], (options.out or Path("outputs", f"{options.study}-seeds")).absolute()
    shared = study.ready(out)
    runs = {
        (seed, arm): finished(
            out / f"seed-{seed}" / arm,
            *study.command, *keys, f"seed={seed}", f"run.root={out / f'seed-{seed}'}", *shared, *more,
        )
        for seed in options.seeds
        for arm, keys in study.arms.items()
    }  # fmt: skip
    made = table(study, runs)
    out.with_name(f"{out.name}.md").write_text(f"{made}\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores\n")
    draw(study, runs, out.with_name(f"{out.name}.png"))
    print(made)
    return 0


if __name__ == "__main__":
    program.end(main)
