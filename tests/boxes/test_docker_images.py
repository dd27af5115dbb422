"""This module tests images of a real engine: what sealing reports, who its user is, pulls, and the disk budget."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.sandbox import SandboxError
from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import boot_docker
from rollout.sandbox.docker.engine import PROJECT, ContainerEngine, get_engine
from rollout.sandbox.pulls import Pulls
from rollout.sandbox.sealing import Source, Wanted
from tests.check_kit import write
from tests.datasets import snapshot_row
from tests.docker_kit import left, registry, small_image
from tests.sandboxes import REPOSITORY, sh

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture
def engine() -> Iterator[ContainerEngine]:
    yield get_engine()
    assert left(get_engine()) == []


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own: nothing that this machine's user has is noted, or known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "_known", {})


def variant(engine: ContainerEngine, name: str, script: str, *changes: str) -> str:
    """Make an image of the small image by a script, run as root, and instructions; returns its name."""
    tag = f"{PROJECT}/test-{name}:1"
    client = engine.client
    container = client.create_container(
        small_image(),
        ["bash", "-euc", script],
        labels=engine.labels(),
        network_disabled=True,
        host_config=client.create_host_config(ulimits=engine.ulimits()),
        use_config_proxy=False,
    )["Id"]
    try:
        client.start(container)
        assert client.wait(container)["StatusCode"] == 0, client.logs(container)
        client.commit(container, *tag.split(":"), changes=['CMD ["true"]', *changes])
    finally:
        client.remove_container(container, force=True)
    return tag


@pytest.fixture(scope="module")
def tags() -> Iterator[list[str]]:
    """The names of three images that differ."""
    made = [variant(get_engine(), f"number{i}", f"echo {i} > /testbed/number") for i in range(3)]
    yield made
    drop(get_engine(), *made)


def drop(engine: ContainerEngine, *refs: str) -> None:
    """Remove the images that are there."""
    for ref in refs:
        if not images.missing(engine, [ref]):
            engine.client.remove_image(ref, force=True)


async def test_what_is_left_is_reported(engine: ContainerEngine) -> None:
    tag = variant(
        engine,
        "residue",
        "cd /testbed; touch pkg/mod.py.orig; git init -q vendored; echo x > vendored/file;"
        "mkdir -p /opt/copy; cp -r .git /opt/copy/.git; mkdir -p /usr/lib/x.dist-info;"
        """echo '{"url": "u", "vcs_info": {"commit_id": "c"}}' > /usr/lib/x.dist-info/direct_url.json;"""
        "mkdir -p .claude pkg/.claude /etc/claude-code; touch .mcp.json pkg/CLAUDE.md .claude/settings.json;"
        "printf 'def test_old(): pass\\ndef test_new(): pass\\n' > test_mod.py",
    )
    tests = ("test_mod.py::test_new[1]", "test_mod.py::test_newer", "no/such.py::test", "/etc/passwd::x")
    wanted = Wanted("a", Source(tag), tests)
    said: list[str] = []
    try:
        other = Wanted("b", Source(small_image()))
        report = (await images.prepare([wanted, other], say=said.append))["a"]
        assert sorted(report["residue"]) == [
            *(f"configures: {path}" for path in ("./.claude", "./.mcp.json", "./pkg/.claude", "./pkg/CLAUDE.md")),
            "configures: /etc/claude-code",
            "installed_from: /usr/lib/x.dist-info/direct_url.json",
            "leftover: ./pkg/mod.py.orig",
            "removed: ./vendored/.git",
            "repository: /opt/copy/.git",
            "test: test_mod.py::test_new[1]",
        ]
        assert said[-1] == "images: 2 of 2 ready" and len({*said}) == len(said)
        box = await boot_docker(Source(tag))
        try:
            assert (await sh(box, "git ls-files vendored")).stdout == b"vendored/file\n"
        finally:
            await box.close()
    finally:
        drop(engine, report["sealed"], tag)


async def test_a_user_of_the_image_keeps_being_it(engine: ContainerEngine, tmp_path: Path) -> None:
    tag = variant(engine, "user", "useradd -m worker; chown -R worker /testbed", "USER worker")
    sealed = await engine.call(images.sealed, engine, Source(tag))
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    try:
        box = await boot_docker(Source(tag), socket_dir=sockets)
        try:
            done = await sh(box, "id -un; id -u; touch ~/x .git/x new; git status --short")
            assert done.stdout == b"worker\n1000\n?? new\n" and sealed.uid == 1000, done
            async with await asyncio.start_unix_server(answer, sockets / "sock"):
                code = f"import socket; s = socket.socket(1); s.connect('{sockets}/sock'); print(s.recv(9))"
                assert (await box.exec(["python3", "-c", code], env={}, timeout_s=30)).stdout == b"b'hello'\n"
            await box.put("a/b", b"1")
            assert (await sh(box, "echo 2 >> a/b; cat a/b; (sleep 99 &)")).stdout == b"12\n"
            assert b"+12" in await box.diff()
        finally:
            await box.close()
    finally:
        drop(engine, sealed.ref, tag)


async def test_a_work_tree_may_be_elsewhere(engine: ContainerEngine) -> None:
    """It is sealed, and is what a box shows and its diff is made of; the image's HOME is found without the variable."""
    tag = variant(engine, "elsewhere", "mv /testbed /app; echo 'def test_a(): pass' > /app/t.py; mkdir -p /root/go")
    source = Source(tag, "0" * 40, workdir="/app")
    try:
        report = (await images.prepare([Wanted("a", source, ("t.py::test_a",))]))["a"]
        assert report["residue"] == ["test: t.py::test_a"]
        box = await boot_docker(source)
        try:
            done = await sh(box, "pwd; git log --oneline | wc -l; unset HOME; export HOME=~; ls ~; echo new >README.md")
            assert done.stdout == b"/app\n1\ngo\n" and b"a/README.md" in await box.diff(), done
        finally:
            await box.close()
        with pytest.raises(SandboxError, match="seal"):  # nothing is in /testbed, and nothing of the other one is used
            await boot_docker(Source(tag, "0" * 40))
    finally:
        drop(engine, report["sealed"], tag)


