"""This package finds what is wrong with a config before Ray, an engine or a model is started.

``check(config)`` takes a second: it reads the config, the task files and the machine, and imports neither torch, ray,
verl nor vLLM (but see ``rl.checks.keys``). For a run on GPUs it also makes the plan of ``rl.plan``, which imports torch
and transformers (seconds). What only verl can judge is left to verl's own ``validate_config``.

Every check raises ``ConfigError`` for the first thing that is wrong.
"""

from omegaconf import DictConfig

from rl.checks.data import check_tasks
from rl.checks.episodes import check_episodes
from rl.checks.keys import check_keys
from rl.checks.machine import check_cpu, check_disk
from rl.checks.model import check_model, check_plan
from rl.checks.numbers import check_batches, check_lengths, check_numbers, check_repeat


def check(config: DictConfig) -> None:
    """Raise ConfigError if the config cannot work on this machine.

    With ``config.prepare`` set, task files and model are made later, under the run directory, and are not looked at;
    call ``check_tasks`` and ``check_model`` once they exist.
    """
    check_cpu(config)
    check_numbers(config)
    check_keys(config)
    check_batches(config)
    check_lengths(config)
    check_episodes(config)
    check_repeat(config)
    if not config.prepare:
        check_model(config)
        check_tasks(config)
    check_disk(config)
    if not config.prepare:
        check_plan(config)
