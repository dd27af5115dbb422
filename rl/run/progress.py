"""The progress of a training run on the screen: a line per step, what is being done now, and how the run ended."""

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from rl.metrics import episodes as metrics
from rl.metrics import report
from rl.run import phases
from rl.run.screen import Screen, this_command, to_go

_LOOK_S = 1.0
# So many first episodes of a run without a single tool call are no chance: nothing can be learned from them.
_WITHOUT_CALLS = 16
_NO_CALLS = """\
none of the first {} episodes called a tool: the policy writes no calls that proxy.tool_parser reads, or needs a warm \
start (docs/models.md#no-calls); to read one: python -m rollout.view {}"""


class RunProgress(threading.Thread):
    """This thread shows on ``screen`` what the trainer writes into ``run_dir``, from ``start`` to ``finish``."""

    def __init__(self, run_dir: Path, total_steps: int | None, screen: Screen):
        super().__init__(daemon=True)
        self.run_dir, self.total_steps, self.screen = run_dir, total_steps, screen
        self.stop = threading.Event()

    def start(self) -> None:
        """Begin to show the run."""
        self.begin()
        super().start()

    def begin(self) -> None:
        """Skip what the run directory already holds: a resumed run does not show its earlier steps again. Episodes that
        an interrupted step has left count as done."""
        self.began = time.time()
        path = self.run_dir / "metrics.jsonl"
        self.steps = metrics.Tail(path, from_end=True)
        last = max((record["step"] for record in metrics.read_jsonl(path)), default=0)
        self.episodes = metrics.EpisodeReader(self.run_dir, after=last)
        self.counts = {split: Counter[str]() for split in ("train", "val")}
        self.seen: list[tuple[int, float]] = []  # steps and when they ended
        self.without_calls: int | None = 0  # episodes; None: one had a call, or the line was said

    def run(self) -> None:
        """Look every second until ``finish``."""
        while not self.stop.wait(_LOOK_S):
            self.look()
        self.look()

    def finish(self) -> None:
        """Show what has not been shown yet and end the thread, if it was started."""
        self.stop.set()
        if self.is_alive():
            self.join()

    def look(self) -> None:
        """Read what is new in the run directory and show it."""
        for split, counts in self.counts.items():
            for episode in self.episodes.take(split):
                counts["infra" if episode["infra"] else "resolved" if episode["resolved"] else "unresolved"] += 1
                self._notice(episode)
        for record in self.steps.take():
            self.screen.say(step_line(record, self.total_steps))
            self.seen.append((record["step"], record["time"]))
            self.counts["val"].clear()
            self.counts["train"].clear()
        self.show(phases.read(self.run_dir))

    def _notice(self, episode: metrics.Line) -> None:
        """Say it once if the first episodes call no tool: with dynamic filtering such a step never ends."""
        if self.without_calls is not None and not episode["infra"]:
            self.without_calls = self.without_calls + 1 if episode["no_call"] else None
        if self.without_calls == _WITHOUT_CALLS:
            self.without_calls = None
            self.screen.say(_NO_CALLS.format(_WITHOUT_CALLS, self.run_dir))

    def show(self, phase: phases.Phase | None) -> None:
        """Show the phase, with the episodes that have ended and the time to go."""
        if phase is None or phase.since < self.began:
            self.screen.show("starting trainer and engine")
            return
        what = f"{_step(phase.step, self.total_steps)}  {phase.name}"
        if not phase.episodes or (self.seen and phase.step <= self.seen[-1][0]):  # the step's line has its counts
            self.screen.show(what, note=self.left())
            return
        counts = self.counts["val" if phase.name == "held-out" else "train"]
        parts = [f"{counts[name]} {name}" for name in ("resolved", "unresolved", "infra") if counts[name]]
        done = counts["resolved"] + counts["unresolved"]
        note = ", ".join(part for part in (*parts, self.left()) if part)
        self.screen.show(what, done, phase.episodes, note)

    def left(self) -> str:
        """Return how long the run still takes at the pace of its last steps; "" before two were seen or at the end."""
        if len(self.seen) < 2 or not self.total_steps or self.seen[-1][0] == self.total_steps:
            return ""
        (first, began), (last, ended) = self.seen[-6:][0], self.seen[-1]
        seconds = (self.total_steps - last) * (ended - began) / (last - first)
        return to_go(seconds)


