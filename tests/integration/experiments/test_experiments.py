"""This module tests experiments at toy size on a CPU: the config of Qwen3-Coder-30B-A3B with a Qwen3-MoE of a million
parameters.

That the engine's probabilities are the trainer's at both steps shows that experts' weights arrive: the engine starts
with random ones, and with those of the step before, at a learning rate of 1e-3, the correlation is 0.986 to 0.994. One
warm start serves all runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout import audit
from rollout.records import Record, unpack_ids
from rollout.records.reading import Reader
from tests.integration import train_kit
from tests.integration.process_kit import one_line
from tests.integration.train_kit import RunProcess, WarmStart

pytestmark = [
    pytest.mark.claude,
    pytest.mark.engine,
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def root(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.root of all tests here: one policy serves them. It imitates the episodes of the session's warm start."""
    made = tmp_path_factory.mktemp("experiments")
    warm_start.lend_to(made, "+experiment=qwen3_coder_30b", "scale=tiny")
    return made


def steps(run: Path, filtered: bool = True) -> list[dict[str, Any]]:
    """filtered: groups whose rewards are all equal were replaced."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        # Tokens of older weights differ by what was learned since: a little, where random weights differ in all.
        stale = record["training/off_policy/trajectory_staleness_worst/max"]
        assert record["training/rollout_actor_probs_pearson_corr"] >= (0.9 if stale else 0.999)
        assert record["group/used"] == 2
        if filtered:  # groups with equal rewards were played, and are not among the used ones
            equal, played = round(record["group/all_equal"] * record["group/played"]), record["group/played"]
            assert equal <= played - record["group/used"]
    assert audit.main([str(run)]) == 0
    return records


def test_tensor_and_expert_parallel(root: Path) -> None:
    """All weights are trained, with TP 2 and EP 2: two ranks of the trainer give their gathered weights to two workers,
    and each takes its half of heads, vocabulary and experts."""
    run = root / "tp2"
    process = RunProcess(run, "+experiment=qwen3_coder_30b", "scale=tiny_tp2", f"run.root={root}", f"run.dir={run}")
    process.until("step 1/2  resolved")
    said, code = process.ends(within=2400)
    assert code == 0, said
    for record in steps(run):
        assert record["actor/grad_norm"] > 0 and record["rollout_corr/rollout_is_mean"] > 0
        assert record["rollout_corr/rollout_rs_seq_mean_k3_seq_masked_fraction"] == 0
    said = (run / "run.log").read_text()
    assert all(f"Worker_TP{rank}_EP{rank}" in said for rank in (0, 1))
    saved = run / "checkpoints" / "global_step_2" / "actor"
    assert len(list(saved.glob("model_world_size_2_rank_*.pt"))) == 2


def test_lora(root: Path) -> None:
    """Adapters are trained for two steps. In the third a rollout worker is killed, and the run ends with a line."""
    run = root / "lora"
    arguments = ["+experiment=qwen3_coder_30b_lora", "scale=tiny", f"run.root={root}", f"run.dir={run}"]
    process = RunProcess(run, *arguments, "trainer.total_training_steps=3")
    process.until("step 2/3  resolved")
    process.in_a_step()
    process.find("ray::AgentLoopWorker").kill()
    said, code = process.ends()
    assert "AgentLoopWorker" in one_line(said) and "died" in said and code == 1
    assert "the same command continues after step 2" in said and f"{run}/run.log" in said
    assert all(record["actor/grad_norm"] > 0 for record in steps(run))
    (saved,) = (run / "checkpoints" / "global_step_2").rglob("lora_train_meta.json")
    assert json.loads(saved.read_text())["r"] == 32


def test_an_episode_outlives_a_weight_update(root: Path, tmp_path: Path) -> None:
    """Its box and session stay, and so do its first tokens; the later ones are sampled with the new weights, and it is
    trained on."""
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: claude_code\n  _target_: tests.integration.held_loop.Loop\n")
    process = train_kit.start(
        "+experiment=qwen3_coder_30b_async",
        "scale=tiny",
        f"run.root={root}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "algorithm.filter_groups.enable=false",  # the other episodes of its group may be as good or bad
        # Tokens from before an update may be further off than the limit; at a thousand times the usual learning rate
        # they would hardly be those of the same policy.
        "algorithm.rollout_correction.rollout_rs_threshold=1.0",
        "actor_rollout_ref.actor.optim.lr=1e-4",
    )
    text, _ = process.communicate()
    assert process.returncode == 0, text
    (run,) = (root / "qwen3_coder_30b_async").iterdir()
    first, second = steps(run, filtered=False)
    assert first["training/off_policy/trajectory_spans/max"] == 1
    assert second["training/off_policy/trajectory_spans/max"] == 2
    assert second["training/off_policy/trajectory_staleness_worst/max"] == 1
    assert second["rollout_corr/rollout_rs_seq_mean_k3_seq_masked_fraction"] == 0  # so it is trained on

    episodes = [versions(record) for record in Reader(run)]
    assert any(calls[:1] == [{0}] and calls[1:] == [{1}] * (len(calls) - 1) != [] for calls in episodes)


def versions(record: Record) -> list[set[int]]:
    """The weights that sampled each call of an episode."""
    return [set(unpack_ids(node.versions)) for node in record.nodes if node.logprobs is not None]


def test_separate_and_resumed(root: Path) -> None:
    """An engine of its own. Its trainer's worker is killed in the second step: one line says so, groups that were under
    way are played again, and the run goes on."""
    arguments = ["+experiment=qwen3_coder_30b_separate", "scale=tiny", f"run.root={root}"]
    # A step has two updates. At the usual rate they may make a policy that resolves nothing: all groups are equal then.
    arguments += ["actor_rollout_ref.actor.optim.lr=5e-4"]
    killed = RunProcess(root / "separate", *arguments, f"run.dir={root / 'separate'}")
    killed.until("step 1/2  resolved")  # not what a busy machine says before: "step 1/2  rollout"
    killed.find("ray::WorkerDict").kill()
    said, code = killed.ends()
    assert re.search("WorkerDict .*died", one_line(said)) and code == 1
    assert "the same command continues after step 1" in said

    resumed = train_kit.start(*arguments, f"run.dir={root / 'separate'}")
    text, _ = resumed.communicate()
    assert resumed.returncode == 0, text
    assert "continuing from step 1" in text
    steps(root / "separate")
