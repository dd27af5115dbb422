"""A real run of GRPO whose steps mix the real Claude Code and the real Codex, with sub-agents of three roles: trained
with a reward of its own, served without being trained on, answered by another endpoint.

The policy has random weights, and a script tells it what to say (``tests.integration.told_loop``): no toy starts
sub-agents by itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rewards.task import load_tasks
from rl.metrics import trained
from rl.quickstart.policy import make_policy
from rl.quickstart.tasks import make_tasks
from rollout import audit
from rollout.agent.codex import Codex
from rollout.agent.mix import Mix
from rollout.records import Record
from rollout.records.reading import Reader
from tests.endpoint_kit import StandIn, standing_in
from tests.integration.agents_kit import needs
from tests.integration.process_kit import ROOT, plain_environment
from tests.integration.told_loop import SUB_CREDIT

AGENTS = ("claude_code", "codex")
MIXED = [
    "agent=mixed",
    "agent.mix={claude_code:1,codex:1}",
    "agent.claude_code.bare=false",
    "agent.claude_code.tools=[Agent,Bash]",
    "agent.claude_code.timeout_s=600",
    "agent.codex.timeout_s=600",
    "episode.credit=tests.integration.told_loop:credit",
    "proxy.max_tokens=300",
    "sandbox.cpu_s=300",
    "sandbox.file_mb=256",
]
TWO_STEPS = [
    "+experiment=quickstart",
    "prepare=null",
    "~quickstart",
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
]
ROLES = {
    "main": [3.5, 1, 0.5],
    "subagent/Explore": [0.5, 0, 0],
    "subagent/default": [0.5, 0, 0],
    "subagent/general-purpose": [0.5, 0.5, SUB_CREDIT / 2],
}


def seed_of(tasks: list[str]) -> int:
    """Return a seed with which both steps have both agents."""
    drawn = {seed: Mix(dict.fromkeys(AGENTS, 1.0), seed).draw for seed in range(100)}
    return next(seed for seed, draw in drawn.items() if all({draw(t, n) for t in tasks} == {*AGENTS} for n in (1, 2)))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with tasks, a policy with random weights, and our agent loop for it."""
    needs(Codex)
    make_tasks(tmp_path, seed=5, n_train=2, n_heldout=1)
    make_policy(tmp_path / "policy", seed=5, shell=True)
    (tmp_path / "loops.yaml").write_text("- name: claude_code\n  _target_: tests.integration.told_loop.Loop\n")
    return tmp_path


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(3600)
async def test_agents_and_roles_in_a_batch_are_trained_as_the_config_says(made: Path) -> None:
    run = made / "run"
    async with standing_in(StandIn(lambda text: [{"type": "text", "text": "It is in line 2."}])) as elsewhere:
        roles = {
            "subagent/Explore": f"{{endpoint:'{elsewhere.url}',model:fixed,protocol:chat}}",
            "subagent/default": "{train:false}",
        }
        command = [
            *(sys.executable, "-m", "rl.train", *TWO_STEPS, *MIXED),
            f"agent.seed={seed_of([task.instance_id for task in load_tasks(made / 'train.parquet')])}",
            f"data.train_files=[{made / 'train.parquet'}]",
            f"data.val_files=[{made / 'heldout.parquet'}]",
            f"actor_rollout_ref.model.path={made / 'policy'}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={made / 'loops.yaml'}",
            "+proxy.roles={" + ",".join(f"{role}:{rule}" for role, rule in roles.items()) + "}",
            f"run.dir={run}",
        ]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(elsewhere.heard) == 1 + 4  # at the start, and in each of Claude Code's episodes
    assert audit.main([str(run)]) == 0

    records = list(Reader(run))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == [1, 2]
    for step, told in enumerate(steps, 1):
        played = [one for one in records if one.step == step]
        assert Counter(one.agent["kind"] for one in played) == dict.fromkeys(AGENTS, 2)
        gains = [check_trained(run, one) for one in played]
        # At the first update of a step, new and old probabilities are the same, so this is what the loss is made of.
        assert told["actor/pg_loss"] == pytest.approx(-sum(gains) / len(gains), abs=1e-3)
        assert told["actor/grad_norm"] > 0 and told["training/rollout_actor_probs_pearson_corr"] >= 0.999
        for agent, rows in zip(AGENTS, (2, 1), strict=True):
            figures = [told[f"agent/{agent}/{name}"] for name in ("count", "resolve_rate", "rows")]
            assert figures == [2, 0.5, rows]
        for role, figures in ROLES.items():  # per episode, of all four
            assert [told.get(f"role/{role}/{name}", 0) for name in ("calls", "rows", "credit")] == figures


def check_trained(run: Path, record: Record) -> float:
    """Check an episode's rows and their advantages. Return the sum of these, weighted by the rows' tokens."""
    sampled = [node for node in record.nodes if node.logprobs is not None]
    codex = record.agent["kind"] == "codex"
    assert Counter(node.role for node in sampled) == (
        {"main": 4, "subagent/default": 1} if codex else {"main": 3, "subagent/general-purpose": 1}
    )
    assert [call.role for call in record.calls] == ([] if codex else ["subagent/Explore"])
    rows = [record.nodes[row.nodes[0]].role for row in record.rows]
    assert rows == (["main"] if codex else ["subagent/general-purpose", "main"])
    reward = record.verdict["reward"]
    assert record.credit == [reward if role == "main" else SUB_CREDIT for role in rows]
    found = trained.read(run, record)
    assert found is not None
    wanted = [reward - 0.5 if role == "main" else SUB_CREDIT - 0.5 for role in rows]
    assert [found.advantages[number] for number in range(len(rows))] == pytest.approx(wanted)
    assert {*found.values} == {n for row in record.rows for n in row.nodes}
    tokens = [sum(record.nodes[n].length for n in row.nodes) for row in record.rows]
    return sum(share * advantage for share, advantage in zip(tokens, wanted, strict=True)) / sum(tokens)
