"""What can be known to be wrong before Ray, an engine or a model is started.

``check(cfg)`` takes a second: it reads the config, the task files and the machine, and imports
neither torch, ray, verl nor vLLM (but see ``rl.checks.keys``). For a run on GPUs it makes the plan of ``rl.plan``
too, which imports torch and transformers (seconds). What only verl can judge is left to verl's own ``validate_config``.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rewards.task import Task, TaskError, load_tasks
from rl.boxes import is_snapshot, kind_of, writable
from rl.checks.keys import check_keys
from rl.config import ConfigError
from rl.setup import agent_from, rules_from, shape_from
from rollout.proxy.parsers import FORMATS

GIB = 2**30
# Logs, traces and metrics of a short run, and Ray's own spill threshold.
MIN_FREE = 1 * GIB
# verl saves fp32 weights and two fp32 moments per parameter; the weights it starts from have 2 or 4
# bytes per parameter. The lower bound, so that nothing is refused that would have fitted.
CHECKPOINT_PER_WEIGHTS = 3

POSITIVE = (
    "run.grace_s",
    "cluster.start_timeout_s",
    "agent.max_turns",
    "agent.timeout_s",
    "grading.timeout_s",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
POSITIVE_OR_NULL = (
    "proxy.max_tokens",
    "sandbox.image_budget_gb",
    "trainer.total_training_steps",
    "actor_rollout_ref.rollout.max_model_len",
)


_MEGATRON_CP = "megatron.context_parallel_size"


def check(cfg: DictConfig) -> None:
    """Refuse a config that cannot work on this machine.

    With ``cfg.prepare`` set, task files and model are made later, under the run directory, and
    are not looked at; call ``check_tasks`` and ``check_model`` once they are there.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    _check_cpu(cfg)
    check_numbers(cfg)
    try:
        check_keys(cfg)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_batches(cfg)
    _check_lengths(cfg)
    check_episodes(cfg)
    _check_repeat(cfg)
    if not cfg.prepare:
        check_model(cfg)
        check_tasks(cfg)
    _check_disk(cfg)
    if not cfg.prepare:
        check_plan(cfg)


def check_episodes(cfg: DictConfig) -> None:
    """What episodes need, in training and in an evaluation, is there.

    Raises:
        ConfigError: for the first thing that is not.
    """
    _check_agent(cfg)
    _check_proxy(cfg)
    boxes = kind_of(cfg.sandbox)
    _check_positive(cfg, (f"sandbox.{key}" for key in boxes.numbers))
    boxes.check()
    if "quickstart" in cfg:
        boxes.need_base_image("the quickstart's tasks are local snapshots")
    _check_grading(cfg)


def check_task_files(cfg: DictConfig, key: str) -> list[Task]:
    """Every row of the files that ``key`` names is a task that can be run and graded. Returns them.

    Raises:
        ConfigError: for the first file, row or image that is wrong.
    """
    tasks = [task for _, task in _load(cfg, key).values()]
    kind_of(cfg.sandbox).check_tasks(tasks)
    return tasks


def check_tasks(cfg: DictConfig) -> list[Task]:
    """Every row of the task files is a task that can be run and graded; no held-out task is trained on. Returns them.

    Raises:
        ConfigError: for the first file, row or image that is wrong.
    """
    train = _load(cfg, "data.train_files")
    held_out = _load(cfg, "data.val_files")
    for instance_id, (key, _) in held_out.items():
        if instance_id in train:
            raise ConfigError(
                f"{instance_id} is a training task ({train[instance_id][0]}) and a held-out one ({key}); "
                "take it out of one of the files"
            )
    size = cfg.data.train_batch_size
    if len(train) < size:
        raise ConfigError(
            f"data.train_batch_size is {size}, but data.train_files has only {len(train)} tasks; "
            "a step needs that many different ones"
        )
    tasks = [task for _, task in (*train.values(), *held_out.values())]
    kind_of(cfg.sandbox).check_tasks(tasks)
    return tasks


