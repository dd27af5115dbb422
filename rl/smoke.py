"""Prove that a cluster can do what a run needs, with a toy. docs/cluster.md

It takes the arguments of ``rl.train``, with ``scale=smoke`` (or ``scale=smoke_tiny`` without GPUs). On the nodes of a
SLURM job ``rl.cluster`` starts it in place of ``rl.train``:

    sbatch --nodes=4 scripts/slurm/train.sbatch +experiment=NAME scale=smoke sandbox=docker ...

It starts a run of a few steps, stops it by SIGUSR1 after the first one, starts it again, and prints a table of what was
seen, which is in smoke.md of the run directory too. Every row is read from what the run itself has written. Exit code:
0 all is as expected, 1 something is not; the run's own code if it did not come to its end (``rl.train``).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config.command import read_command
from rl.episodes.boxes import kind_of
from rl.metrics.episodes import read_jsonl
from rl.metrics.figures import CORRELATION, Figure
from rl.run import checkpoints, stop
from rl.run.programs import tied
from rollout import audit, files, program


@dataclass(frozen=True)
class Start:
    """A start is one run of rl.train: its exit code, the step of the newest checkpoint after it, and its seconds."""

    code: int
    checkpoint: int
    seconds: float


class Starts:
    """These are the two starts of the run; signals to this process are passed on, and end the starts."""

    def __init__(self, run_dir: Path, overrides: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._command = tied(sys.executable, "-m", "rl.train", *overrides, f"run.dir={run_dir}")
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        for number in stop.SIGNALS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: Any) -> None:
        self.stopped = True
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, stop_after: int | None = None) -> Start:
        """Run rl.train to its end; ``stop_after``: it gets SIGUSR1 when this step is done."""
        began = time.monotonic()
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        while self._process.poll() is None:
            time.sleep(0.5)
            done = max((line["step"] for line in read_jsonl(self._run_dir / "metrics.jsonl")), default=0)
            if stop_after is not None and done >= stop_after:
                self._process.send_signal(signal.SIGUSR1)
                stop_after = None
        code, self._process = self._process.returncode, None
        return Start(code, checkpoints.newest(self._run_dir / "checkpoints"), time.monotonic() - began)


def rows(run_dir: Path, starts: Sequence[Start]) -> Iterator[Figure]:
    """Yield what the run's own files show."""
    config = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(config, DictConfig)
    steps = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "timing_s/step" in line]
    logs = sorted((run_dir / "episode_metrics").glob("*.jsonl"))
    episodes: list[dict[str, Any]] = [{**line, "worker": path.stem} for path in logs for line in read_jsonl(path)]
    yield from _nodes(run_dir, config)
    saved = starts[0].checkpoint
    before, after = ([line for line in episodes if (line["step"] > saved) is later] for later in (False, True))
    yield from _engines(config, (before, after))
    yield from _boxes(run_dir, config, episodes)
    yield from _training(steps)
    yield from _checkpoints(run_dir, config, steps, starts)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        sound = bool(episodes) and audit.main([str(run_dir)]) == 0
    told = (said.getvalue().splitlines() or ["no episodes"])[-1]
    yield Figure("every sampled token is trained on once, with its log-probability", "rollout.audit: ok", told, sound)
    kept = [file for file in run_dir.glob("wandb/*run-*/*.wandb") if file.stat().st_size]
    if "wandb" in config.trainer.logger:
        yield Figure("wandb", f"a file of each of {len(starts)} starts", f"{len(kept)} files", len(kept) >= len(starts))


def _nodes(run_dir: Path, config: DictConfig) -> Iterator[Figure]:
    file = run_dir / "preflight.json"
    if not file.exists():  # one machine, or cluster.preflight=false
        return
    found = json.loads(file.read_text())
    disks, nodes = found["disks"], config.trainer.nnodes
    yield Figure("nodes that answer", f"{nodes} that train", str(len(disks)), len(disks) >= nodes)
    slowest = min(disks.values(), key=lambda disk: disk.get("write", 0.0))
    speeds = ", ".join(f"{what} {speed:.0f}" for what, speed in slowest.items() if what != "gpus")
    yield Figure("MB/s of the disks, where writing is slowest", "they answer", speeds, "error" not in slowest)
    for backend, links in found["links"].items():
        tested = [link.get("gbs", 0.0) for link in links.values()]
        yield Figure(f"GB/s of all-reduces with {backend}, the slowest", "> 0", f"{min(tested):.3g}", min(tested) > 0)


