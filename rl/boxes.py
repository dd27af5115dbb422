"""Pull and seal the images of task files, and print what was found in them. docs/sandboxes.md

    python -m rl.boxes TASKS.parquet ... sandbox=docker [sandbox.image_budget_gb=100] [--shard 1/4]
    python -m rl.boxes TASKS.parquet ... sandbox=docker --sizes     # is there room? pulls nothing

Exit status: 0 done, 1 an image cannot be had, 2 the config or a task file is wrong.
"""

import asyncio
from pathlib import Path

from rewards.task import TaskError, load_tasks
from rl.config.compose import ConfigError, compose
from rl.episodes.boxes import FromImages, check_room, kind_of, wanted_of
from rl.run.array_job import Shard
from rollout import program
from rollout.sandbox import SandboxError


def main() -> int:
    """Pull and seal the images of task files, and print what was found in them; return the exit status."""
    parser = program.parser("python -m rl.boxes", __doc__)
    parser.add_argument("tasks", nargs="+", help="parquet files of tasks, and config overrides such as sandbox=docker")
    parser.add_argument("--shard", metavar="I/N", help="only this part of the images, from 1/N to N/N")
    parser.add_argument("--sizes", action="store_true", help="only say how large they are, and whether there is room")
    options = parser.parse_args()
    overrides = [word for word in options.tasks if "=" in word]
    try:
        tasks = [task for path in options.tasks if path not in overrides for task in load_tasks(Path(path))]
        kind = kind_of(compose(overrides).sandbox)
        if not isinstance(kind, FromImages):
            raise ConfigError(f"sandbox={kind.name} makes boxes without images; give another kind")
        wanted = wanted_of(tasks)
        if options.shard:
            wanted = Shard.parse(options.shard).of(wanted, lambda one: one.source.image)
        check_room(kind, wanted, print)
        reports = {} if options.sizes else asyncio.run(kind.prepare(wanted, print))
    except ConfigError as error:
        error.tell("images")
        return 2
    except (TaskError, ValueError) as error:
        return program.failed(f"images: {error}", 2)
    except SandboxError as error:
        return program.failed(f"images: {error}")
    for instance_id, report in reports.items():
        print(f"{instance_id}: {'; '.join(report['residue']) or 'no residue'}")
    return 0


if __name__ == "__main__":
    program.end(main)