async def test_images_that_cannot_be_sealed(engine: ContainerEngine) -> None:
    for name, script, changes, cause in (
        ("bare", "rm -rf /testbed", (), "seal_failed"),
        ("volume", "true", ("VOLUME /testbed",), "seal_failed"),
        ("gitless", "rm /usr/bin/git", (), "no_git"),
    ):
        tag = variant(engine, name, script, *changes)
        try:
            with pytest.raises(SandboxError) as failure:
                await boot_docker(Source(tag))
            assert failure.value.cause == cause, failure.value
        finally:
            drop(engine, tag)


@pytest.mark.usefixtures("own_cache")
async def test_what_does_not_fit_the_budget_is_made_when_it_is_needed(engine: ContainerEngine, tags: list[str]) -> None:
    said: list[str] = []
    wanted = [Wanted(str(i), Source(tag)) for i, tag in enumerate(tags)]
    sealed = []
    try:
        reports = await images.prepare(wanted, parallel=1, budget_bytes=1, say=said.append)
        assert list(reports) == ["0"]
        assert said[-1] == "images: 1 of 3 ready; the budget is full, 2 more are made when they are needed"
        sealed = [await engine.call(images.sealed, engine, Source(tag), 1) for tag in tags]
        # Each in the place of the one before.
        assert images.missing(engine, [one.ref for one in sealed]) == sorted(one.ref for one in sealed[:2])
    finally:
        drop(engine, *(one.ref for one in sealed))


@pytest.mark.usefixtures("own_cache")
def test_processes_that_seal_the_same_image_at_once(engine: ContainerEngine, tags: list[str], tmp_path: Path) -> None:
    """Each has a cache of its own, so that no lock of one reaches the other, as on two machines."""
    tag = tags[0]
    program = "from rollout.sandbox.docker import images; from rollout.sandbox.docker.engine import get_engine;"
    program += f"from rollout.sandbox.sealing import Source; print(images.sealed(get_engine(), Source({tag!r})).ref)"
    runs = []
    for number in range(3):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / str(number))}
        runs.append(
            subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        )
    refs = {run.communicate()[0].strip() for run in runs}
    try:
        assert len(refs) == 1 and refs != {""} and [run.returncode for run in runs] == [0, 0, 0]
        source = engine.client.inspect_image(tag)["Id"]
        untagged = engine.client.images(filters={"dangling": True, "label": f"{PROJECT}.sealed"})
        ours = [image["Id"] for image in untagged if source in image["Labels"][f"{PROJECT}.sealed"]]
        # Engines have no tag that is made only if there is none: of two that tag in the same instant, one is left over.
        for image in ours:
            engine.client.remove_image(image)
        assert len(ours) < len(runs)
        # Those who sealed it are gone. What others make of it stays theirs.
        others = engine.client.create_container(*refs, "true", network_disabled=True)["Id"]
        try:
            assert others not in engine.reap()
        finally:
            engine.client.remove_container(others)
    finally:
        drop(engine, *refs)


