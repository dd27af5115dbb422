"""Train a policy: check the config, open the run directory, start or join Ray, and run verl's trainer to its end.

    python -m rl.train +experiment=quickstart key=value ...

The screen shows our lines only: what is being started, one line per step, a table at the end. What verl, vLLM and Ray
print goes to ``run.log`` in the run directory (``rl.run.directory`` says which directory that is and how the same
command continues a killed run). Exit code: 0 done, 1 failed, 2 the config is wrong, 75 ended by a signal with nothing
lost, 143 ended by a signal in the middle of a step (``rl.run.stop``).
"""

if __name__ == "__main__":  # the imports take seconds, in which a scheduler may send its warning
    from rl.run import stop

    stop.early()

import contextlib
import functools
import gc
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rl.config.command import read_command
from rl.config.compose import CONFIGS, NO_REPORTS, ConfigError, check_all, workers_environment
from rl.metrics import episodes as metrics
from rl.run import checkpoints, slurm, stop, watch
from rl.run.directory import RunDirectory, open_run
from rl.run.fork_server import ON_NODES, ForkServer, nodes_executable
from rl.run.programs import last_lines
from rl.run.progress import RunProgress, failed, finished
from rl.run.scratch import ray_directory
from rl.run.screen import Screen, this_command
from rl.run.store import storing
from rl.run.weights import Weights, adopt, merge
from rl.train import starts, unfinished
from rollout import program
from rollout.dotted import attribute
from rollout.sandbox import directory


def prepare(config: DictConfig, screen: Screen) -> None:
    """Call the config's ``prepare`` ("module:function") and set the keys that it returns."""
    if not config.prepare:
        return
    for key, value in attribute(config.prepare)(config, screen).items():
        OmegaConf.update(config, key, value, force_add=True)


def merge_policy(config: DictConfig, weights: Weights | None, run: RunDirectory, screen: Screen) -> None:
    """Merge the weights of ``policy`` if they are shards. Raises ServeError."""
    if weights is not None and weights.sharded is not None:
        screen.show("merging the policy's shards")
        merge(weights.sharded, Path(weights.model), run.dir / "merge.log")
        config.actor_rollout_ref.model.path = weights.model


_ABOUT = """Train a policy with reinforcement learning.

The first one to try is +experiment=quickstart, which needs no GPU: docs/quickstart.md. The same command continues a
run that was stopped. Exit status: 0 done, 1 failed, 2 the config is wrong, 75 ended by a signal with nothing lost,
143 ended by a signal in the middle of a step."""


