"""This module tests the command rl.sft without a trainer: its command line, its checks, and the order of its rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rl.checks.model import check_model
from rl.config.compose import ConfigError, compose
from rl.evaluate.player import changed
from rl.run.screen import Screen
from rl.run.weights import Weights, adopt, find_weights
from rl.sft import rounds, trainer
from rl.sft.__main__ import _decides, main, spelled_out
from rl.sft.checks import check_sft
from rl.traces.rows import RowsError
from tests.check_kit import composed
from tests.unit.data.test_select import episode, write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "episodes-of-a-run", episode("a"))
    return tmp_path / "episodes-of-a-run"


@pytest.mark.parametrize("name", ["quickstart", "qwen3_4b", "qwen3_8b", "qwen3_coder_30b_lora"])
def test_the_experiments_can_be_fine_tuned(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's trainer gets the experiment's model, engine and devices, as verl's own dataclasses take them."""
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(f"+experiment={name}", f"run.root={data}", f"sft.data=[{data}]")
    monkeypatch.setattr("rl.sft.checks.check_packages", lambda config: None)  # flash-attn
    check_sft(config)
    monkeypatch.setattr(trainer.pyarrow.parquet, "read_metadata", lambda path: SimpleNamespace(num_rows=100))
    passes = trainer.Passes(2, 1e-4, 30, 1024, 1)
    made = trainer._settings(config, "/model", Path("rows"), Path("checkpoints"), passes)
    ref, engine, model = config.actor_rollout_ref, omega_conf_to_dataclass(made.engine), made.model
    lora, split = ref.model.lora_rank > 0, ref.actor.fsdp_config.ulysses_sequence_parallel_size
    assert (engine.strategy, engine.offload_policy) == ("fsdp2", ref.actor.fsdp_config.offload_policy)
    assert engine.ulysses_sequence_parallel_size == split == (8 if "30b" in name else 1)
    assert (model.path, model.lora_rank) == ("/model", ref.model.lora_rank)
    assert model.target_modules == ref.model.target_modules
    assert model.override_config == ref.model.override_config
    assert made.optim.lr == 1e-4 and made.data.train_batch_size == 30 and made.trainer.save_freq == 3
    assert made.data.max_token_len_per_gpu >= ref.actor.ppo_max_token_len_per_gpu
    assert ("hf_model" in made.checkpoint.save_contents) != lora
    assert (config.sft.lr > 5e-5) == (lora or name == "quickstart")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sft.data": None}, "give data=[DIR,...] to fine-tune once, or rounds=N; neither is set"),
        ({"sft.rounds": 2}, "both are set"),
        ({"sft.data": ["/nowhere"]}, "sft.data: no directory /nowhere"),
        ({"sft.data": "DIR"}, "it must be a list of directories"),
        ({"sft.data": ["/nowhere/a.parquet"]}, "sft.data: no file /nowhere/a.parquet"),
        ({"sft.data": ["a.parquet"], "sft.trainer": "llamafactory"}, "sft.trainer=llamafactory takes episodes"),
        ({"sft.trainer": "axolotl"}, "it must be verl, llamafactory, dpo"),
        ({"sft.trainer": "dpo", "sft.data": None, "sft.rounds": 1}, "needs unresolved episodes, too"),
        ({"sft.lr": "abc"}, "sft.lr is 'abc'; it must be a number above 0"),
        ({"sft.epochs": 0}, "sft.epochs is 0"),
        ({"sft.budget": 0}, "sft.budget is 0"),
        ({"sft.select.resolvd": True}, "sft.select.resolvd"),
        ({"sft.select.limit": 3}, "set sft.budget"),
        ({"trainer.nnodes": 2}, "rl.sft trains on one node"),
        ({"sft.max_length": 10**6}, "do not fit one packed batch"),
        ({"policy": "/nowhere"}, "policy: no directory /nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_starts(data: Path, changes: dict[str, Any], says: str) -> None:
    config = composed("+experiment=quickstart", f"run.root={data}", f"sft.data=[{data}]")
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError) as caught:
        check_sft(config)
    assert any(says in line for line in caught.value.lines), caught.value


