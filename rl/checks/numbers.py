"""Checks of numbers: each by itself, and those that verl would refuse minutes later or by an assertion.

Batches, lengths, schedule, loss and curriculum are checked here. The notes are about settings that are allowed but
seldom meant.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config.compose import ConfigError, refuse
from rl.config.plugins import agents_of

POSITIVE = (
    "run.grace_s",
    "cluster.start_timeout_s",
    "proxy.max_calls",
    "proxy.max_body_mb",
    "proxy.max_session_tokens",
    "grading.timeout_s",
    "store.timeout_s",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "curriculum.other",
    "curriculum.solved",
    "curriculum.readmit_after",
    "curriculum.window",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "sft.epochs",
    "sft.lr",
    "sft.batch_size",
    "sft.samples",
    "sft.beta",
)
POSITIVE_OR_NULL = (
    "cpu_threads",
    "episode.deadline",
    "run.save_minutes",
    "run.collective_timeout_s",
    "proxy.max_tokens",
    "sandbox.image_budget_gb",
    "trainer.total_training_steps",
    "actor_rollout_ref.rollout.max_model_len",
    "sft.max_length",
    "sft.rounds",
    "sft.tasks",
    "sft.budget",
)
# Keys of the actor that say how many devices share one row: Ulysses (FSDP; verl's older key still counts) or context
# parallel (Megatron).
_SHARING = (
    "fsdp_config.ulysses_sequence_parallel_size",
    "ulysses_sequence_parallel_size",
    "megatron.context_parallel_size",
)

# No ratio of a row differs from 1 by as much, and most of tokens' do not differ by as little.
_ROW_CLIP = 0.01


def check_numbers(
    config: DictConfig, positive: Iterable[str] = POSITIVE, positive_or_null: Iterable[str] = POSITIVE_OR_NULL
) -> None:
    """Raise ConfigError with a line for each key that must be above 0 and is not, and for a wrong number of retries."""
    positive = (*agent_limits(config), *positive)
    lines = [*_not_positive(config, positive), *_not_positive(config, positive_or_null, or_null=True)]
    retries = config.episode.infra_retries
    if not isinstance(retries, int) or retries < 0:
        lines.append(f"episode.infra_retries is {retries!r}; it must be 0 or more")
    refuse(lines)


def agent_limits(config: DictConfig) -> list[str]:
    """Return the keys of the agents that must be above 0. Only Claude Code needs a limit of turns; others' may be 0."""
    keys = []
    for key, settings in agents_of(config).items():
        if settings.get("kind", "claude_code") == "claude_code" or settings.get("max_turns"):
            keys.append(f"{key}.max_turns")
        if "timeout_s" in settings:
            keys.append(f"{key}.timeout_s")
    return keys


def check_positive(config: DictConfig, keys: Iterable[str]) -> None:
    """Raise ConfigError with a line for each of the keys that is not a number above 0."""
    refuse([*_not_positive(config, keys)])


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0; in Python, true and false are numbers, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _not_positive(config: DictConfig, keys: Iterable[str], or_null: bool = False) -> Iterator[str]:
    for key in keys:
        value = OmegaConf.select(config, key)
        if not (is_positive(value) or (or_null and value is None)):
            yield f"{key} is {value!r}; it must be a number above 0"


def check_curriculum(config: DictConfig) -> None:
    """Raise ConfigError if the preferred rates are not a range, or if the tasks come from a dataset without rates."""
    rates = list(config.curriculum.prefer)
    numbers = len(rates) == 2 and all(isinstance(one, int | float) for one in rates)
    if not (numbers and 0 <= rates[0] <= rates[1] <= 1):
        raise ConfigError(f"curriculum.prefer is {rates}; it must be two resolve rates, such as [0.2,0.8]")
    if config.curriculum.by_rate and config.data.custom_cls.path != "pkg://rl.train.dataset":
        raise ConfigError("curriculum.by_rate=true needs task files; leave data.custom_cls.path as it is")


