"""Checks of a config, made before Ray, an engine or a model is started.

``check(config)`` takes a second: it reads the config, the task files and the machine, and imports neither torch, ray,
verl nor vLLM. For a run on GPUs, or on a CPU of a model that is no toy, it also makes the plan of ``rl.plan``, which
imports torch and transformers (seconds). What only verl can judge is left to verl's own ``validate_config``.

A check raises ``ConfigError``. Checks that do not depend on each other are all made, so that the error names all that
is wrong.
"""

from omegaconf import DictConfig

from rl.checks import numbers
from rl.checks.data import check_files, check_tasks
from rl.checks.episodes import check_episodes
from rl.checks.keys import check_interpolations, check_keys, check_types
from rl.checks.machine import check_cpu, check_disk
from rl.checks.model import check_memory, check_model, check_plan, check_teacher, check_toy
from rl.checks.names import check_names
from rl.config.compose import check_all


def check_values(config: DictConfig) -> None:
    """Raise ConfigError if values are of the wrong type or impossible by themselves."""
    check_interpolations(config)
    check_all(config, numbers.check_numbers, check_types)


def check(config: DictConfig, plays: bool = True) -> None:
    """Raise ConfigError with all that is wrong if the config cannot work on this machine.

    With ``config.prepare`` set, task files and model are made later, under the run directory, and are not looked at;
    call ``check_tasks`` and ``check_model`` once they exist. ``plays``: boxes run on this machine; else it need not be
    able to make them.
    """

    def settings(config: DictConfig) -> None:
        check_values(config)  # the other checks rely on them
        tasks = check_tasks if plays else check_files
        made = () if config.prepare else (check_model, check_memory, check_teacher, tasks, check_plan)
        check_all(
            config,
            check_cpu,
            numbers.check_batches,
            numbers.check_curriculum,
            numbers.check_loss,
            check_names,
            numbers.check_lengths,
            lambda config: check_episodes(config, plays),
            numbers.check_repeat,
            numbers.check_resume,
            numbers.check_schedule,
            numbers.check_left_out,
            check_toy,
            *made,
            check_disk,
        )

    check_all(config, check_keys, settings)
