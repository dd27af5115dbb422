"""Build container images of tasks with local snapshots, as `rl.data.make` writes them, and a task file that names them.

    python -m rl.data.images made.parquet --base IMAGE --out imaged.parquet [--limit 100] [--repository NAME]
    python -m rl.data.images harbor.parquet --out imaged.parquet [--limit 100]       # rl.data.convert harbor

IMAGE has git and the Python of the tasks' environments (the same 3.x). Nothing is downloaded, and nothing is run except
a look into IMAGE: a layer with a package's wheels is shared by its tasks, and each task adds its repository in
/testbed. Images of Harbor's tasks are built from their environment/Dockerfile, or of the image that they name; the
engine runs what is in there. A task whose image cannot be built is left out, and said. What is there is not built
again. Exit status: 0 images are there, 1 the engine failed, or there are none, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docker.errors import DockerException

from rewards.task import Task, TaskError, load_tasks
from rl.data import harbor_images
from rl.data.card import write_card
from rl.data.harbor import IMAGES
from rl.data.make import sources
from rl.data.make.environment import VENV
from rl.data.make.sources import MakeError
from rl.data.make.statement import in_turn
from rl.data.rates import other_than, write_rows
from rl.run.screen import Screen, this_command
from rollout import program
from rollout.sandbox import WORKDIR, SandboxError
from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import PROJECT, UNOWNED, ContainerEngine, get_engine

_LOOK_S = 120.0


@dataclass(frozen=True)
class Base:
    """A Base is a base image: its id, where its Python is, and the user that work trees belong to."""

    id: str
    python: str
    owner: tuple[int, int]


def chosen(tasks: Sequence[Task], limit: int | None) -> list[int]:
    """Return the numbers of at most `limit` tasks, in their order, taken evenly from the repositories."""
    return sorted(in_turn(range(len(tasks)), lambda number: tasks[number].repo)[:limit])


def look(engine: ContainerEngine, image: str, snapshots: Mapping[str, Path], copies: bool) -> Base:
    """Return what there is to know about a base image. Blocks.

    snapshots: one of each repository. copies: accept an image that has copies of these packages. Raises MakeError if
    the image does not have the Python of the environments, or git, or shows a copy of a package; SandboxError.
    """
    wanted = {_python(snapshot) for snapshot in snapshots.values()}
    if len(wanted) > 1:
        raise MakeError(f"the environments are of several Pythons ({', '.join(sorted(wanted))}); split the file")
    python = wanted.pop()
    plain = images.plain(engine, image)
    modules = {name for snapshot in snapshots.values() for name in sources.read(snapshot, "", ()).modules}
    names = [
        part
        for name in sorted(modules)
        for part in ("-path", f"*/{name}/__init__.py", "-o", "-name", f"{name}.py", "-o")
    ]
    script = 'readlink -f "$(command -v "$1")" || echo; command -v git || echo; shift; find / -xdev "$@"'
    program = {"command": [python, *names[:-1]], "entrypoint": ["sh", "-c", script, "look"]}
    with engine.helper(image, {"cap_drop": ["ALL"]}, **program) as container:
        engine.client.start(container)
        engine.client.wait(container, timeout=_LOOK_S)
        said = engine.client.logs(container, stdout=True, stderr=False).decode(errors="replace").splitlines()
    said += [""] * (2 - len(said))
    for what, where in ((python, said[0]), ("git", said[1])):
        if not where.startswith("/"):
            raise MakeError(f"{image} has no {what}, which these tasks need; choose another --base")
    if said[2:] and not copies:
        raise MakeError(f"{image} would show an agent a copy of a package: {said[2]}; choose another --base")
    return Base(str(engine.client.inspect_image(image)["Id"]), said[0], (plain.uid, plain.gid))


def build(engine: ContainerEngine, base: Base, task: Task, repository: str) -> tuple[str, bool]:
    """Build the image of a task unless it is there; returns its name, and whether it was built. Blocks."""
    shared = f"{repository}:{_name(task)}-{_key(base.id, _environment(task.snapshot))}"
    name = f"{repository}:{_name(task)}-{_key(shared, task.base_commit, task.instance_id)}"
    if not images.missing(engine, [name]):
        return name, False

    def links(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.issym() and os.path.basename(member.name).startswith("python"):
            member.linkname = base.python
        return member

    def tree(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name == f"{WORKDIR}/{VENV}".lstrip("/") else member

    with images.locked(shared):
        if images.missing(engine, [shared]):
            _layer(engine, base, base.id, shared, task.snapshot / VENV, f"{WORKDIR}/{VENV}", links)
    _layer(engine, base, shared, name, task.snapshot, WORKDIR, tree)
    return name, True


def _layer(
    engine: ContainerEngine,
    base: Base,
    image: str,
    name: str,
    directory: Path,
    place: str,
    take: Callable[[tarfile.TarInfo], tarfile.TarInfo | None],
) -> None:
    """Add a directory to an image. `take` gets each member of the archive and returns what of it is put there."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid, member.gid = base.owner
        member.uname = member.gname = ""
        return take(member)

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if place != WORKDIR:
            parent = tar.gettarinfo(directory.parent, WORKDIR.lstrip("/"))
            tar.addfile(owned(parent) or parent)
        tar.add(directory, place.lstrip("/"), filter=owned)
    # It is never started: an image of a task is made by copying alone.
    with engine.helper(image) as container:
        engine.client.put_archive(container, "/", buffer.getvalue())
        change = [f"WORKDIR {WORKDIR}", 'CMD ["bash"]', "ENTRYPOINT []", *UNOWNED]
        engine.client.commit(container, *name.rsplit(":", 1), changes=change)