def check_batches(config: DictConfig) -> None:
    """Raise ConfigError if verl could not split a step's episodes into updates and over devices."""
    batch, ref = config.data.train_batch_size, config.actor_rollout_ref
    actor, rollout = ref.actor, ref.rollout
    mini, gpus = actor.ppo_mini_batch_size, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.algorithm.adv_estimator == "grpo" and rollout.n < 2:
        raise ConfigError(
            "actor_rollout_ref.rollout.n is 1, but algorithm.adv_estimator=grpo compares the episodes "
            "of a task with each other; set n to 2 or more"
        )
    if actor.get("use_prefix_grouper"):
        raise ConfigError(
            "actor_rollout_ref.actor.use_prefix_grouper=true has no effect: the V1 trainer does not read it; "
            "leave it out"
        )
    if config.trainer.v1.trainer_mode == "separate_async":
        steps = config.trainer.v1.separate_async.parameter_sync_step
        if batch != steps * mini:
            raise ConfigError(
                f"data.train_batch_size is {batch}; with trainer.v1.trainer_mode=separate_async it must be "
                f"parameter_sync_step x ppo_mini_batch_size = {steps} x {mini} = {steps * mini}"
            )
    elif batch % mini:
        raise ConfigError(
            f"data.train_batch_size is {batch}, which is no multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size = {mini}; the last update would be mostly padding"
        )
    if gpus % rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}, "
            f"which does not divide the {gpus} devices of trainer.nnodes x trainer.n_gpus_per_node"
        )
    if actor.use_dynamic_bsz:
        return
    if batch * rollout.n % gpus:
        raise ConfigError(
            f"data.train_batch_size x actor_rollout_ref.rollout.n = {batch * rollout.n} episodes a step "
            f"do not divide over {gpus} devices; change one of them or set "
            "actor_rollout_ref.actor.use_dynamic_bsz=true"
        )
    if actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set; without "
            "actor_rollout_ref.actor.use_dynamic_bsz=true verl needs it"
        )


def check_left_out(config: DictConfig) -> None:
    """Raise ConfigError if episodes that a limit ended are left out, but groups emptied by that are not replaced."""
    v1 = config.trainer.v1
    if config.episode.mask_overlong and v1.trainer_mode == "sync" and not v1.sampler.sync_refill_failed_groups:
        raise ConfigError(
            "episode.mask_overlong=true leaves out episodes that a limit ended, perhaps all of a step; set "
            "trainer.v1.sampler.sync_refill_failed_groups=true, so that other tasks take the place of their groups"
        )


def check_loss(config: DictConfig) -> None:
    """Raise ConfigError if the loss would weigh rows in another way than the config says, or differently per batch."""
    mode, key = config.actor_rollout_ref.actor.loss_agg_mode, "actor_rollout_ref.actor.loss_agg_mode"
    if config.episode.weigh_by_episode and mode != "seq-mean-token-mean":
        raise ConfigError(
            f"{key} is {mode}, which has its own weights of rows; set episode.weigh_by_episode=false, or "
            "seq-mean-token-mean for episodes that count once"
        )
    if mode == "seq-mean-token-sum-norm" and not config.actor_rollout_ref.actor.loss_scale_factor:
        raise ConfigError(
            f"{key} is {mode}, for which verl divides by the longest row of each micro-batch; set "
            "actor_rollout_ref.actor.loss_scale_factor to a constant instead, for example data.max_response_length"
        )