def set_environment(config: DictConfig, run: RunDirectory) -> None:
    """Set the environment variables that the processes of the run need; those that the user has set stay."""
    values = {
        "WANDB_DIR": str(run.dir),
        "WANDB_RUN_ID": run.name,
        "WANDB_RESUME": "allow",
        "WANDB_SILENT": "true",
        "TENSORBOARD_DIR": str(run.dir / "tensorboard"),  # else below the working directory
        "TOKENIZERS_PARALLELISM": "true",
        **NO_REPORTS,
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # with Ray's 15, engine and trainer wait for every other program of the machine
    }
    if not joins_cluster(config):  # such a cluster has its own token, or none
        values["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray writes one into the home directory
    if "WANDB_API_KEY" not in os.environ:
        values["WANDB_MODE"] = "offline"
    values |= workers_environment(config)
    for key, value in values.items():
        os.environ.setdefault(key, value)


def handle_signals(config: DictConfig, screen: Screen) -> None:
    """Make signals mean what ``rl.run.stop`` says."""
    stop.install(config.run.grace_s, screen.say, slurm.job_end)


def joins_cluster(config: DictConfig) -> bool:
    """Return whether the run joins a Ray cluster and does not start one of its own."""
    return bool(config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS"))


def complete(config: DictConfig, run: RunDirectory, ray_dir: str) -> None:
    """Fill in what is only known now: paths, and whether a resumed run still has to validate first."""
    rollout_agent = config.actor_rollout_ref.rollout.agent
    if rollout_agent.agent_loop_config_path is None:
        rollout_agent.agent_loop_config_path = str(CONFIGS / "agent_loops.yaml")
    with open_dict(config):
        if not joins_cluster(config):
            config.ray_kwargs.ray_init._temp_dir = ray_dir
    OmegaConf.resolve(config)  # verl's processes do not know our resolvers
    if config.trainer.val_only:
        config.trainer.val_before_train = True  # else verl trains
        return
    step = run.checkpoint_step
    records = [r for r in metrics.read_jsonl(run.dir / "metrics.jsonl") if r["step"] == step]
    if any(metrics.has_validation(r) for r in records):
        config.trainer.val_before_train = False
    elif step > 0:
        due = config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0
        config.trainer.val_before_train = bool(due)


def check_verl(config: DictConfig) -> None:
    """Raise ConfigError if verl's own validation refuses the config."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except Exception as error:  # of any kind: assertions, and what Hydra makes of those in dataclasses
        raise ConfigError(f"verl refuses this config: {last_lines(str(error), 3) or repr(error)}") from error


def train(
    config: DictConfig, screen: Screen, last_words: Callable[[str], None], forks: ForkServer | None = None
) -> None:
    """Start or join Ray and run verl's trainer to its end.

    ``last_words``: see ``rl.run.watch.Watchdog``. ``forks``: the server that Ray's workers are forked from; None: they
    are forked from the server of their node, if it has one (``rl.cluster``), else each starts as a new Python process.

    This is the body of ``verl.trainer.main_ppo.run_ppo``, with the trainer in this process (see
    ``rl.train.trainer.run_trainer``). A Ray cluster that is started here ends here; one that is joined lives on.
    """
    import ray

    from rl.train.trainer import run_trainer

    check_verl(config)
    with open_dict(config):
        config.transfer_queue.enable = True
    os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
    try:
        options = ray_options(config)
        if forks is not None:
            options["runtime_env"]["py_executable"] = forks.executable
            forks.wait()
        elif ON_NODES in os.environ:
            options["runtime_env"]["py_executable"] = nodes_executable()
        try:
            ray.init(**options)
        except SystemExit:  # from Ray's own handler of SIGTERM
            stop.end(stop.RunStopped("SIGTERM"))
        handle_signals(config, screen)  # in place of Ray's handler
        run_trainer(config, last_words)
    finally:
        ray.shutdown()
        handle_signals(config, screen)  # Ray leaves the kernel's default
        directory.sweep()  # sandboxes of workers that were killed


def ray_options(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of ``ray.init``: the config's, with verl's environment for actors in ``runtime_env``."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init)
    if joins_cluster(config):
        # The nodes of a cluster that is joined have their own sizes, and not this process's environment.
        for key in ("num_cpus", "num_gpus", "object_store_memory"):
            options.pop(key, None)
        environment["env_vars"] |= {key: os.environ[key] for key in workers_environment(config)}
    options["runtime_env"] = environment | {k: v for k, v in options["runtime_env"].items() if v}
    return options


def start(
    config: DictConfig,
    run: RunDirectory,
    screen: Screen,
    progress: RunProgress,
    witness: watch.Witness,
    weights: Weights | None,
) -> None:
    """Prepare data, images and model, check what was made, and train. Raises what ends the run early."""
    from rl.checks.data import check_files, check_tasks
    from rl.checks.machine import check_loggers
    from rl.checks.model import check_family, check_model
    from rl.episodes.boxes import prepare_images
    from rl.metrics import loggers
    from rl.plan.model import turn_notes

    screen.redirect(run.dir / "run.log")
    screen.show("preparing")
    prepare(config, screen)
    merge_policy(config, weights, run, screen)
    if config.data.custom_cls.path == "pkg://rl.train.dataset":  # else the files are another dataset's
        if config.cluster.episode_resource is None:
            tasks = check_tasks(config)
            prepare_images(config.sandbox, run.dir, tasks, screen.say, functools.partial(screen.show, "images"))
        else:
            check_files(config)  # the images are those of other nodes
    screen.show("checking the model")
    # On a CPU most of a run's start is imports; from here on other cores can do them. A cluster that is joined has
    # workers of its own.
    forkable = config.trainer.device == "cpu" and not joins_cluster(config)
    forks = ForkServer(os.environ["RL_SOCKET_DIR"]) if forkable else None
    gc.disable()  # collections take a fifth of the imports' time; run_trainer enables them again
    try:
        check_model(config)
        loggers.import_early(config.trainer.logger)
        check_family(config)  # last: it imports verl, which is needed from here on anyway
        for note in turn_notes(config.actor_rollout_ref.model.path):
            screen.say(note)
        check_loggers(config)
        kept = unfinished.load(run.dir, run.checkpoint_step)
        metrics.rewind(run.dir, run.checkpoint_step, kept.has if kept else lambda _: False)
        complete(config, run, ray_directory(os.environ["RL_SOCKET_DIR"]))
        (run.dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
        screen.say("starting trainer and engine (their output: run.log)")
        progress.start()
        with storing(run.dir, config.store, screen.say):
            train(config, screen, witness.tell, forks)
    finally:
        gc.enable()
        if forks is not None:
            forks.close()


def continues(run: RunDirectory) -> str:
    """Return what the user of a failed run has to know besides the cause."""
    after = f"after step {step}" if (step := run.checkpoint_step) else "from the start"
    return f"the same command continues {after}; log: {run.dir / 'run.log'}"


def report(failure: BaseException, run: RunDirectory, screen: Screen) -> int:
    """Tell the user how the run ended and how to continue it; return the exit code."""
    if isinstance(failure, ConfigError):
        failure.tell()
        return 2
    if isinstance(failure, stop.RunStopped):
        step = run.checkpoint_step
        after = f"after step {step}" if step else "before the first step"
        screen.say(f"stopped by {failure} {after}; the same command continues")
        screen.next(("continue", this_command()))
        return stop.STOPPED
    if isinstance(failure, stop.RunCutShort):
        screen.say(f"ended at once: {failure}; {continues(run)}")
        screen.next(("continue", this_command()))
        return stop.CUT_SHORT
    plain = isinstance(failure, KeyboardInterrupt) and not isinstance(failure, stop.RunEnded)
    # With Ray an error's text is pages of traceback, at whose end is the cause.
    cause = "interrupted" if plain else last_lines(str(failure), 3) or repr(failure)
    failed(f"{cause}; {continues(run)}", screen)
    return 1


def main() -> None:
    """Check the config, open the run directory, train, and exit with the code that the module's docstring lists."""
    from rl.checks import check, check_interpolations, check_values
    from rl.checks.gpus import card_notes
    from rl.checks.numbers import engine_notes, lag_notes, loss_notes
    from rl.checks.packages import check_packages
    from rl.run.scratch import noted, remove_socket_directory, socket_directory

    config = read_command("rl.train", _ABOUT, sys.argv[1:], check_values)
    screen = Screen()
    try:
        check_interpolations(config)  # all else relies on it
        weights = adopt(config)
        # A package that checks import (episode.credit) may import verl, which reads the environment then.
        os.environ.update({**workers_environment(config), **os.environ})
        check_all(config, lambda config: check(config, config.cluster.episode_resource is None), check_packages)
        run = open_run(config)
        if "RL_RUN_LEASE" not in os.environ:  # else rl.cluster has noted it
            # A user's own job may contain other runs: starts in which this one did not begin do not count for it.
            number = starts.following(run.dir, slurm.job()) if slurm.is_requeued() else 0
            starts.note(run, slurm.job(), number, Path(config.run.root) / "prepared")
    except ConfigError as error:
        error.tell()
        sys.exit(2)
    except RuntimeError as error:
        sys.exit(program.failed(f"config: {error}", 2))
    except starts.NoProgress as error:
        sys.exit(program.failed(str(error)))
    began = time.monotonic()
    for step in checkpoints.tidy(run.checkpoints, config.trainer.max_actor_ckpt_to_keep):
        screen.say(f"removed the checkpoint of step {step}, which was not written to its end")
    state = f"continuing from step {run.checkpoint_step}" if run.resumed else "new run"
    screen.say(f"{state} in {run.dir}")
    for note in [*loss_notes(config), *lag_notes(config), *engine_notes(config), *card_notes(config)]:
        screen.say(f"note: {note}")
    set_environment(config, run)
    sockets = run.dir / "ray_dir"
    stop.hold()  # what is made from here on has to be removed
    socket_directory(sockets, config.cluster.local_dir)
    progress = RunProgress(run.dir, config.trainer.total_training_steps, screen)
    witness = watch.Witness(
        lambda cause: f"{cause or 'the trainer was killed'}; {continues(run)}", screen.fileno(), noted(sockets)
    )
    run.lease.renew(witness.tell)
    failure: BaseException | None = None
    try:
        handle_signals(config, screen)
        stop.release()
        start(config, run, screen, progress, witness, weights)
    except (Exception, KeyboardInterrupt) as error:
        failure = stop.reason() or error
        if not isinstance(failure, stop.RunStopped):
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()
    finally:
        progress.finish()
        screen.restore()
        remove_socket_directory(sockets)
        witness.dismiss()
    if failure is not None:
        sys.exit(report(failure, run, screen))
    stop.hold()  # a signal must not make a failure of a run that has ended
    run.finish()
    finished(run.dir, (time.monotonic() - began) / 60, screen)


if __name__ == "__main__":
    program.end(main)
