"""Train on the nodes of a SLURM job: ``srun ... python -m rl.cluster key=value ...``, a task per node.

``scripts/slurm/train.sbatch`` starts it, docs/cluster.md is the guide. The first task is the head:

1. each node checks itself (``rl.checks``: config, data files, container engine, disk); if all find the same fault,
   the config is at fault, else the node;
2. the head leases the run directory (``rl.run.lease``): until then nobody has written there. It ends a job that was
   requeued without getting on (``rl.train.starts``);
3. the nodes are tested (``rl.cluster.preflight``); each copies model and task files to its own disk where
   ``cluster.stage_dir`` asks for it, and pulls and seals the sandbox images;
4. the head starts Ray, the others join it, and the head waits until each node is there with its GPUs;
5. the head runs ``python -m rl.train`` with RAY_ADDRESS, and passes SIGUSR1 and SIGTERM on to it. When the
   batch script is warned, it makes the file that RL_WARNING names; the head finds it however late it begins to look;
6. every node stops what it started, and copies Ray's logs to ``logs/<node>/`` in the run directory.

A node that fails is named in one line, and the job ends. The run directory is named by the job, so a requeued job
continues in it. Exit code: rl.train's (0 done, 1 failed, 2 the config is wrong or the run directory is in use, 75 ended
by a signal with nothing lost, 143 cut short), 1 also if two starts made no progress, or 69: a node failed its check,
did not join, or was lost.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path

from omegaconf import DictConfig

from rl.checks import check_values
from rl.cluster.head import UNAVAILABLE, StartStopped, head
from rl.cluster.limits import raise_limits
from rl.cluster.link import JobPosition, NodeError
from rl.cluster.member import member
from rl.cluster.preflight import BadNodes, leave_out
from rl.config.compose import ConfigError, compose
from rl.run import stop
from rl.run.lease import InUse
from rl.train import starts
from rollout import program


def run_directory(config: DictConfig, job: str) -> Path:
    """Return the absolute run directory, named by the job: a requeued job keeps its number."""
    return Path(config.run.dir or Path(config.run.root, config.trainer.experiment_name, f"slurm-{job}")).absolute()


def sweep_line(file: Path, task: str | None) -> list[str]:
    """Return the overrides of a task of an array job: the line of ``file`` with its number, from 1.

    Empty lines do not count.

    Raises:
        ConfigError: the job is no array job, or the file has no such line.
    """
    if task is None:
        raise ConfigError("--sweep needs an array job: sbatch --array=1-N ...")
    if not file.is_file():
        raise ConfigError(f"--sweep: no file {file.absolute()}")
    lines = [shlex.split(line) for line in file.read_text().splitlines() if line.strip()]
    if not 1 <= int(task) <= len(lines):
        raise ConfigError(
            f"--sweep: {file} has {len(lines)} lines and none for array task {task}; --array=1-{len(lines)}"
        )
    return lines[int(task) - 1]


async def _main(place: JobPosition, config: DictConfig, overrides: list[str], run_dir: Path, low: list[str]) -> None:
    def say(text: str) -> None:
        print(f"cluster: {text}", flush=True)

    code = 0
    try:
        if place.rank:
            await member(place, config, run_dir, low)
        else:
            for line in low:
                say(f"{place.node}: {line}")
            code = await head(place, config, overrides, run_dir, say)
    except StartStopped as error:
        say(f"stopped by {error} before the training began")
        code = stop.STOPPED
    except ConfigError as error:
        error.tell()
        code = 2
    except InUse as error:
        code = program.failed(f"cluster: {error}; wait for its end, or give another run.dir", 2)
    except starts.NoProgress as error:
        code = program.failed(f"cluster: {error}")
    except (NodeError, RuntimeError) as error:
        text = f"node {error}" if isinstance(error, NodeError) else f"node {place.node}: {error}"
        code = program.failed(f"cluster: {text}", UNAVAILABLE)
        if isinstance(error, BadNodes) and config.cluster.exclude_bad_nodes and error.names:
            leave_out(error.names)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still pull images cannot be told to end


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run this task of the job, and return or exit with the code of the docstring above."""
    options = program.parser("python -m rl.cluster", __doc__)
    options.add_argument("--sweep", type=Path, help="file with a line of overrides for each task of an array job")
    options.add_argument("overrides", nargs="*", help="as for rl.train")
    args = options.parse_args(argv)
    try:
        place = JobPosition.of(os.environ)
        more = sweep_line(args.sweep, place.array_task) if args.sweep else []
        overrides = [*args.overrides, *more]
        config = compose(overrides, check=check_values)
    except ConfigError as error:
        if int(os.environ.get("SLURM_PROCID", 0)) > 0:
            return 0  # the head says it
        error.tell()
        return 2
    run_dir = run_directory(config, place.job)
    config.run.dir = str(run_dir)
    asyncio.run(_main(place, config, overrides, run_dir, raise_limits()))
    return 0