def check_model(cfg: DictConfig) -> None:
    """A model given as a directory is there. Names of hub models are not looked up.

    Raises:
        ConfigError: it is not.
    """
    path = _local_model(cfg)
    if path is not None and not (path / "config.json").is_file():
        raise ConfigError(f"actor_rollout_ref.model.path: {path} is no model directory (no config.json there)")


def check_plan(cfg: DictConfig) -> None:
    """What is asked for fits the cluster (``rl.plan``). Not looked at on a CPU, nor with plan.check=false.

    Raises:
        ConfigError: for the first thing that does not fit.
    """
    if OmegaConf.select(cfg, "trainer.device") == "cpu" or not OmegaConf.select(cfg, "plan.check"):
        return
    from rl.plan import plan
    from rl.plan.model import ModelUnknown

    try:
        problems = plan(cfg).problems
    except ModelUnknown as error:
        raise ConfigError(str(error)) from error
    if problems:
        more = f" ({len(problems) - 1} more: python -m rl.plan prints all)" if problems[1:] else ""
        raise ConfigError(f"{problems[0]}{more}; plan.check=false starts it all the same")


def check_family(cfg: DictConfig) -> None:
    """The model's chat template is of a family that is known to keep prefixes. Imports verl (seconds).

    Raises:
        ConfigError: it is not, and proxy.any_family is not set.
    """
    path = _local_model(cfg)
    if cfg.proxy.any_family or path is None:
        return
    from rollout.proxy.render import known_family, unknown_family

    model_type = str(json.loads((path / "config.json").read_text()).get("model_type"))
    if known_family(model_type) is None:
        raise ConfigError(f"{path}: {unknown_family(model_type)}")


def check_loggers(cfg: DictConfig) -> None:
    """verl knows the loggers, and an online wandb has a key: it would wait for one on a screen that nobody sees.

    Imports verl (seconds).

    Raises:
        ConfigError: a logger has another name, or there is no key.
    """
    from verl.utils.tracking import Tracking

    if unknown := set(cfg.trainer.logger) - set(Tracking.supported_backend):
        known = ", ".join(Tracking.supported_backend)
        raise ConfigError(f"trainer.logger: verl has no {', '.join(sorted(unknown))}; it has {known}")
    if "wandb" in cfg.trainer.logger and os.environ.get("WANDB_MODE") == "online":
        import wandb

        # Silent: wandb would ask its server for the user's name to greet, for minutes where packets are dropped.
        wandb.setup(wandb.Settings(silent=True))
        if not wandb.login(prompt=False, verify=False):
            raise ConfigError("WANDB_MODE=online, but wandb has no key: set WANDB_API_KEY or run `wandb login`")


def check_packages(cfg: DictConfig) -> None:
    """What an experiment on GPUs needs beside the `gpu` extra is installed (docs/experiments.md).

    Raises:
        ConfigError: naming all that is missing.
    """
    if cfg.trainer.device == "cpu":
        return
    actor, model = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
    needed = []  # module, distribution
    if "megatron" in actor:
        needed += [("megatron", "megatron-core"), ("transformer_engine", "transformer-engine")]
    # verl's default, for packed rows.
    if OmegaConf.select(model, "override_config.attn_implementation") in (None, "flash_attention_2"):
        needed.append(("flash_attn", "flash-attn"))
    if cfg.trainer.v1.trainer_mode == "separate_async":
        needed.append(("cupy", "cupy"))
    if missing := [package for module, package in needed if importlib.util.find_spec(module) is None]:
        raise ConfigError(
            f"not installed, but needed on GPUs: {', '.join(missing)}; docs/experiments.md says which versions"
        )


def check_numbers(
    cfg: DictConfig, positive: Iterable[str] = POSITIVE, positive_or_null: Iterable[str] = POSITIVE_OR_NULL
) -> None:
    """Numbers above 0, and how often an episode is tried again. Raises ConfigError."""
    _check_positive(cfg, positive)
    _check_positive(cfg, (key for key in positive_or_null if OmegaConf.select(cfg, key) is not None))
    retries = cfg.episode.infra_retries
    if not isinstance(retries, int) or retries < 0:
        raise ConfigError(f"episode.infra_retries is {retries!r}; it must be 0 or more")