def test_tied_embeddings_are_taken_on_a_cpu(data: Path, tmp_path: Path) -> None:
    """Only a weight sync has them refused, and here none is made."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"tie_word_embeddings": true, "model_type": "qwen2"}')
    keys = ["prepare=null", "~quickstart", f"actor_rollout_ref.model.path={tmp_path}/model", f"sft.data=[{data}]"]
    config = compose(["+experiment=quickstart", *keys, f"run.root={tmp_path}"])
    check_sft(config)
    with pytest.raises(ConfigError, match="tied embeddings"):
        check_model(config)


def test_megatron_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl\.sft trains with FSDP"):
        check_sft(composed("+experiment=qwen3_coder_30b_megatron", f"sft.data=[{data}]", f"run.root={data}"))


def test_all_mistakes_of_a_command_line_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+experiment=quickstart", "data=[/nowhere]", "policy=/nowhere", "trainer.nnodes=2"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1].rstrip(":") for line in said] == ["policy", "sft.data", "trainer.nnodes"]


def test_the_keys_of_its_group_need_no_prefix() -> None:
    given = [
        "+experiment=quickstart",
        "rounds=3",
        "data=[a]",
        "select.same=patch",
        "data.train_batch_size=2",
        "sft.lr=1",
    ]
    assert spelled_out(given) == [
        "+experiment=quickstart", "sft.rounds=3", "sft.data=[a]", "sft.select.same=patch", "data.train_batch_size=2",
        "sft.lr=1",
    ]  # fmt: skip


def test_a_run_stands_for_its_last_rounds_policy(tmp_path: Path) -> None:
    def model(place: Path) -> str:
        place.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (place / name).write_text("{}")
        return str(place)

    once = model(tmp_path / "once" / "model")
    assert find_weights(str(tmp_path / "once")) == Weights(once)
    run = tmp_path / "experiment-sft" / "date"
    models = [model(run / f"iteration_{n}" / "model") for n in (2, 10)]
    (run / "iteration_11").mkdir()  # has no policy yet
    (run / "config.yaml").write_text("")
    assert find_weights(str(run)) == Weights(models[1], None, run, 10)
    assert find_weights(str(run / "iteration_2")) == Weights(models[0], None, run, 2)
    assert find_weights(str(run)).name == "experiment-sft-date-step10"
    assert find_weights(str(run / "iteration_2" / "model")) == Weights(models[0])


class StubbedRounds:
    """Stands for what plays, serves and trains; keeps what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resolved: int = 2) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.dies_in: tuple[Any, ...] | None = None
        self.resolved = resolved
        monkeypatch.setattr(rounds, "play_all", self.play)
        monkeypatch.setattr(rounds, "tune", self.tune)
        monkeypatch.setattr(rounds, "start_server", self.serve)
        monkeypatch.setattr(rounds, "Forks", lambda *_, **__: None)
        monkeypatch.setattr(rounds, "load_tasks", lambda path: [f"{path.stem}{n}" for n in range(4)])

    def note(self, *what: Any) -> None:
        self.log.append(what)
        if what == self.dies_in:
            raise KeyboardInterrupt

    def serve(self, model: str, *_: Any) -> Any:
        self.note("serve", Path(model).parent.name)
        return SimpleNamespace(close=lambda: self.note("end"))

    async def play(self, config: DictConfig, weights: Weights, tasks: list[str], *rest: Any) -> int:
        place = Path(config.out)
        self.note(place.parent.name, place.name, Path(weights.model).parent.name, *tasks)
        place.mkdir(parents=True, exist_ok=True)
        if place.name == "collection":
            names = [f"{place.parent.name}-{task}" for task in tasks]
            write(place, *(episode(one, one, 1.0 if n < self.resolved else 0.0) for n, one in enumerate(names)))
        rate = {"value": 0.5, "low": 0.1, "high": 0.9}
        found = {"complete": True, "tasks": len(tasks), "samples": 1, "episodes": len(tasks), "resolved": 2}
        found |= {"pass_at_1": rate, "verdicts": {}, "infra": {"episodes": 0}}
        (place / "results.json").write_text(json.dumps(found))
        return 0

    def tune(self, config: Any, model: str, sources: list[Path], out: Path, *_: Any) -> dict[str, Any]:
        self.note("tune", out.name, Path(model).parent.name, *(place.parent.name for place in sources))
        return {"rows": 3, "trained": 5}


def play(tmp_path: Path, **sft: Any) -> str:
    config = composed(
        "+experiment=quickstart", f"run.dir={tmp_path}", "data.train_files=[train]", "data.val_files=[val]"
    )
    for key, value in {"rounds": 2, "tasks": 3, **sft}.items():
        OmegaConf.update(config, f"sft.{key}", value)
    rounds.play_rounds(config, "/warm/start", tmp_path, Screen())
    return (tmp_path / "rounds.md").read_text()


ROUND_1 = [
    ("iteration_1", "collection", "warm", "train0", "train1", "train2"),
    ("end",),
    ("tune", "iteration_1", "warm", "iteration_1"),
    ("serve", "iteration_1"),
    ("iteration_1", "evaluation", "iteration_1", "val0", "val1", "val2", "val3"),
]
BEFORE = [("serve", "warm"), ("iteration_0", "evaluation", "warm", "val0", "val1", "val2", "val3")]