def _step(step: int, total: int | None) -> str:
    return f"step {step}/{total}" if total else f"step {step}"


def step_line(record: dict, total_steps: int | None) -> str:
    """Return one line that tells what happened in a step."""
    parts = [_step(record["step"], total_steps)]
    held_out = metrics.resolve_rate(record, "val")
    if "timing_s/step" not in record:
        return f"{parts[0]}  held-out resolved {report.percent(held_out)}"
    parts.append(f"resolved {report.percent(metrics.resolve_rate(record, 'train'))}")
    parts.append(f"reward {_number(record, 'episode/reward_mean', '{:.3f}')}")
    if record.get("group/played", 0) > record.get("group/used", 0):
        parts.append(f"groups {record['group/used']:.0f} of {record['group/played']:.0f}")
    if "episode/rows" in record:
        parts.append(f"rows/ep {_number(record, 'episode/rows', '{:.2f}')}")
        parts.append(
            f"tokens/ep {_number(record, 'episode/tokens_context', '{:.0f}')}"
            f"+{_number(record, 'episode/tokens_sampled', '{:.0f}')}"
        )
    names = {"rollout": "gen", "logp": "old_log_prob", "update": "update_actor", "sync": "update_weights"}
    times = " ".join(f"{name} {_number(record, f'timing_s/{key}')}" for name, key in names.items())
    parts.append(f"{_number(record, 'timing_s/step')} s ({times})")
    parts.append(f"pearson {_number(record, 'training/rollout_actor_probs_pearson_corr', '{:.4f}')}")
    if record.get("infra/failures"):
        parts.append(f"infra {record['infra/failures']:.0f}")
    if held_out is not None:
        parts.append(f"held-out resolved {report.percent(held_out)}")
    return "  ".join(parts)


def _number(record: dict, key: str, form: str = "{:.1f}") -> str:
    value = record.get(key)
    return "-" if value is None else form.format(value)


def finished(run_dir: Path, minutes: float, screen: Screen) -> None:
    """Draw the learning curve, print a summary, and say what can be done with a finished run."""
    from rich.table import Table

    records = metrics.read_jsonl(run_dir / "metrics.jsonl")
    report.curve(records, run_dir / "curve.png")
    table = Table(title=f"{run_dir.parent.name} {run_dir.name}", show_header=False)
    for label, value in [*report.summary(records), ("minutes", f"{minutes:.1f}")]:
        table.add_row(label, value)
    screen.print(table)
    python = sys.orig_argv[0]
    hints = [("curve", str(run_dir / "curve.png")), ("checkpoints", str(run_dir / "checkpoints"))]
    hints.append(("look at it", f"{python} -m rollout.view {run_dir}"))
    hints.append(("all curves", f"{python} -m rl.report {run_dir}"))
    hints.append(("audit", f"{python} -m rollout.audit {run_dir}"))
    if (run_dir / "wandb").is_dir() and os.environ.get("WANDB_MODE") == "offline":
        hints.append(("to wandb", f"{python} -m wandb sync {run_dir / 'wandb'}/offline-run-*"))
    if (run_dir / "tensorboard").is_dir():
        hints.append(("tensorboard", f"{python} -m tensorboard.main --logdir {run_dir / 'tensorboard'}"))
    screen.next(*hints)


def failed(cause: str, screen: Screen) -> None:
    """Print the cause and the command that continues the run."""
    screen.clear()
    print(cause, file=sys.stderr, flush=True)
    screen.next(("continue", this_command()))
