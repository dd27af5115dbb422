"""Make everything that the quickstart trains on: tasks, a policy, its warm start.

The warm start imitates episodes that a script plays through the real proxy with the real Claude Code. The rows are
those of the session trees, token for token, not re-rendered text. The script chooses among the candidate edits at
random, so the policy learns the form of an episode and not which edit is right.

A preparation that is killed goes on where it was when the same command is started again, with the same result: tasks,
policy, each scripted episode (its record) and up to eight passes of the imitation are kept. Incomplete parts have names
with a dot in front.

    python -m rl.quickstart.prepare [key=value ...]

makes it without training on it. The keys are those of rl.train.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task, load_tasks
from rewards.verdict import Outcome
from rl.config.command import read_command
from rl.config.compose import compose
from rl.data.make import edits, hidden, repositories
from rl.episodes.setup import load_policy, make_setup, training_settings
from rl.evaluate.player import Player
from rl.metrics.episodes import Line
from rl.quickstart.policy import make_policy
from rl.quickstart.script import RepairScript, asked, draw
from rl.quickstart.tasks import make_tasks
from rl.run.journal import Progress
from rl.run.lease import POLL_S, InUse, RunLease
from rl.run.screen import Screen
from rl.sft.episodes import rows_of
from rl.sft.trainer import Passes, run_sft
from rl.traces.rows import ROWS, write
from rollout import files, program
from rollout.episode import Setup
from rollout.figures import journal_line
from rollout.proxy.engine import ScriptedEngine
from rollout.proxy.render import turn_end
from rollout.proxy.server import ProxyServer
from rollout.records import Record
from rollout.records.reading import Reader


def prepare(config: DictConfig, screen: Screen) -> dict[str, Any]:
    """Make what is missing below ``run.root``/prepared, and return the config overrides that point at it.

    The directory is named after everything that the result depends on, so a second run with the same seed starts at
    once, and a changed task generator is never combined with an old policy. Each part is made under another name and
    renamed. If the config names a policy, only the tasks are made. Raises RuntimeError if the warm start makes too few
    rows.
    """
    where, quick = directory_of(config), config.quickstart
    where.mkdir(parents=True, exist_ok=True)
    tasks, policy, warm = where / "tasks", where / "policy", where / "warm"
    needs = tasks if config.policy else warm
    with contextlib.nullcontext() if needs.exists() else _alone(where, screen):
        if not tasks.exists():
            screen.say(f"making and verifying {quick.train_tasks} + {quick.heldout_tasks} tasks")
            with _making(tasks) as out:
                make_tasks(out, config.seed, quick.train_tasks, quick.heldout_tasks)
        if not (policy.exists() or config.policy):
            screen.say("making tokenizer and policy")
            sizes = {"experts": quick.experts, "head_dim": quick.head_dim, "multiple": quick.vocabulary_multiple}
            sizes |= {"hybrid": quick.hybrid, "shell": runs_commands(config)}
            with _making(policy) as out:
                make_policy(out, config.seed, **sizes)
        if not (warm.exists() or config.policy):
            with _making(warm, goes_on=True) as out:
                _warm_start(config, tasks / "train.parquet", policy, out, screen)
    made = {"data.train_files": [str(tasks / "train.parquet")], "data.val_files": [str(tasks / "heldout.parquet")]}
    return made if config.policy else {**made, "actor_rollout_ref.model.path": str(warm / "model")}


def runs_commands(config: DictConfig) -> bool:
    """Return whether the agent has a tool for commands in place of Read and Edit."""
    return bool(config.agent.get("kind", "claude_code") != "claude_code")


def directory_of(config: DictConfig) -> Path:
    """Return the directory of a preparation, named after all that its result depends on."""
    return Path(config.run.root).resolve() / "prepared" / f"quickstart-{config.seed}-{_fingerprint(config)}"


def _warm_start(config: DictConfig, task_file: Path, policy: Path, out: Path, screen: Screen) -> None:
    """Play the episodes and imitate them, except for what ``out`` has already."""
    rows, model = out / "rows.parquet", out / "model"
    if rows.exists():
        screen.say("warm start: the episodes are there from an earlier start; imitating them")
    else:
        agent = config.agent.get("kind", "claude_code")
        screen.say(f"warm start: {config.quickstart.warm_episodes} scripted episodes in the real {agent}")
        tasks = load_tasks(task_file)
        asyncio.run(_play_missing(config, tasks, policy, out, screen))
        _write_rows(_ended(out, tasks), config.quickstart.warm_episodes, rows, screen)
    if not model.exists():
        _imitate(config, policy, rows, model, screen)


def _imitate(config: DictConfig, policy: Path, rows: Path, out: Path, screen: Screen) -> None:
    """Fine-tune the policy on rows, and make the result the model ``out``."""
    what, passes = "warm start, updates", dict(config.quickstart.sft)
    if runs_commands(config):  # in longer prompts, it takes longer to learn to copy
        passes["epochs"] += passes["epochs"] // 2
    screen.show(what)
    working = out.with_name(f"{out.name}.sft")
    made = run_sft(
        compose(["+experiment=quickstart", "trainer.logger=[]"]),  # on a CPU, whatever the experiment is for
        str(policy),
        rows,
        working,
        Passes(seed=config.seed, **passes),
        watch=lambda step, steps, metrics: screen.show(what, step, steps),
    )
    for file in made.iterdir():
        files.sync(file)
    made.rename(out)
    shutil.rmtree(working, ignore_errors=True)


def _write_rows(episodes: dict[int, Record], wanted: int, path: Path, screen: Screen) -> None:
    """Write the training rows of all episodes, in the order of their numbers."""
    played = [episodes[number] for number in sorted(episodes)]
    rows = [row for episode in played for row in rows_of(episode)]
    if len(rows) < wanted // 2:
        failed = (e.verdict["detail"] for e in played if e.verdict["outcome"] == Outcome.INFRA_FAILURE)
        raise RuntimeError(
            f"warm start: {len(rows)} rows from {wanted} episodes: {next(failed, 'no episode made a row')}"
        )
    write(path, ROWS, rows)
    resolved = sum(episode.verdict["outcome"] == Outcome.RESOLVED for episode in played)
    screen.say(f"warm start: {len(rows)} rows, {resolved / wanted:.2f} resolved by chance; imitating them")


def _ended(out: Path, tasks: list[Task]) -> dict[int, Record]:
    """Return the last attempts of all episodes that have ended, by their numbers."""
    places = {task.instance_id: place for place, task in enumerate(tasks)}
    return {journal_line(one)["sample"] * len(tasks) + places[one.task]: one for one in Reader(out / "episodes")}


async def _play_missing(config: DictConfig, tasks: list[Task], policy: Path, out: Path, screen: Screen) -> None:
    """Play the episodes that have no record yet, and again those that the infrastructure failed."""
    from transformers import AutoTokenizer

    count = config.quickstart.warm_episodes
    numbers = {(tasks[n % len(tasks)].instance_id, n // len(tasks)): n for n in range(count)}
    player = Player(out, {}, "warm")
    wanted = [one for one in player.wanted(tasks, -(-count // len(tasks))) if (one[0].instance_id, one[1]) in numbers]
    if len(wanted) < count:
        screen.say(f"warm start: {count - len(wanted)} episodes are there from an earlier start")
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    model_type = json.loads((policy / "config.json").read_text())["model_type"]
    expressions = draw(config.seed, [asked(tasks[n % len(tasks)]) for n in range(count)])
    engines = [ScriptedEngine(tokenizer, turn_end(tokenizer), RepairScript(one)) for one in expressions]
    proxy = ProxyServer()
    settings = training_settings(config)
    setup = make_setup(settings, load_policy(settings, str(policy), tokenizer, model_type, engines[0]), proxy)
    progress = Progress(screen, "warm start, episodes", len(wanted))

    def scripted(task: Task, sample: int) -> Setup:
        return replace(setup, policy=replace(setup.policy, engine=engines[numbers[task.instance_id, sample]]))

    def done(line: Line) -> None:
        progress.count("resolved" if line["resolved"] else line["reason"], final=not line["infra"])

    jobs = config.sandbox.concurrency
    await proxy.start()
    try:
        await player.play(setup, wanted, concurrency=jobs, step=0, model=str(policy), done=done, setup_of=scripted)
    finally:
        await proxy.stop()
        player.close()


@contextlib.contextmanager
def _making(target: Path, goes_on: bool = False) -> Generator[Path]:
    """Yield a directory that becomes ``target`` at the end; empty, unless it ``goes_on`` where an earlier start was."""
    building = target.with_name(f".{target.name}")
    if not goes_on:
        shutil.rmtree(building, ignore_errors=True)
    building.mkdir(exist_ok=True)
    yield building
    building.rename(target)


@contextlib.contextmanager
def _alone(where: Path, screen: Screen) -> Generator[None]:
    """Hold ``where``, after waiting for another run that is preparing the same."""
    lease = RunLease(where, screen.say)
    waits = False
    while True:
        try:
            lease.take()
            break
        except InUse as error:
            if not waits:
                screen.say(f"waiting for another run that prepares the same: {error}")
            waits = True
            time.sleep(POLL_S)
    lease.renew(screen.say)
    try:
        yield
    finally:
        lease.release()


def _fingerprint(config: DictConfig) -> str:
    digest, here = hashlib.sha256(), Path(__file__).parent
    shared = [Path(str(module.__file__)) for module in (edits, hidden, repositories)]
    for source in sorted([*here.glob("*.py"), *here.glob("*.jinja"), *shared]):
        digest.update(source.read_bytes())
    for part in (config.quickstart, config.agent, config.proxy):
        digest.update(OmegaConf.to_yaml(part, resolve=True).encode())
    return digest.hexdigest()[:10]


def main() -> int:
    """Run the command and return its exit status: 0 all is there, 1 it failed, 130 interrupted."""
    from rl.evaluate.run import run

    about = "Make the tasks of the experiment quickstart and its warm-started policy."
    config = read_command("rl.quickstart.prepare", about, ["+experiment=quickstart", *sys.argv[1:]])
    screen = Screen()

    def work() -> int:
        made = prepare(config, screen)
        train, held_out = made["data.train_files"][0], made["data.val_files"][0]
        policy = made.get("actor_rollout_ref.model.path", config.policy)
        screen.next(("tasks", train), ("held-out tasks", held_out), ("policy", policy))
        return 0

    return run(screen, work, (RuntimeError, ValueError))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(main)