def _check_positive(cfg: DictConfig, keys: Iterable[str]) -> None:
    for key in keys:
        value = OmegaConf.select(cfg, key)
        # bool is an int in Python
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{key} is {value!r}; it must be a number above 0")


def _check_batches(cfg: DictConfig) -> None:
    """verl's rules for batch sizes, which it would state minutes later or as a failed assertion."""
    batch, actor, rollout = (
        cfg.data.train_batch_size,
        cfg.actor_rollout_ref.actor,
        cfg.actor_rollout_ref.rollout,
    )
    mini, gpus = actor.ppo_mini_batch_size, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    if cfg.algorithm.adv_estimator == "grpo" and rollout.n < 2:
        raise ConfigError(
            "actor_rollout_ref.rollout.n is 1, but algorithm.adv_estimator=grpo compares the episodes "
            "of a task with each other; set n to 2 or more"
        )
    if cfg.trainer.v1.trainer_mode == "separate_async":
        steps = cfg.trainer.v1.separate_async.parameter_sync_step
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


def _check_lengths(cfg: DictConfig) -> None:
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    sum_of = f"data.max_prompt_length + data.max_response_length = {row} tokens"
    ref = cfg.actor_rollout_ref
    limit = ref.rollout.max_model_len
    if limit is not None and row > limit:
        raise ConfigError(f"{sum_of} are more than actor_rollout_ref.rollout.max_model_len = {limit}; raise or lower")
    if not ref.actor.use_dynamic_bsz:
        return
    # How many devices share one row: Ulysses (FSDP; verl's older key still counts) or context parallel (Megatron).
    ways = ("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", _MEGATRON_CP)
    parallel = max(OmegaConf.select(ref.actor, way) or 1 for way in ways)
    for key in ("actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu"):
        room = OmegaConf.select(ref, key)
        if room is not None and row > room * parallel:
            raise ConfigError(
                f"{sum_of} do not fit one packed batch: actor_rollout_ref.{key} = {room}"
                f"{f' x {parallel} (sequence parallel)' if parallel > 1 else ''}; raise it to at least "
                f"{-(-row // parallel)}"
            )


def _check_repeat(cfg: DictConfig) -> None:
    """Full determinism is asked for where no step depends on which episodes end first."""
    if not OmegaConf.select(cfg, "actor_rollout_ref.rollout.full_determinism"):
        return
    for key, wanted in (
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.filter_groups.enable", False),
        ("trainer.v1.sampler.sync_refill_failed_groups", False),
    ):
        value = OmegaConf.select(cfg, key)
        if value is not None and value != wanted:
            raise ConfigError(
                f"{key} is {value}, with which a step's tasks depend on which episodes end first; with "
                f"actor_rollout_ref.rollout.full_determinism=true it must be {str(wanted).lower()}"
            )


def _check_cpu(cfg: DictConfig) -> None:
    """What needs an accelerator is not asked of a CPU."""
    if cfg.trainer.device != "cpu":
        return
    if "megatron" in cfg.actor_rollout_ref.actor:
        raise ConfigError("Megatron does not run on a CPU; take an experiment with FSDP2, such as qwen3_coder_30b")
    model = cfg.actor_rollout_ref.model
    if OmegaConf.select(model, "lora_rank") and not OmegaConf.select(model, "lora.merge"):
        raise ConfigError("vLLM on a CPU takes no LoRA adapters; set actor_rollout_ref.model.lora.merge=true")
    weights = cfg.actor_rollout_ref.rollout.checkpoint_engine.backend
    if cfg.trainer.v1.trainer_mode == "separate_async" and weights != "zmq":
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={weights} sends weights between GPUs; on a CPU it is "
            "zmq, as in configs/cpu.yaml"
        )


def _check_agent(cfg: DictConfig) -> None:
    try:
        agent_from(cfg, max_tokens=1, max_context=1)  # its limits are not looked at
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error


