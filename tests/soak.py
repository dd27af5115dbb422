"""This program breaks a run on two nodes at random for a while, and compares it with one that was left alone.

    .venv/bin/python -m tests.soak --root /tmp/soak [--minutes 40] [--steps 24] [--seed 1]

It starts a SLURM of two nodes on this machine (needs root and slurm-wlm) and trains the quickstart's policy with
``+repeat=exact``, once undisturbed. The same job is then submitted again, and every 60 to 200 s one of ``FAULTS``
happens to it, until the minutes are over. A job that has failed is submitted again with the same run directory, as its
user would do. At the end every step's numbers must be those of the undisturbed run, and the audit must pass. It also
prints how long a job takes from ``sbatch`` to its first step, by phase. Too long for the test suite: about an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from rl.run.phases import read as read_phase
from rollout import audit
from tests.integration.faults.test_run_faults import EXACT, NUMBERS
from tests.integration.process_kit import ROOT, command_line, plain_environment
from tests.integration.train_kit import TINY, WarmStart
from tests.slurm_kit import Slurm, slurm

SCRIPT = "scripts/slurm/train.sbatch"
ENDS = ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED")
FAULTS = {"warn": 2, "preempt": 2, "lose a node": 2, "kill the engine": 2, "kill any process": 3, "submit again": 1}
# What a job prints, in this order, and what has been done when it does. The phases of the first step are in phase.json.
PHASES = {
    r"cluster: 2 nodes": "SLURM starts the job; nodes check themselves",
    r"all nodes are there": "the nodes are tested; Ray starts",
    r"starting trainer": "rl.train checks, and imports verl",
    r"step 1/\d+  resolved": "the first step",
}


def log(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Job:
    """A job is one run directory and the SLURM job that trains in it now. ``ended``: how its jobs have ended."""

    def __init__(self, cluster: Slurm, run: Path, arguments: list[str]) -> None:
        self.cluster, self.run, self.arguments = cluster, run, [*arguments, f"run.dir={run}"]
        self.out = run.parent / f"{run.name}.txt"
        self.ended: Counter[str] = Counter()
        self.number = ""

    def submit(self) -> None:
        options = ["--parsable", "--nodes=2", "--gpus-per-node=0", f"--output={self.out}", "--signal=B:USR1@60"]
        self.number = self.cluster.run("sbatch", *options, SCRIPT, *self.arguments, cwd=ROOT).strip()

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def processes(self, words: str = "", **environment: str) -> list[psutil.Process]:
        found = self.cluster.processes(SLURM_JOB_ID=self.number, **environment)
        return [process for process in found if words in command_line(process)]

    def last_words(self) -> str:
        """Return the lines of the output that tell of an end."""
        lines = [
            line for line in self.said().splitlines() if not re.match(r"\[|step |slurmstepd|srun|cluster: n\d: ", line)
        ]
        return " / ".join(lines[-3:])


def phases(job: Job) -> None:
    """Wait for the first step and print when each phase was over."""
    began = last = time.time()
    waiting, doing = dict(PHASES), "trainer and engines start"

    def over(name: str, at: float) -> None:
        nonlocal last
        log(f"{at - last:6.1f} s  {name}")
        last = at

    while waiting and job.state() not in ENDS:
        pattern, name = next(iter(waiting.items()))
        phase = read_phase(job.run)
        if phase and not doing.endswith(phase.name):
            over(doing, phase.since)
            doing = f"{name}: {phase.name}"
        if re.search(pattern, job.said()):
            over(doing if phase else name, time.time())
            del waiting[pattern]
        time.sleep(0.1)
    log(f"{last - began:6.1f} s  from sbatch to the end of the first step")


def happen(fault: str, job: Job, chance: random.Random) -> str:
    """Let it happen to the job, and return what was done."""
    if fault == "warn":
        job.cluster.run("scancel", "--signal=USR1", "--batch", job.number, check=False)
    elif fault == "preempt":
        job.cluster.run("scontrol", "requeue", job.number, check=False)
    elif fault == "submit again":
        again = [sys.executable, "-m", "rl.train", *job.arguments]
        done = subprocess.run(again, cwd=ROOT, env=plain_environment(), text=True, capture_output=True)
        assert done.returncode == 2, done.stdout + done.stderr
        return f"{fault}: {done.stderr.strip()}"
    else:
        where = {"lose a node": ("rl.cluster", {"SLURM_PROCID": "1"}), "kill the engine": ("VLLM::EngineCore", {})}
        words, environment = where.get(fault, ("", {}))
        # The batch script is SLURM's: a node whose script dies is SLURM's to requeue, which the tests show.
        found = [one for one in job.processes(words, **environment) if "slurm_script" not in command_line(one)]
        if not found:
            return f"{fault}: there is none"
        victim = chance.choice(found)
        name = command_line(victim)[:60]
        victim.send_signal(signal.SIGKILL)
        return f"{fault}: {name}"
    return fault


def soak(job: Job, minutes: float, chance: random.Random) -> None:
    """Let faults happen to the job until the minutes are over, and wait for its end."""
    end = time.monotonic() + 60 * minutes
    job.submit()
    due = time.monotonic() + chance.uniform(60, 200)
    while (state := job.state()) != "COMPLETED":
        if state in ENDS:
            job.ended[f"{state} {job.cluster.job(job.number)['ExitCode']}"] += 1
            log(f"  {state}, {job.cluster.job(job.number)['ExitCode']}: {job.last_words()}")
            job.submit()
        elif due < time.monotonic() < end and state == "RUNNING":
            steps = len(re.findall(r"step \d+/\d+  resolved", job.said()))
            (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
            log(f"after {steps} steps: {happen(fault, job, chance)}")
            due = time.monotonic() + chance.uniform(60, 200)
        time.sleep(0.5)


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """Return a run's numbers by step; a step that is recorded twice is an error."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {r["step"]: {key: value for key, value in r.items() if NUMBERS.match(key)} for r in records}
    assert len(found) == len(records), [record["step"] for record in records]
    return found


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--root", type=Path, required=True, help="a directory that is made and kept")
    options.add_argument("--minutes", type=float, default=40, help="how long faults happen; 0: only the times")
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--seed", type=int, default=1, help="of the faults")
    args = options.parse_args()
    args.root.mkdir(parents=True)
    warm = WarmStart.make(args.root / "warm")
    tiny = [argument for argument in TINY if not argument.startswith("quickstart.")]
    arguments = ["+experiment=quickstart", *tiny, *warm.given(), *EXACT]
    arguments += ["trainer.nnodes=2", "actor_rollout_ref.rollout.agent.num_workers=2", "trainer.logger=[wandb]"]
    arguments += [f"trainer.total_training_steps={args.steps}", f"run.root={args.root}"]
    with slurm(args.root / "slurm") as cluster:
        alone, broken = (Job(cluster, args.root / name, arguments) for name in ("alone", "broken"))
        log("undisturbed:")
        alone.submit()
        phases(alone)
        cluster.wait(alone.number, "COMPLETED", seconds=7200)
        if not args.minutes:
            return 0
        log("disturbed:")
        soak(broken, args.minutes, random.Random(args.seed))
        log(f"ended; jobs that had to be submitted again: {dict(broken.ended)}")
    wanted, found = numbers(alone.run), numbers(broken.run)
    # A step whose run was killed between its checkpoint and its end has what was known of it by then.
    short = [step for step in wanted if step in found and found[step].keys() < wanted[step].keys()]
    same = {step: {key: one for key, one in wanted[step].items() if key in found.get(step, {})} for step in wanted}
    differ = [step for step in wanted if same[step] != found.get(step)]
    log(f"{len(found)} of {args.steps} steps; that differ: {differ}; without their last figures: {short}")
    return audit.main([str(broken.run)]) or bool(differ) or len(found) != args.steps


if __name__ == "__main__":
    sys.exit(main())
