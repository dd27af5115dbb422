"""Names that verl looks up, and values that its unions allow, are checked at once, together with all else."""

from __future__ import annotations

import pytest

from rl.checks import check
from rl.checks.keys import check_types
from rl.checks.names import _KNOWN, check_names, names
from rl.config.compose import ConfigError
from tests.check_kit import composed

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def test_the_names_are_those_that_verl_has_registered() -> None:
    from verl.trainer.config import algorithm  # noqa: F401  (imports the registry's module as verl does)
    from verl.trainer.ppo import core_algos
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    known = {key.rpartition(".")[2]: names(*place) for key, place in _KNOWN.items()}
    assert known["adv_estimator"] == core_algos.ADV_ESTIMATOR_REGISTRY.keys()
    assert known["loss_mode"] == core_algos.POLICY_LOSS_REGISTRY.keys()
    assert known["name"] == RolloutReplicaRegistry._registry.keys() >= {"vllm"}
    # Of the trainers those that this installation lacks are not registered.
    assert known["strategy"] >= EngineRegistry._engines["language_model"].keys() >= {"fsdp", "fsdp2"}
    assert known["loss_agg_mode"] >= {"token-mean", "seq-mean-token-mean"}


@pytest.mark.parametrize(
    "key, wrong, meant",
    [
        ("algorithm.adv_estimator", "grpo_typo", "did you mean grpo"),
        (f"{ACTOR}.policy_loss.loss_mode", "gpso", "did you mean gspo?"),
        (f"{ACTOR}.loss_agg_mode", "token_mean", "did you mean token-mean?"),
        ("actor_rollout_ref.rollout.name", "vlm", "did you mean vllm?"),
        (f"{ACTOR}.strategy", "xyz", "it is one of automodel, fsdp, fsdp2, "),
    ],
)
def test_a_wrong_name_is_told_with_the_one_that_was_meant(key: str, wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(composed("+experiment=qwen3_4b", **{key: wrong}))
    (line,) = caught.value.lines
    assert line.startswith(f"{key}: verl knows no {wrong!r}; {meant}")


def test_a_module_of_the_users_own_may_register_more() -> None:
    given = {f"{ACTOR}.policy_loss.loss_mode": "mine", "actor_rollout_ref.model.external_lib": "my.losses"}
    check_names(composed("+experiment=qwen3_4b", **given))


@pytest.mark.parametrize("value, right", [("0.5_5.0", True), (2.0, True), (True, False), ([0.5, 5.0], False)])
def test_a_threshold_is_what_verls_union_allows(value: object, right: bool) -> None:
    """The group's dataclass is named by the group above it alone."""
    made = composed("+experiment=qwen3_4b", **{f"{CORRECTION}.rollout_is_threshold": value})
    if right:
        check_types(made)
        return
    with pytest.raises(ConfigError, match=rf"{CORRECTION}.rollout_is_threshold is .*; it must be a number or a text"):
        check_types(made)


def test_what_the_plan_finds_is_told_with_all_else() -> None:
    wrong = {f"{ACTOR}.policy_loss.loss_mode": "gpso", "actor_rollout_ref.rollout.max_model_len": 10**7}
    with pytest.raises(ConfigError) as caught:
        check(composed("+experiment=qwen3_4b", **wrong), plays=False)
    said = "\n".join(caught.value.lines)
    assert "verl knows no 'gpso'" in said and "is more than the 262144 positions of" in said, said