def test_the_closed_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server per policy: it evaluates a policy and plays its episodes. The next round takes the next tasks."""
    played = StubbedRounds(monkeypatch)
    table = play(tmp_path)
    assert played.log == [
        *BEFORE,
        *ROUND_1,
        ("iteration_2", "collection", "iteration_1", "train3", "train0", "train1"),
        ("end",),
        ("tune", "iteration_2", "iteration_1", "iteration_2"),
        ("serve", "iteration_2"),
        ("iteration_2", "evaluation", "iteration_2", "val0", "val1", "val2", "val3"),
        ("end",),
    ]
    assert table.splitlines()[-1].startswith("| 2 | 2 of 3 | 2 | 3 | 5 | 0.500 | 0.100 to 0.900 | 0 |")
    assert len(table.splitlines()) == 5
    selected = json.loads((tmp_path / "iteration_2" / "data" / "selection.json").read_text())
    assert (selected["episodes"], selected["resolved"]) == (2, 2)


def test_accumulating_starts_anew_with_all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = StubbedRounds(monkeypatch)
    play(tmp_path, accumulate=True, tasks=9)  # there are four
    tuned = [what for what in played.log if what[0] == "tune"]
    assert tuned[1] == ("tune", "iteration_2", "warm", "iteration_1", "iteration_2")
    # What a round's policy plays next is its own.
    assert ("iteration_2", "collection", "iteration_1", "train0", "train1", "train2", "train3") in played.log


def test_a_budget_ends_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = StubbedRounds(monkeypatch)
    play(tmp_path, rounds=5, budget=3)
    chosen = [json.loads(path.read_text())["episodes"] for path in sorted(tmp_path.glob("*/data/selection.json"))]
    assert chosen == [2, 1]
    assert played.log[-2][0] == "iteration_2" and played.log[-1] == ("end",)


def test_a_round_without_anything_to_train_on_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = StubbedRounds(monkeypatch, resolved=0)
    with pytest.raises(RowsError, match=r"round 1: none of 3 episodes is left to train on \(--resolved took 3\)"):
        play(tmp_path)
    assert played.log[-1] == ("end",)


@pytest.mark.parametrize("step", range(1, len(BEFORE) + len(ROUND_1)))
def test_a_killed_run_does_only_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    played = StubbedRounds(monkeypatch)
    played.dies_in = died = [*BEFORE, *ROUND_1][step]
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, rounds=1)
    before, played.log, played.dies_in = played.log, [], None
    play(tmp_path, rounds=1)
    steps = {what for what in [*BEFORE, *ROUND_1] if len(what) > 2}  # neither servers' starts nor their ends
    done = {what for what in before if what in steps and what != died}
    again = {what for what in played.log if what in steps and what[0] != "tune"}  # which knows by itself what it has
    assert not done & again and steps - done <= {*played.log}
    assert (tmp_path / "iteration_1" / "report.json").exists()


def test_the_group_has_the_rules_defaults() -> None:
    """A rule that the config names is one of rl.data.select's."""
    assert set(compose(["+experiment=quickstart"]).sft.select) == {"resolved", "unflagged", "same"}


@pytest.mark.parametrize("launcher", [False, True])
def test_a_fine_tuning_that_the_kernel_ended_says_so(launcher: bool, tmp_path: Path) -> None:
    """Its log ends with a progress bar. torch.distributed.run outlives the process that it has started."""
    killed = "import os; print('Epoch 1/1: 0%', flush=True); os.kill(os.getpid(), 9)"
    command = ["-c", killed]
    if launcher:
        (tmp_path / "killed.py").write_text(killed)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(tmp_path / "killed.py")]
    with pytest.raises(RuntimeError, match=r"SIGKILL ended it, .* memory runs out \(\d+ GiB .*sft.batch_size"):
        trainer.run_logged([sys.executable, *command], {}, tmp_path / "sft.log", lambda: None)


def test_a_directory_belongs_to_one_fine_tuning() -> None:
    """Given again with other data or rates, the command would say "done" of the policy that is there. More rounds may
    be asked for."""
    (before, same), other = (decides("sft.rounds=1"), decides("sft.rounds=3")), decides("sft.rounds=1", "sft.lr=0.1")
    assert changed(before, same) == "" and changed(before, other) == "sft.lr is 0.001 there and 0.1 here"


def decides(*keys: str) -> dict[str, Any]:
    return _decides(OmegaConf.create(OmegaConf.to_yaml(composed("+experiment=quickstart", *keys), resolve=True)))


def test_a_policy_takes_the_place_of_the_experiments_model(tmp_path: Path) -> None:
    """Shards are merged later; until then their directory with config and tokenizer stands for the model."""
    config = composed("+experiment=qwen3_4b")
    assert adopt(config) is None and config.actor_rollout_ref.model.path == "Qwen/Qwen3-4B-Instruct-2507"
    config.policy = "some/hub-name"
    assert adopt(config) == Weights("some/hub-name") and config.actor_rollout_ref.model.path == "some/hub-name"
    actor = tmp_path / "checkpoints" / "global_step_3" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    (actor / "fsdp_config.json").write_text("{}")
    config.policy = str(actor.parent)
    found = adopt(config)
    assert found is not None and found.sharded == actor
    assert config.actor_rollout_ref.model.path == str(actor / "huggingface")
    (actor / "merged").mkdir()
    (actor / "merged" / "config.json").write_text("{}")
    adopt(config)
    assert config.actor_rollout_ref.model.path == str(actor / "merged")