def _engines(config: DictConfig, starts: Sequence[list[dict[str, Any]]]) -> Iterator[Figure]:
    """Yield the rows about what each start makes anew. ``starts``: the lines of each start's episodes."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    own = rollout if trainer.v1.trainer_mode == "separate_async" else trainer
    gpus = own.nnodes * own.n_gpus_per_node
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    for key, name, wanted, why in (
        ("engine", "engines", gpus // size, f": one for {size} of {gpus} devices"),
        ("worker", "agent loop workers", rollout.agent.num_workers, ""),
    ):
        counts = [len({line[key] for line in episodes} - {None}) for episodes in starts]
        seen = ", ".join(map(str, counts))
        yield Figure(f"{name} that played episodes, in each start", f"{wanted}{why}", seen, set(counts) == {wanted})
    hosts = {line["worker"].rpartition("-")[0] for episodes in starts for line in episodes}
    yield Figure("machines on which they were played, by name", "", str(len(hosts)))


def _boxes(run_dir: Path, config: DictConfig, episodes: list[dict[str, Any]]) -> Iterator[Figure]:
    lost = [line["reason"] for line in episodes if line["infra"]]
    played = f"{len(episodes)} episodes, {len(lost)} lost{f' ({lost[0]})' if lost else ''}"
    kind = kind_of(config.sandbox)
    whole = bool(episodes) and not lost
    yield Figure(f"boxes ({kind.name})", "no episode is lost to the infrastructure", played, whole)
    if kind.from_images:
        made = {name for file in run_dir.rglob("images.json") for name in json.loads(file.read_text())}
        base = f", and snapshots in {config.sandbox.base_image}" if config.sandbox.base_image else ""
        yield Figure("images", "pulled and sealed", f"of {len(made)} tasks{base}", bool(made or base))
    turns = [line["turns"] for line in episodes if not line["infra"]]
    mean = f"{sum(turns) / max(len(turns), 1):.1f} turns, {sum(line['calls'] for line in episodes)} calls"
    yield Figure("Claude Code", "acts on replies of the policy", mean, sum(turns) > 0)
    graded = [line for line in episodes if line["reward"] is not None]
    told = f"{len(graded)} verdicts, {sum(line['resolved'] for line in graded)} resolved"
    yield Figure(
        "grading", "a verdict for every episode", told, bool(graded) and len(graded) == len(episodes) - len(lost)
    )


def _training(steps: list[dict[str, Any]]) -> Iterator[Figure]:
    def of(key: str) -> list[float]:
        return [step[key] for step in steps if step.get(key) is not None]

    norms, matches = of("actor/grad_norm"), of("training/rollout_actor_probs_pearson_corr")
    shown = ", ".join(f"{norm:.2g}" for norm in norms)
    yield Figure(
        "updates: norm of the gradient", "> 0 in every step", shown, len(norms) == len(steps) > 0 and min(norms) > 0
    )
    synced = len(matches) == len(steps) > 1 and min(matches) > CORRELATION
    shown = ", ".join(f"{match:.4f}" for match in matches)
    what = "weight sync: correlation of the engine's and the trainer's probabilities"
    yield Figure(what, f"> {CORRELATION}, also after updates", shown, synced)
    for key, told in (("timing_s/step", "a step"), ("timing_s/update_weights", "a weight sync")):
        yield Figure(f"seconds of {told}", "", ", ".join(f"{value:.1f}" for value in of(key)))


def _checkpoints(
    run_dir: Path, config: DictConfig, steps: list[dict[str, Any]], starts: Sequence[Start]
) -> Iterator[Figure]:
    first, last = starts[0], starts[-1]
    shards = list((run_dir / "checkpoints" / f"global_step_{last.checkpoint}" / "actor").glob("model_world_size_*"))
    if shards:
        world = {re.sub(r".*world_size_(\d+)_.*", r"\1", file.name) for file in shards}
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        seen = f"{len(shards)} of {', '.join(world)}"
        yield Figure("parts of the checkpoint, one of each rank of the trainer", str(gpus), seen, len(shards) == gpus)
    stopped = f"code {first.code}, checkpoint of step {first.checkpoint}"
    saved = first.code == stop.STOPPED and first.checkpoint > 0
    yield Figure("SIGUSR1 during a step", f"checkpoint, code {stop.STOPPED}", stopped, saved)
    wanted, numbers = config.trainer.total_training_steps, [step["step"] for step in steps]
    resumed = last.code == 0 and numbers == list(range(1, wanted + 1)) and len(starts) > 1
    told = f"steps {', '.join(map(str, numbers))}, code {last.code}, checkpoint of step {last.checkpoint}"
    yield Figure("the same command again", f"goes on to step {wanted}", told, resumed and last.checkpoint == wanted)
    yield Figure("seconds of each start", "", ", ".join(f"{start.seconds:.0f}" for start in starts))


def table(found: Sequence[Figure]) -> str:
    """Return the rows as Markdown."""
    told = {True: "yes", False: "**NO**", None: ""}
    lines = ["| what | expected | seen | proven |", "| --- | --- | --- | --- |"]
    cells = ([row.what, row.expected, row.seen, told[row.ok]] for row in found)
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)]) + "\n"


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run the toy, print the table, and return the exit code of the module's docstring."""
    overrides = list(sys.argv[1:] if argv is None else argv)
    config = read_command("rl.smoke", __doc__ or "", overrides)
    named = Path(config.run.root, config.trainer.experiment_name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    run_dir = Path(config.run.dir or named).absolute()
    starts = Starts(run_dir, overrides)
    done = [starts.run(stop_after=1)]
    if done[0].code in (0, stop.STOPPED) and not starts.stopped:
        done.append(starts.run())
    if starts.stopped or not (run_dir / "config.yaml").exists():
        return done[-1].code
    found = list(rows(run_dir, done))
    files.write(run_dir / "smoke.md", table(found))
    missing = [row.what for row in found if row.ok is False]
    say(f"\n{table(found)}\n{f'NOT proven: {chr(59).join(missing)}' if missing else 'all of it is proven'}")
    return int(bool(missing))


if __name__ == "__main__":
    program.end(main)