def loss_notes(config: DictConfig) -> list[str]:
    """Return a line for each setting of the loss that, with the others, changes nothing or nearly nothing, and for an
    estimator that compares rows."""
    actor, v1 = config.actor_rollout_ref.actor, config.trainer.v1
    mode, notes, estimator = actor.policy_loss.loss_mode, [], config.algorithm.adv_estimator
    if estimator not in ("grpo", "rloo"):
        notes.append(
            f"algorithm.adv_estimator={estimator} compares rows, not episodes: one with sub-agents counts several times"
        )
    bounds = [actor.clip_ratio if one is None else one for one in (actor.clip_ratio_low, actor.clip_ratio_high)]
    clip = f"the clip {bounds[0]:g} / {bounds[1]:g} is for the ratios of"
    if mode == "gspo" and max(bounds) > _ROW_CLIP:
        notes.append(
            f"{clip} tokens; with policy_loss.loss_mode=gspo the ratio is a row's, which stays within a thousandth of "
            "1, so that hardly anything is clipped; recipe=gspo has 0.0003 / 0.0004"
        )
    if mode == "vanilla" and max(bounds) <= _ROW_CLIP:
        notes.append(f"{clip} rows (gspo); those of tokens will nearly all be clipped")
    one = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
    if one and mode != "vanilla" and v1.trainer_mode != "separate_async" and not bypass:
        notes.append(
            f"a step has one update, in which every ratio is 1: policy_loss.loss_mode={mode} and its clip change "
            "nothing; lower actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    return notes


def engine_notes(config: DictConfig) -> list[str]:
    """Return a line for each setting of the engine that makes it do its work twice."""
    ranks = OmegaConf.select(config, "actor_rollout_ref.rollout.data_parallel_size") or 1
    if ranks == 1:
        return []
    return [
        f"actor_rollout_ref.rollout.data_parallel_size={ranks}: vLLM sends each call to the rank that has the fewest, "
        "whichever has read its conversation, so most turns read it again; with 1 there are more replicas, and an "
        "episode stays on one"
    ]


def lag_notes(config: DictConfig) -> list[str]:
    """Return a line for each setting with which an asynchronous mode wastes groups, or trains on older weights' tokens
    as if the newest had sampled them."""
    v1, notes = config.trainer.v1, []
    if v1.trainer_mode == "sync":
        return []
    key, limit = "trainer.v1.sampler.max_off_policy_threshold", v1.sampler.max_off_policy_threshold
    if limit is None:
        notes.append(f"{key}=null: rows of any age are trained on")
    elif limit == 1:
        notes.append(f"{key}=1 drops every group that began before the last weight update, those played ahead included")
    correction = "algorithm.rollout_correction"
    if not any(OmegaConf.select(config, f"{correction}.{name}") for name in ("rollout_is", "bypass_mode")):
        notes.append(
            f"{correction}.rollout_is is not set: tokens that older weights have sampled are trained on as if the "
            f"newest had; token corrects that ({v1.trainer_mode})"
        )
    return notes


def check_lengths(config: DictConfig) -> None:
    """Raise ConfigError if the longest row fits neither the engine nor a packed batch."""
    row = config.data.max_prompt_length + config.data.max_response_length
    sum_of = f"data.max_prompt_length + data.max_response_length = {row} tokens"
    ref = config.actor_rollout_ref
    limit = ref.rollout.max_model_len
    if limit is not None and row > limit:
        raise ConfigError(f"{sum_of} are more than actor_rollout_ref.rollout.max_model_len = {limit}; raise or lower")
    if not ref.actor.use_dynamic_bsz:
        return
    parallel = max(OmegaConf.select(ref.actor, key) or 1 for key in _SHARING)
    for key in ("actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu"):
        room = OmegaConf.select(ref, key)
        if room is not None and row > room * parallel:
            raise ConfigError(
                f"{sum_of} do not fit one packed batch: actor_rollout_ref.{key} = {room}"
                f"{f' x {parallel} (sequence parallel)' if parallel > 1 else ''}; raise it to at least "
                f"{-(-row // parallel)}"
            )


def check_schedule(config: DictConfig) -> None:
    """Raise ConfigError if the first step would train with rate 0: it would cost a step and change nothing."""
    actor = config.actor_rollout_ref.actor
    optim = actor.optim
    if optim.lr_warmup_steps <= 0 and not optim.lr_warmup_steps_ratio > 0:
        return
    where = "actor_rollout_ref.actor.optim: the warm-up begins with a step of rate 0;"
    if actor.strategy == "megatron":
        if not optim.lr_warmup_init > 0:
            raise ConfigError(f"{where} set lr_warmup_init above 0")
    elif optim.lr_scheduler_type != "cosine" or optim.zero_indexed_step:
        raise ConfigError(
            f"{where} set lr_scheduler_type=cosine and zero_indexed_step=false (and min_lr_ratio=1.0 for a rate that "
            "stays constant afterwards)"
        )


def check_resume(config: DictConfig) -> None:
    """Raise ConfigError if a run would not go on from its own checkpoints."""
    if (mode := config.trainer.resume_mode) != "auto":
        raise ConfigError(f"trainer.resume_mode={mode}: a run goes on from its own checkpoints; policy= gives others")


def check_repeat(config: DictConfig) -> None:
    """Raise ConfigError if full determinism is asked for where a step depends on which episodes end first."""
    if not OmegaConf.select(config, "actor_rollout_ref.rollout.full_determinism"):
        return
    for key, wanted in (
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.filter_groups.enable", False),
        ("trainer.v1.sampler.sync_refill_failed_groups", False),
    ):
        value = OmegaConf.select(config, key)
        if value is not None and value != wanted:
            raise ConfigError(
                f"{key} is {value}, with which a step's tasks depend on which episodes end first; with "
                f"actor_rollout_ref.rollout.full_determinism=true it must be {str(wanted).lower()}"
            )