def _check_proxy(cfg: DictConfig) -> None:
    """The format of tool calls is one that is read strictly. Names of reasoning parsers only vLLM knows."""
    name = cfg.proxy.tool_parser
    if name not in FORMATS:
        raise ConfigError(f"proxy.tool_parser is {name!r}; docs/models.md lists what there is: {', '.join(FORMATS)}")
    if cfg.proxy.side_calls not in ("train", "serve", "forward"):
        raise ConfigError(f"proxy.side_calls is {cfg.proxy.side_calls!r}; it must be train, serve or forward")
    if cfg.proxy.side_calls == "forward":
        side = cfg.proxy.side_endpoint
        for key in ("url", "model"):
            if not side[key]:
                raise ConfigError(f"proxy.side_calls=forward needs proxy.side_endpoint.{key}")
        if side.key_env and not os.environ.get(side.key_env):
            raise ConfigError(f"proxy.side_endpoint.key_env names {side.key_env}, which is not set")


def _check_grading(cfg: DictConfig) -> None:
    """The rules can be read, the reward's shape makes sense, and its function is there."""
    for read in (rules_from, shape_from):
        try:
            read(cfg)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_disk(cfg: DictConfig) -> None:
    """Run directory and checkpoints can be written, and have room for logs and one checkpoint."""
    run = Path(cfg.run.dir or cfg.run.root).absolute()
    checkpoints = Path(OmegaConf.merge(cfg, {"run": {"dir": str(run)}}).trainer.default_local_dir).absolute()
    run = writable(run, "run.dir / run.root", "give another directory")
    checkpoints = writable(checkpoints, "trainer.default_local_dir", "give another directory")
    saved, model = 0, _local_model(cfg)
    if cfg.trainer.save_freq > 0 and model is not None and model.is_dir():
        saved = CHECKPOINT_PER_WEIGHTS * sum(f.stat().st_size for f in model.glob("*.safetensors"))
    if run.stat().st_dev == checkpoints.stat().st_dev:
        _check_free(run, MIN_FREE + saved, "logs and one checkpoint", "run.root")
    else:
        _check_free(run, MIN_FREE, "logs", "run.root")
        _check_free(checkpoints, saved, "one checkpoint", "trainer.default_local_dir")


def _check_free(place: Path, needed: int, what: str, key: str) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{place} has {free / GIB:.1f} GiB free, the run needs at least {needed / GIB:.1f} ({what}); make room or "
            f"set {key} to another disk"
        )


def _local_model(cfg: DictConfig) -> Path | None:
    """The model's directory if the config names one, None for a hub name such as ``Qwen/Qwen3-8B``."""
    name = OmegaConf.select(cfg, "actor_rollout_ref.model.path")
    if not name:
        raise ConfigError("actor_rollout_ref.model.path is not set; give a model directory or a hub name")
    path = Path(name).expanduser()
    is_path = name[0] in "~./" or name.count("/") > 1 or path.exists()
    return path.absolute() if is_path else None


def _load(cfg: DictConfig, key: str) -> dict[str, tuple[str, Task]]:
    """The instance ids of the files that ``key`` names, each with its file and its task."""
    files = OmegaConf.select(cfg, key)
    if not files:
        raise ConfigError(f"{key} is not set; give a parquet file of tasks, or a list of such files")
    found: dict[str, tuple[str, Task]] = {}
    usable = _usable(cfg)
    for name in files if isinstance(files, ListConfig) else [files]:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: no file {path.absolute()}")
        try:
            for task in load_tasks(path):
                usable(task)
                if task.instance_id in found:
                    raise TaskError(f"{path}: {task.instance_id}: instance_id: also in {found[task.instance_id][0]}")
                found[task.instance_id] = str(path), task
        except TaskError as error:
            raise ConfigError(f"{key}: {error}") from error
    return found


def _usable(cfg: DictConfig) -> Callable[[Task], Any]:
    """What a task needs besides a valid row: its snapshot, where that is a directory; in local sandboxes it must."""

    def local(task: Task) -> None:
        if not task.snapshot.is_dir():
            raise TaskError(f"{task.instance_id}: image: no directory {task.snapshot}")

    images = kind_of(cfg.sandbox).from_images
    return lambda task: None if images and not is_snapshot(task) else local(task)
