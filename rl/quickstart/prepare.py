"""This module makes everything that the quickstart trains on: tasks, a policy, and the policy's warm start.

The warm start imitates episodes that a script plays through the real proxy with the real Claude Code. The rows are
those of the session trees, token for token, not re-rendered text. The script chooses among the candidate edits at
random, so the policy learns the form of an episode and not which edit is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task, load_tasks
from rl.batch import Progress, run_all
from rl.quickstart.policy import make_policy
from rl.quickstart.script import RepairScript
from rl.quickstart.tasks import make_tasks
from rl.screen import Screen
from rl.setup import load_policy, make_setup, training_settings
from rl.sft import run_sft
from rollout.episode import Episode, play
from rollout.proxy.engine import ScriptedEngine
from rollout.proxy.server import ProxyServer
from rollout.records import RecordWriter, record_of


def prepare(config: DictConfig, screen: Screen) -> dict[str, Any]:
    """Make what is missing below ``run.root``/prepared, and return the config overrides that point at it.

    The directory is named after everything that the result depends on, so a second run with the same seed starts at
    once, and a changed task generator is never combined with an old policy. Each part is made under another name and
    renamed. Raises RuntimeError if the warm start makes too few rows.
    """
    where = Path(config.run.root).resolve() / "prepared" / f"quickstart-{config.seed}-{_fingerprint(config)}"
    where.mkdir(parents=True, exist_ok=True)
    quick = config.quickstart
    tasks, policy, warm = where / "tasks", where / "policy", where / "warm"
    if not tasks.exists():
        screen.say(f"making and verifying {quick.train_tasks} + {quick.heldout_tasks} tasks")
        _make(tasks, lambda out: make_tasks(out, config.seed, quick.train_tasks, quick.heldout_tasks))
    if not policy.exists():
        screen.say("making tokenizer and policy")
        _make(policy, lambda out: make_policy(out, config.seed, experts=quick.experts))
    if not warm.exists():
        screen.say(f"warm start: {quick.warm_episodes} scripted episodes in real Claude Code")
        _make(warm, lambda out: _warm_start(config, tasks / "train.parquet", policy, out, screen))
    return {
        "data.train_files": [str(tasks / "train.parquet")],
        "data.val_files": [str(tasks / "heldout.parquet")],
        "actor_rollout_ref.model.path": str(warm / "model"),
    }


def _warm_start(config: DictConfig, task_file: Path, policy: Path, out: Path, screen: Screen) -> None:
    import pyarrow
    import pyarrow.parquet

    quick = config.quickstart
    tasks = load_tasks(task_file)
    wanted = [tasks[i % len(tasks)] for i in range(quick.warm_episodes)]
    episodes = asyncio.run(_play_all(config, wanted, policy, out / "episodes", screen))
    rows = [row for episode in episodes for row in episode.rows]
    if len(rows) < quick.warm_episodes // 2:
        reason = next((e.verdict.detail for e in episodes if e.verdict.is_infra), "no episode made a row")
        raise RuntimeError(f"warm start: {len(rows)} rows from {len(episodes)} episodes: {reason}")
    table = pyarrow.table(
        {
            "input_ids": [row.prompt_ids + row.response_ids for row in rows],
            "loss_mask": [[0] * len(row.prompt_ids) + row.mask for row in rows],
        }
    )
    pyarrow.parquet.write_table(table, out / "rows.parquet")
    resolved = sum(episode.verdict.outcome == "resolved" for episode in episodes)
    screen.say(f"warm start: {len(rows)} rows, {resolved / len(episodes):.2f} resolved by chance; imitating them")
    screen.show("imitating them")
    sft: Any = OmegaConf.to_container(quick.sft)
    model = run_sft(policy, out / "rows.parquet", out / "sft", seed=config.seed, log=out / "sft.log", **sft)
    model.rename(out / "model")
    shutil.rmtree(out / "sft", ignore_errors=True)


async def _play_all(
    config: DictConfig, tasks: list[Task], policy: Path, records: Path, screen: Screen
) -> list[Episode]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    model_type = json.loads((policy / "config.json").read_text())["model_type"]
    engine = ScriptedEngine(tokenizer, tokenizer.eos_token_id, RepairScript(config.seed))
    proxy = ProxyServer()
    settings = training_settings(config)
    setup = make_setup(settings, load_policy(settings, str(policy), tokenizer, model_type, engine), proxy)
    writer = RecordWriter(records, "warm")
    progress = Progress(screen, "warm start, episodes", len(tasks))
    played: dict[int, Episode] = {}

    def keep(episode: Episode) -> None:
        writer.append(record_of(episode, "warm", 0, str(policy), config.proxy.tool_parser))
        progress.count(episode.verdict.outcome, final=not episode.verdict.is_infra)

    async def work(piece: tuple[int, Task]) -> None:
        number, task = piece
        played[number] = await play(setup, task, f"warm-{number:04d}-{task.instance_id}", keep)

    await proxy.start()
    try:
        await run_all(enumerate(tasks), config.sandbox.concurrency, work)
        return [played[number] for number in range(len(tasks))]
    finally:
        await proxy.stop()
        writer.close()


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Call ``make`` with an empty directory, which becomes ``target`` once it is complete."""
    building = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    make(building)
    building.rename(target)


def _fingerprint(config: DictConfig) -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.glob("*.jinja")]):
        digest.update(source.read_bytes())
    for part in (config.quickstart, config.agent, config.proxy):
        digest.update(OmegaConf.to_yaml(part, resolve=True).encode())
    return digest.hexdigest()[:10]