@pytest.mark.usefixtures("own_cache")
async def test_a_sealed_image_that_was_removed_is_made_again(engine: ContainerEngine, tags: list[str]) -> None:
    tag = tags[0]
    first = await engine.call(images.sealed, engine, Source(tag))
    drop(engine, first.ref)
    box = await boot_docker(Source(tag))
    try:
        assert await box.get("number") == b"0\n"
        assert images.evict(engine, 0) == []  # a container uses it
    finally:
        await box.close()
    assert images.evict(engine, 0, keep=[tag]) == []
    assert images.evict(engine, 0) == [first.ref]
    assert images.missing(engine, [first.ref, tag]) == [first.ref]  # nobody but us brought the other one


@pytest.mark.usefixtures("own_cache")
async def test_the_least_recently_used_go_first(engine: ContainerEngine, tags: list[str]) -> None:
    sealed = [await engine.call(images.sealed, engine, Source(tag)) for tag in tags[:2]]
    try:
        for age, one in ((100, sealed[0]), (50, sealed[1])):
            note = images._file(get_engine(), "sealed", one.ref)
            os.utime(note, (note.stat().st_atime, note.stat().st_mtime - age))
        inspect = engine.client.inspect_image
        sizes = [inspect(one.ref)["Size"] - inspect(one.source)["Size"] for one in sealed]
        await (await boot_docker(Source(tags[0]))).close()  # now the other one is the oldest
        assert images.evict(engine, sum(sizes)) == []
        assert images.evict(engine, sum(sizes) - 1) == [sealed[1].ref]
        assert images.missing(engine, [one.ref for one in sealed]) == [sealed[1].ref]
    finally:
        drop(engine, *(one.ref for one in sealed))


@pytest.mark.usefixtures("own_cache")
def test_an_image_is_pulled_and_goes_for_the_budget(engine: ContainerEngine) -> None:
    with registry("some/task") as (name, asked):
        assert images.missing(engine, [name]) == [name]
        images.pull(engine, name)
    assert any("/manifests/" in path for path in asked) and images.missing(engine, [name]) == []
    assert images.evict(engine, 0, keep=[name]) == []
    assert images.evict(engine, 0) == [name] and images.missing(engine, [name]) == [name]


@pytest.mark.usefixtures("own_cache")
def test_a_registry_that_refuses_for_now_is_asked_again(engine: ContainerEngine) -> None:
    with (
        registry("some/task", refusals=100) as (name, _),
        pytest.raises(SandboxError, match=r"(?i)too ?many ?requests"),
    ):
        images.pull(engine, name)
    with registry("some/task", refusals=1) as (name, asked):
        images.pull(engine, name, Pulls(patience_s=0.5))
        assert sum("/manifests/" in path for path in asked) > 1 and images.missing(engine, [name]) == []
        assert images.evict(engine, 0) == [name]


@pytest.mark.usefixtures("own_cache")
def test_an_image_that_a_mirror_had_gets_its_own_name(engine: ContainerEngine) -> None:
    with registry("hub/rl-test/task") as (name, _):
        mirror = name.removesuffix("/rl-test/task")
        images.pull(engine, "rl-test/task", Pulls(mirror))
        assert images.missing(engine, ["rl-test/task:latest", f"{name}:latest"]) == [f"{name}:latest"]
        assert images.evict(engine, 0) == ["rl-test/task"] and images.missing(engine, ["rl-test/task"])


async def test_a_missing_image_is_named_before_anything_starts(engine: ContainerEngine) -> None:
    assert images.missing(engine, [small_image(), "no/such:1"]) == ["no/such:1"]
    with pytest.raises(SandboxError) as failure:
        await images.prepare([Wanted("a", Source("localhost:1/no/such:1"))])
    assert failure.value.cause == "missing_image" and "localhost:1/no/such:1" in str(failure.value)


def test_the_command_reports_every_task(engine: ContainerEngine, tmp_path: Path) -> None:
    write(tmp_path / "tasks.parquet", [snapshot_row("one", image=small_image())])
    command = [sys.executable, "-m", "rl.boxes", str(tmp_path / "tasks.parquet"), "sandbox=docker"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "images: 1 of 1 ready\none: no residue\n", done
