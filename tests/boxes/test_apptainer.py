"""This module tests boxes by apptainer: what only they do. The verbs are in the other files here.

The program is a stand-in (apptainer_stub.py) that plays its part with bubblewrap: what is tested is our side, from the
command lines to the files. docs/sandboxes.md says what that leaves open.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from apptainer_boxes import cli, images
from apptainer_boxes.box import boot_apptainer
from apptainer_boxes.images import Cache, evict, prepare, sealed
from rewards.grade import grade
from rewards.task import load_tasks
from rewards.verdict import Reason
from rl.config.compose import compose
from rl.episodes.boxes import kind_of, prepare_images
from rl.quickstart.tasks import make_tasks
from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.sealing import Source, Wanted
from rollout.sandbox.tartree import TarTree
from rollout.sandbox.treediff import Directory
from tests.boxes.apptainer_kit import IMAGE, Stub
from tests.packages_kit import APPTAINER, install
from tests.sandboxes import alive, sh

pytestmark = pytest.mark.bwrap


@pytest.fixture
def stub(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("SECRET", "of the trainer")
    made = Stub(tmp_path / "bin", repository)
    with made.first(monkeypatch):
        yield made


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


# --- the command line


async def test_a_boxs_command_line(stub: Stub, cache: Cache, tmp_path: Path) -> None:
    tool, sockets = tmp_path / "a,tool", tmp_path / "s"
    tool.touch()
    sockets.mkdir()
    limits = Limits(memory_bytes=2**30, cpus=0.5, processes=77)
    box = await boot_apptainer(Source(IMAGE), cache, limits=limits, binds={tool: "/opt/tool"}, socket_dir=sockets)
    try:
        await box.exec(["true", "$(x)"], env={"KEY": "a value", "HOME": "/elsewhere"}, timeout_s=30)
    finally:
        await box.close()
    call, root = stub.calls("exec")[-1], box.root
    command, argv = call["argv"][: call["argv"].index("/bin/sh")], call["argv"][call["argv"].index("/bin/sh") :]
    assert command == [
        *("--quiet", "exec", "--userns", "--containall", "--cleanenv", "--no-eval", "--net", "--network", "none"),
        *("--no-mount", "hostfs,cwd,bind-paths", *(["--no-privs"] if os.geteuid() == 0 else [])),
        *("--overlay", f"{root}/overlay", "--memory", str(2**30), "--memory-swap", str(2**30)),
        *("--cpus", "0.5", "--pids-limit", "77", "--home", f"{root}/home:/home/agent", "--pwd", "/testbed"),
        *("--mount", f"type=bind,source={root}/tree,destination=/testbed"),
        *("--mount", f"type=bind,source={root}/tmp,destination=/tmp"),
        *("--mount", f"type=bind,source={root}/tmp,destination=/var/tmp"),
        *("--mount", f'type=bind,"source={tool}",destination=/opt/tool,ro'),
        *("--mount", f"type=bind,source={sockets},destination={sockets},ro"),
        next(str(path) for path in cache.directory.glob("sealed-*/image.sif")),
    ]
    assert argv[4:] == [argv[4], "/elsewhere", "true", "$(x)"]
    inside = {key: value for key, value in call["env"].items() if key.startswith("APPTAINERENV_")}
    names = ("TMPDIR", "LANG", "KEY")
    assert inside == dict(zip((f"APPTAINERENV_{n}" for n in names), ("/tmp", "C.UTF-8", "a value"), strict=True))
    assert "SECRET" not in call["env"] and call["env"]["HOME"] == f"{root}/host"


# --- how a program ends


async def test_at_a_timeout_the_box_is_killed_and_not_the_program(stub: Stub, cache: Cache, nap: str) -> None:
    """The program has mounts to undo."""
    box = await boot_apptainer(Source(IMAGE), cache)
    try:
        await sh(box, "true")
        before = stub.cleaned_up()
        for timeout_s in (1, 5, 20):  # on a busy machine a box starts late
            done = await sh(box, f"echo begun; sleep {nap}", timeout_s)
            assert done.timed_out and not alive(nap)
            if done.stdout:
                break
        assert done.stdout and stub.cleaned_up() > before
        assert (await sh(box, "kill -KILL $PPID")).returncode == 137  # its own shell: the program's doing
    finally:
        await box.close()


# --- files


async def test_a_snapshot_on_a_base_image(stub: Stub, cache: Cache, repository: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.sif"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    for image in (IMAGE, str(base)):
        box = await boot_apptainer(Source(image), cache, snapshot=repository)
        try:
            assert (await sh(box, "git log --format=%s; echo new > new; rm link")).stdout == b"second\nfirst\n"
            patch = await box.diff()
            assert patch.count(b"diff --git") == 2 and b"+new" in patch and b"a/link" in patch
        finally:
            await box.close()


def test_a_tree_in_an_archive_is_the_tree(repository: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(repository, tree, symlinks=True)
    os.link(tree / "README.md", tree / "other-name")
    (tree / os.fsdecode(b"\xff")).write_bytes(b"x" * 20_000)
    (tree / ("long" * 40)).touch()
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "x").touch()
    subprocess.run(["tar", "-cf", tmp_path / "t", "--hard-dereference", "-C", tree, "."], check=True)
    archived, plain = TarTree(tmp_path / "t"), Directory(os.fsencode(tree))
    assert archived.files == plain.files
    assert all(archived.read(path) == plain.read(path) for path in plain.files)


async def test_what_else_a_program_may_write(stub: Stub, cache: Cache) -> None:
    writes = {}
    for cannot in ({}, {"overlay": True}):
        stub.cannot(**cannot)
        box = await boot_apptainer(Source(IMAGE), cache)
        try:
            await sh(box, "echo x > /opt/new")
            writes[bool(cannot)] = (await sh(box, "cat /opt/new")).returncode == 0
        finally:
            await box.close()
    assert writes == {False: True, True: False}


# --- what the program cannot do


async def test_without_control_groups_a_box_has_no_such_limits(stub: Stub, cache: Cache, caplog) -> None:
    stub.cannot(limits=True)
    box = await boot_apptainer(Source(IMAGE), cache)
    try:
        assert (await sh(box, "echo on")).stdout == b"on\n"
    finally:
        await box.close()
    options = stub.calls("exec")[-1]["argv"]
    assert "--memory" not in options and "--overlay" in options and "cannot limit memory" in caplog.text


@pytest.mark.parametrize(("cannot", "says"), [("net", "not separate"), ("start", "user namespaces are disabled")])
async def test_no_box_is_better_than_an_open_one(
    stub: Stub, cache: Cache, repository: Path, tmp_path: Path, cannot: str, says: str
) -> None:
    base = tmp_path / "base.sif"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    stub.cannot(**{cannot: True})
    with pytest.raises(SandboxError, match=says) as failure:
        await boot_apptainer(Source(str(base)), cache, snapshot=repository)
    assert failure.value.cause == "boot_failed"


async def test_a_box_that_does_not_start_is_no_program_that_failed(stub: Stub, cache: Cache) -> None:
    box = await boot_apptainer(Source(IMAGE), cache)
    try:
        (stub.directory / "options.json").write_text('{"start": true}')
        with pytest.raises(SandboxError, match="user namespaces are disabled") as failure:
            await sh(box, "true")
        assert failure.value.cause == "exec_failed"
        shutil.rmtree(cache.directory)
        with pytest.raises(SandboxError) as failure:
            await sh(box, "true")
        assert failure.value.cause == "missing_image"
    finally:
        await box.close()


def test_versions(stub: Stub) -> None:
    for version, known in (
        ("apptainer version 1.2.0", ("apptainer", (1, 2))),
        ("apptainer version 1.3.4-1.el9", ("apptainer", (1, 3))),
        ("singularity-ce version 4.1.0", ("singularity-ce", (4, 1))),
    ):
        stub.cannot(version=version)
        found = cli.program()
        assert (found.name, found.version) == known
        assert found.prefix == ("APPTAINERENV_" if known[0] == "apptainer" else "SINGULARITYENV_")
    others = ("apptainer version 1.1.9", "singularity-ce version 3.11.4", "singularity version 3.8.7", "what?")
    for version in others:
        stub.cannot(version=version)
        with pytest.raises(SandboxError) as failure:
            cli.program()
        assert failure.value.cause == "no_engine" and version.split()[-1].split("-")[0][:3] in str(failure.value)


# --- images


async def test_an_image_that_cannot_be_sealed_leaves_nothing(stub: Stub, cache: Cache) -> None:
    for source, left in (
        (Source("no/such:1"), []),
        (Source(IMAGE, workdir="/app"), []),
        (Source(IMAGE, setup_patch="no patch"), ["pulled"]),
    ):
        with pytest.raises(SandboxError):
            await boot_apptainer(source, cache)
        assert [path.name.partition("-")[0] for path in cache.directory.iterdir()] == left


async def test_the_cache_holds_no_history_and_hidden_paths_are_gone(stub: Stub, cache: Cache) -> None:
    hidden = await boot_apptainer(Source(IMAGE, "a" * 40, hide=("pkg", "/opt/hints")), cache)
    plain = await boot_apptainer(Source(IMAGE), cache)
    try:
        assert (await sh(hidden, "ls pkg; ls /opt/hints")).stdout == b""
        assert (await sh(hidden, f"git checkout -q {'a' * 40} README.md && git log --oneline")).returncode == 0
        assert (await sh(plain, "cat /opt/hints/answer")).stdout == b"the answer\n"
        assert (await sh(plain, f"ls {cache.directory} {stub.directory}")).returncode != 0
        assert b"the fix" not in b"".join(path.read_bytes() for path in plain._sif.image.parent.iterdir())
    finally:
        await hidden.close()
        await plain.close()
    assert len(stub.calls("pull")) == 1


async def test_images_are_made_once_and_reported(stub: Stub, cache: Cache) -> None:
    wanted = [Wanted(f"task-{n}", Source(IMAGE), ("pkg/mod.py::f", "pkg/mod.py::g", "no.py::f")) for n in range(3)]
    said: list[str] = []
    reports = await prepare(cache, wanted, parallel=3, say=said.append)
    assert len(stub.calls("pull")) == 1 and len(stub.calls("build")) == 2 and said[-1] == "images: 3 of 3 ready"
    assert {key: report["residue"] for key, report in reports.items()} == {
        f"task-{n}": ["test: pkg/mod.py::f"] for n in range(3)
    }
    assert sorted(path.name.partition("-")[0] for path in cache.directory.iterdir()) == ["pulled", "sealed"]


def test_processes_share_the_work(stub: Stub, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.cannot(pull_s=0.5)
    monkeypatch.setenv("PYTHONPATH", f"{APPTAINER.parents[1]}:{APPTAINER}")
    code = (
        "import asyncio, sys, pathlib; from apptainer_boxes import cli as c, images as i;"
        f"print(asyncio.run(i.plain(i.Cache(pathlib.Path(sys.argv[1])), c.program(), '{IMAGE}')).image)"
    )
    command = [sys.executable, "-c", code, str(cache.directory)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert len(outputs) == 1 and Path(outputs.pop().strip()).is_file() and len(stub.calls("pull")) == 1


async def test_the_least_recently_used_go_but_none_in_use(stub: Stub, cache: Cache, repository: Path) -> None:
    found = cli.program()
    for name in ("swe/two", "swe/three"):
        stub.push(name, repository)
    made = [await sealed(cache, found, Source(name)) for name in (IMAGE, "swe/two", "swe/three")]
    entries = {path.name for path in cache.directory.iterdir()}
    assert len(entries) == 6
    small = Cache(cache.directory, 1)
    assert await evict(small) == []  # all were used just now
    long_ago = time.time() - 2 * images.IN_USE_S
    for age, sif in enumerate(made):
        assert sif.entry is not None
        os.utime(sif.entry / "facts.json", (long_ago + age, long_ago + age))
    made[0].used()
    total = sum(size for _, size, _ in images._entries(cache))
    assert await evict(Cache(cache.directory, total)) == []
    assert [str(made[1].entry)] == [str(cache.directory / n) for n in await evict(Cache(cache.directory, total - 1))]
    assert [str(made[2].entry)] == [str(cache.directory / n) for n in await evict(small)]
    assert made[0].image.is_file() and len(list(cache.directory.iterdir())) == 4
    again = await sealed(small, found, Source("swe/two"))  # over the budget, it is made all the same
    assert again.image.is_file() and await prepare(small, [Wanted("x", Source("swe/two"))], say=lambda _: None) == {}


# --- from the config to a verdict


async def test_tasks_are_graded_as_the_config_says(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, run = tmp_path / "base.sif", tmp_path / "run"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    run.mkdir()
    install(APPTAINER, tmp_path / "installed", monkeypatch)
    options = [f"sandbox.base_image={base}", f"sandbox.cache_dir={tmp_path / 'cache'}", f"run.dir={run}"]
    config = compose(["sandbox=apptainer", *options])
    boot = kind_of(config.sandbox).boot()
    await asyncio.to_thread(make_tasks, tmp_path / "tasks", seed=5, n_train=1, n_heldout=1)
    (local,) = load_tasks(tmp_path / "tasks" / "train.parquet")
    image = dataclasses.replace(local, image=IMAGE, setup_patch=None, hidden_paths=())
    assert local.patch is not None
    broken = local.patch.replace("\n+    return ", "\n+    return 1 + ")
    for patch, reason in ((local.patch, None), (broken, Reason.TESTS_FAILED)):
        verdict = await grade(local, patch.encode(), functools.partial(boot, local, None), timeout_s=60)
        assert verdict.reason is reason, verdict
    await asyncio.to_thread(prepare_images, config.sandbox, run, [local, image], lambda _: None)
    assert list(json.loads((run / "images.json").read_text())) == [image.instance_id]
    box = await boot(image, None)
    assert (await sh(box, "cat README.md")).stdout == b"hello\n"
    await box.close()
    assert len(stub.calls("pull")) == 1


def test_the_package_is_installed_and_its_kind_is_a_choice_of_every_program(
    stub: Stub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, installed, cache = tmp_path / "source", tmp_path / "installed", tmp_path / "cache"
    shutil.copytree(APPTAINER, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))  # pip builds in place
    how = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(installed)]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(source)], check=True)
    make_tasks(tmp_path / "tasks", seed=5, n_train=1, n_heldout=1)
    (task,) = load_tasks(tmp_path / "tasks" / "train.parquet")
    image = "127.0.0.1:1/swe/one"  # no registry tells its size
    stub.push(image, repository)
    row = dataclasses.replace(task, image=image, setup_patch=None, hidden_paths=()).to_row()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    monkeypatch.setenv("PYTHONPATH", f"{APPTAINER.parents[1]}:{installed}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    command = ["-m", "rl.boxes", str(tmp_path / "tasks.parquet"), "sandbox=apptainer", f"sandbox.cache_dir={cache}"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "images: 1 of 1 ready" in done.stdout and f"{task.instance_id}: no residue" in done.stdout
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == ["pulled", "sealed"]
