"""Train a policy: ``python -m rl.train +experiment=quickstart key=value ...``

The screen shows our lines only: what is being started, one line a step, a table at the end. What verl,
vLLM and Ray print goes to ``run.log`` in the run directory (``rl.config`` says which directory that is and
how the same command continues a killed run). Exit code: 0 done, 1 failed, 2 the config is wrong, 75 ended by
a signal with nothing lost, 143 ended by a signal at once (``rl.run.stop``).
"""

import contextlib
import functools
import importlib
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from rl.config import CONFIGS, CPU_ENVIRONMENT, ConfigError, register_resolvers
from rl.metrics import episodes as metrics
from rl.run import checkpoints, stop, watch
from rl.run.directory import Run, open_run
from rl.run.programs import last_lines
from rl.run.progress import RunProgress, failed, finished
from rl.screen import Screen, this_command
from rollout.sandbox import directory

register_resolvers()


def prepare(cfg: DictConfig, screen: Screen) -> None:
    """Call the config's ``prepare`` ("module:function") and set the keys that it returns."""
    if not cfg.prepare:
        return
    module, _, function = cfg.prepare.partition(":")
    for key, value in getattr(importlib.import_module(module), function)(cfg, screen).items():
        OmegaConf.update(cfg, key, value, force_add=True)