def _python(snapshot: Path) -> str:
    found = sorted((snapshot / VENV / "bin").glob("python3.*"))
    if not found:
        raise MakeError(f"{snapshot}: has no {VENV}; only tasks of rl.data.make can be put into images")
    return found[0].name


def _environment(snapshot: Path) -> str:
    """Return what tells an environment from others: its distributions, with the digests of the wheels' files."""
    site = next((snapshot / VENV).glob("lib/*/site-packages"))
    texts = [*site.glob("*.dist-info/RECORD"), *site.glob("*.dist-info/METADATA"), *site.glob("*.pth")]
    return "".join(f"{path.relative_to(site)}\n{path.read_text(errors='replace')}" for path in sorted(texts))


def _name(task: Task) -> str:
    return task.repo.rpartition("/")[2].lower()


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    other_than(parser, args.tasks, args.out)
    screen = Screen()
    try:
        tasks = load_tasks(args.tasks)
        numbers = chosen(tasks, args.limit)
        engine = get_engine()
        make = _maker(engine, [tasks[number] for number in numbers], args)
        built, names, failed = 0, {}, []
        for count, number in enumerate(numbers):
            task = tasks[number]
            screen.show("images", count, len(numbers), task.instance_id)
            try:
                names[task.instance_id], new = make(task)
                built += new
            except harbor_images.BuildFailed as error:
                failed.append(f"{task.instance_id}: {error}")
        screen.clear()
        for line in failed:
            screen.say(f"left out: {line}")
        if not names:
            return 1
        write_rows(args.tasks, args.out, tasks, names, {"image": [*names.values()]})
        write_card(args.out, "built images", args.tasks, base=args.base)
    except (MakeError, TaskError) as error:
        screen.clear()
        return program.failed(f"error: {error}", 2)
    except (SandboxError, DockerException, OSError) as error:
        screen.clear()
        print(f"stopped: {' '.join(str(error).split())}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except KeyboardInterrupt:
        screen.next(("continue", this_command()))
        return 130
    screen.say(f"{len(names)} images, {built} of them built now; tasks in {args.out}")
    admitted = args.out.with_name(f"{args.out.stem}.admitted{args.out.suffix}")
    screen.next(
        ("admit", f"{sys.orig_argv[0]} -m rl.data.admit {args.out} --out {admitted} sandbox=docker"),
        ("to a registry", f"docker push --all-tags {next(iter(names.values())).rpartition(':')[0]}"),
    )
    return 0


def _maker(
    engine: ContainerEngine, tasks: Sequence[Task], args: argparse.Namespace
) -> Callable[[Task], tuple[str, bool]]:
    """Return a function like `build` for a task alone. Raises MakeError, SandboxError."""
    harbor = [task.image.startswith(f"{IMAGES}:") for task in tasks]
    if all(harbor):
        return lambda task: (task.image, harbor_images.build(engine, task))
    if any(harbor):
        raise MakeError("only some of the tasks are Harbor's; split the file")
    if args.base is None:
        raise MakeError("tasks with local snapshots need --base")
    base = look(engine, args.base, {task.repo: task.snapshot for task in tasks}, args.allow_copies)
    return lambda task: build(engine, base, task, args.repository)


def _parser() -> argparse.ArgumentParser:
    parser = program.parser("python -m rl.data.images", __doc__)
    add = parser.add_argument
    add("tasks", type=Path, help="a task file of rl.data.make, or of Harbor's tasks")
    add("--base", metavar="IMAGE", help="the image to build on; scripts/task_images.py --base makes one")
    add("--out", type=Path, required=True, help="the parquet file to write")
    add("--limit", type=int, metavar="N", help="tasks, evenly from all packages (default: all)")
    add("--repository", default=f"{PROJECT}/made", metavar="NAME", help=f"of the images (default: {PROJECT}/made)")
    add("--allow-copies", action="store_true", help="take a base image that has one of the packages itself")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(main)
