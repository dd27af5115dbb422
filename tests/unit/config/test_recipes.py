"""Recipes (configs/recipe): each goes with every experiment, and a loss that does nothing is told."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rl.checks import check
from rl.checks.model import check_plan
from rl.checks.names import check_names
from rl.checks.numbers import lag_notes, loss_notes
from rl.config.compose import CONFIGS, ConfigError
from rl.config.overrides import options
from rl.plan.model import ModelShape, shape_of
from tests.check_kit import composed

EXPERIMENTS, RECIPES = options("experiment", [CONFIGS]), options("recipe", [CONFIGS])
WHOLE = ("dressage", "lego_rl", "uni_agent")  # of published runs, with their batches
ACTOR = "actor_rollout_ref.actor"


def with_recipe(experiment: DictConfig, recipe: str) -> DictConfig:
    """Return what Hydra composes of an experiment at its full scale and a recipe; composing takes a second."""
    made = OmegaConf.merge(experiment, OmegaConf.load(CONFIGS / "recipe" / f"{recipe}.yaml"))
    assert isinstance(made, DictConfig)
    return made


def test_every_experiment_takes_the_word_recipe() -> None:
    """Without a choice of its own, recipe=NAME is refused, and +recipe=NAME comes after the scale."""
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        chosen = OmegaConf.to_container(OmegaConf.load(path)).get("defaults", [])  # type: ignore[union-attr]
        if {"/scale": "full"} in chosen:
            assert chosen.index({"/recipe": "grpo"}) < chosen.index({"/scale": "full"}), path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_recipe_goes_with_every_experiment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the checks of a start; tasks are not looked at. The batches of whole recipes are those of 24 to 64
    GPUs: on fewer, more time is needed to end a step, and the plan says how much."""
    experiment = composed(f"+experiment={name}")
    experiment.prepare = experiment.prepare or "made:later"  # so that no task file is needed
    shapes: dict[str, ModelShape] = {}

    def remembered(config: Any, *named: Any) -> ModelShape:  # finding it takes as long as all checks
        if str(named) not in shapes:
            shapes[str(named)] = shape_of(config, *named)
        return shapes[str(named)]

    monkeypatch.setattr("rl.plan.shape_of", remembered)
    for recipe in RECIPES:
        config = with_recipe(experiment, recipe)
        if recipe in WHOLE:
            config.run.grace_s = 100_000
        check(config, plays=False)
        check_plan(config)
        assert not loss_notes(config) or recipe == "lego_rl", "only Lego-RL takes one update"


@pytest.mark.parametrize("recipe", ["gspo", "uni_agent"])
def test_a_recipe_is_chosen_by_one_word_and_kept_by_the_toys(recipe: str) -> None:
    """The command line has Hydra merge the file over the experiment; the scale comes after it."""
    full = composed("+experiment=qwen3_coder_30b", f"recipe={recipe}")
    assert full == with_recipe(composed("+experiment=qwen3_coder_30b"), recipe)
    toy = composed("+experiment=qwen3_coder_30b", f"recipe={recipe}", "scale=tiny")
    for key in ("algorithm", "episode", f"{ACTOR}.policy_loss", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.clip_ratio_low"):
        assert OmegaConf.select(toy, key) == OmegaConf.select(full, key)
    assert (toy.data.train_batch_size, toy.actor_rollout_ref.rollout.n) == (2, 4)
    assert toy.actor_rollout_ref.actor.ppo_mini_batch_size in (1, 2)


def test_an_experiment_is_what_it_is_without_a_recipe() -> None:
    """recipe=grpo sets nothing."""
    assert OmegaConf.load(CONFIGS / "recipe" / "grpo.yaml") in ({}, None)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "grpo"])
def test_every_recipe_names_its_source(recipe: str) -> None:
    head = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text().partition("\n\n")[0]
    assert any(word in head for word in ("arXiv ", "@")) or "verl's preset" in head


@pytest.mark.parametrize(
    "recipe, changes, said",
    [
        (
            "gspo",
            {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
            "hardly anything is clipped; recipe=gspo has",
        ),
        ("gspo", {"clip_ratio_low": None, "clip_ratio_high": None}, "the clip 0.2 / 0.2 is for the ratios of tokens"),
        ("grpo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, "those of tokens will nearly all be clipped"),
        ("cispo", {"ppo_mini_batch_size": 32}, "loss_mode=cispo and its clip change nothing"),
        ("cispo", {"ppo_mini_batch_size": 32, "ppo_epochs": 2}, None),
    ],
)
def test_a_loss_that_does_nothing_is_told(recipe: str, changes: dict[str, object], said: str | None) -> None:
    config = with_recipe(composed("+experiment=qwen3_coder_30b"), recipe)
    config.actor_rollout_ref.actor.update(changes)
    notes = loss_notes(config)
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, []),
        ({"trainer.v1.sampler.max_off_policy_threshold": None}, ["rows of any age are trained on"]),
        ({"trainer.v1.sampler.max_off_policy_threshold": 1}, ["those played ahead included"]),
        ({"algorithm.rollout_correction.rollout_is": None}, ["token corrects that (colocate_async)"]),
        ({"algorithm.rollout_correction": {"rollout_is": None, "bypass_mode": True}}, []),
    ],
)
def test_rows_of_older_weights_have_a_limit_and_a_correction_or_it_is_told(
    changes: dict[str, Any], said: list[str]
) -> None:
    config = composed("+experiment=qwen3_coder_30b_async")
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    notes = lag_notes(config)
    assert len(notes) == len(said) and all(words in note for words, note in zip(said, notes, strict=True))
    config.trainer.v1.trainer_mode = "sync"
    assert lag_notes(config) == []


def test_icepops_preset_is_verls_own() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    preset = RolloutCorrectionConfig.decoupled_token_icepop()
    ours = with_recipe(composed("+experiment=qwen3_coder_30b"), "icepop").algorithm.rollout_correction
    assert all(ours[key] == getattr(preset, key) for key in ("rollout_is", "rollout_is_threshold", "rollout_rs"))


@pytest.mark.parametrize(
    "key, wrong, meant",
    [
        ("algorithm.rollout_correction.rollout_is", "tokens", "token"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1,seq_mean_k4", "seq_mean_k"),
        (f"{ACTOR}.kl_loss_type", "low_var_k1", "low_var_kl"),
        ("trainer.v1.trainer_mode", "snyc", "sync"),
    ],
)
def test_a_wrong_name_of_a_correction_costs_no_rollout(key: str, wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: verl knows no '{wrong.rpartition(',')[2]}'; did you mean {meant}"):
        check_names(composed("+experiment=qwen3_4b", **{key: wrong}))


@pytest.mark.parametrize("right", [{f"{ACTOR}.kl_loss_type": "k3+"}, {"algorithm.rollout_correction.rollout_rs": None}])
def test_a_right_name_is_accepted(right: dict[str, object]) -> None:
    check_names(composed("+experiment=qwen3_4b", **right))