def set_environment(cfg: DictConfig, run: Run) -> None:
    """What the processes of the run find in their environment. The user's own settings win."""
    values = {
        "WANDB_DIR": str(run.dir),
        "WANDB_RUN_ID": run.dir.name,
        "WANDB_RESUME": "allow",
        "WANDB_SILENT": "true",
        "TENSORBOARD_DIR": str(run.dir / "tensorboard"),  # else below the working directory
        "TOKENIZERS_PARALLELISM": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the home directory
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if "WANDB_API_KEY" not in os.environ:
        values["WANDB_MODE"] = "offline"
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.full_determinism:  # as verl.trainer.main_ppo sets them; its vLLM servers do VLLM_BATCH_INVARIANT
        values |= {"VERL_FULL_DETERMINISM": "1", "PYTHONHASHSEED": str(rollout.seed)}
    if cfg.trainer.device == "cpu":
        values |= CPU_ENVIRONMENT
        # Ray would give each actor one thread; trainer and engine take turns on all cores.
        values["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    for key, value in values.items():
        os.environ.setdefault(key, value)


def complete(cfg: DictConfig, run: Run, ray_dir: str) -> None:
    """Fill in what is only known now: paths, and whether a resumed run has validated already."""
    rollout_agent = cfg.actor_rollout_ref.rollout.agent
    if rollout_agent.agent_loop_config_path is None:
        rollout_agent.agent_loop_config_path = str(CONFIGS / "agent_loops.yaml")
    with open_dict(cfg):
        if not (cfg.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")):
            cfg.ray_kwargs.ray_init._temp_dir = ray_dir
    OmegaConf.resolve(cfg)  # our resolvers are not known in verl's processes
    step = run.checkpoint_step
    records = [r for r in metrics.read_jsonl(run.dir / "metrics.jsonl") if r["step"] == step]
    if any(metrics.has_validation(r) for r in records):
        cfg.trainer.val_before_train = False
    elif step > 0:
        due = cfg.trainer.test_freq > 0 and step % cfg.trainer.test_freq == 0
        cfg.trainer.val_before_train = bool(due)


def train(cfg: DictConfig, screen: Screen, last_words: Callable[[str], None]) -> None:
    """Start or join Ray and run verl's trainer to its end. ``last_words``: see rl.run.watch.

    The body of ``verl.trainer.main_ppo.run_ppo``, with the trainer in this process (see
    ``rl.trainer.run_trainer``). A cluster that was started here ends here; one that was joined stays.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from rl.trainer import run_trainer

    validate_config(config=cfg, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    with open_dict(cfg):
        cfg.transfer_queue.enable = True
    environment = get_ppo_ray_runtime_env(cfg)
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
    options = OmegaConf.to_container(cfg.ray_kwargs.ray_init)
    if options["address"] or os.environ.get("RAY_ADDRESS"):
        # Its nodes have their own sizes, and not this process's environment.
        for key in ("num_cpus", "num_gpus", "object_store_memory"):
            options.pop(key, None)
        if cfg.trainer.device == "cpu":
            environment["env_vars"] |= {key: os.environ[key] for key in ("OMP_NUM_THREADS", *CPU_ENVIRONMENT)}
    options["runtime_env"] = environment | {k: v for k, v in options["runtime_env"].items() if v}
    try:
        ray.init(**options)
        stop.install(cfg.run.grace_s, screen.say)  # Ray has put its own handler there, which ends on the spot
        run_trainer(cfg, last_words)
    finally:
        ray.shutdown()
        directory.sweep()  # a worker that was killed has left its boxes


def goes_on(run: Run) -> str:
    """What a user who sees a run fail has to know besides the cause."""
    step = run.checkpoint_step
    return f"the same command goes on {f'after step {step}' if step else 'from the start'}"


def stopped(end: stop.Ended, run: Run, screen: Screen) -> int:
    """Say how a signal ended the run; the exit code."""
    if isinstance(end, stop.Stopped):
        step = run.checkpoint_step
        after = f"after step {step}" if step else "before the first step"
        screen.say(f"stopped by {end} {after}; the same command goes on")
        return stop.STOPPED
    screen.say(f"ended at once: {end}; {goes_on(run)}; log: {run.dir / 'run.log'}")
    return stop.CUT_SHORT


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="train")
def main(cfg: DictConfig) -> None:
    from rl.boxes import prepare_images
    from rl.checks import check, check_family, check_loggers, check_model, check_packages, check_tasks
    from rl.run.scratch import noted, remove_socket_directory, socket_directory

    screen = Screen()
    try:
        check(cfg)
        check_packages(cfg)
        run = open_run(cfg)
    except (ConfigError, RuntimeError) as error:
        print(f"config: {error}", file=sys.stderr)
        sys.exit(2)
    began = time.monotonic()
    for step in checkpoints.tidy(run.checkpoints, cfg.trainer.max_actor_ckpt_to_keep):
        screen.say(f"removed the checkpoint of step {step}, which was not written to its end")
    state = f"continuing from step {run.checkpoint_step}" if run.resumed else "new run"
    screen.say(f"{state} in {run.dir}")
    stop.install(cfg.run.grace_s, screen.say)
    set_environment(cfg, run)
    ray_note = run.dir / "ray_dir"
    ray_dir = socket_directory(ray_note)  # Ray's sockets and logs too
    progress = RunProgress(run.dir, cfg.trainer.total_training_steps, screen)
    witness = watch.Witness(
        lambda cause: f"{cause or 'the trainer was killed'}; {goes_on(run)}; log: {run.dir / 'run.log'}",
        screen.fileno(),
        noted(ray_note),
        run.lock.fileno(),
    )
    failure: BaseException | None = None
    try:
        screen.redirect(run.dir / "run.log")
        screen.show("preparing")
        prepare(cfg, screen)
        if cfg.data.custom_cls.path == "pkg://rl.dataset":  # else the files are another dataset's
            tasks = check_tasks(cfg)
            prepare_images(cfg.sandbox, run.dir, tasks, screen.say, functools.partial(screen.show, "images"))
        screen.show("checking the model")
        check_model(cfg)
        check_family(cfg)  # last: it imports verl, which is needed from here on anyway
        check_loggers(cfg)
        metrics.rewind(run.dir, run.checkpoint_step)
        complete(cfg, run, ray_dir)
        (run.dir / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
        screen.say("starting trainer and engine (their output: run.log)")
        progress.start()
        train(cfg, screen, witness.tell)
    except (Exception, KeyboardInterrupt) as error:
        failure = stop.reason() or error
        if not isinstance(failure, stop.Stopped):
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()
    finally:
        progress.finish()
        screen.restore()
        remove_socket_directory(ray_note)
        witness.dismiss()
    if isinstance(failure, ConfigError):
        print(f"config: {failure}", file=sys.stderr)
        sys.exit(2)
    if isinstance(failure, stop.Stopped | stop.CutShort):
        code = stopped(failure, run, screen)
        screen.next(("continue", this_command()))
        sys.exit(code)
    if failure is not None:
        plain = isinstance(failure, KeyboardInterrupt) and not isinstance(failure, stop.Ended)
        cause = "interrupted" if plain else last_lines(str(failure), 3) or repr(failure)
        failed(f"{cause}; {goes_on(run)}; log: {run.dir / 'run.log'}", screen)
        sys.exit(1)
    run.finish()
    finished(run.dir, (time.monotonic() - began) / 60, screen)


if __name__ == "__main__":
    main()
