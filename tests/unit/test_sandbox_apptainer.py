"""Boxes by apptainer. The program is a stand-in (see tests/apptainer_stub.py) that plays its part with bubblewrap: what
is tested is our side, from the command lines to the files; docs/sandboxes.md says what that leaves open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rewards.grade import grade
from rewards.task import load_tasks
from rewards.verdict import Reason
from rl.boxes import kind_of, prepare_images
from rl.config import compose
from rl.quickstart.tasks import make_tasks
from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.apptainer import cli as apptainer_cli
from rollout.sandbox.apptainer import images as apptainer_images
from rollout.sandbox.apptainer.box import ApptainerSandbox, boot_apptainer
from rollout.sandbox.apptainer.images import Cache, TarTree, evict, prepare, sealed
from rollout.sandbox.sealing import Source, Wanted
from rollout.sandbox.treediff import Directory
from tests.docker_kit import history
from tests.sandboxes import alive, make_snapshot, sh

pytestmark = pytest.mark.bwrap
STUB = Path(__file__).resolve().parents[1] / "apptainer_stub.py"
IMAGE = "swe/one:latest"


class Stub:
    """The stand-in, first on the PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "registry").mkdir(parents=True)
        program = shutil.copy(STUB, directory / "apptainer")
        os.chmod(program, 0o755)
        self.cannot()

    def cannot(self, **what: object) -> None:
        (self.directory / "options.json").write_text(json.dumps(what))
        apptainer_cli.program.cache_clear()
        apptainer_cli._features.clear()

    def calls(self, verb: str) -> list[dict]:
        return [call for call in self._notes() if verb in call.get("argv", ())[:2]]

    def cleaned_up(self) -> int:
        """How many boxes ended before the program did."""
        return sum("cleaned up" in note for note in self._notes())

    def _notes(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "calls.jsonl").read_text().splitlines()]

    def push(self, name: str, repo: Path) -> None:
        """An image with a repository in /testbed and an answer elsewhere."""
        with tempfile.TemporaryDirectory() as made:
            root = Path(made)
            for place in ("usr", "proc", "dev", "sys", "tmp", "var", "etc", "opt/hints", "home"):
                (root / place).mkdir(parents=True)
            for link in ("bin", "lib", "lib64", "sbin"):
                (root / link).symlink_to(f"usr/{link}")
            (root / "etc" / "passwd").write_text("agent:x:1000:1000::/home/agent:/bin/sh\n")
            (root / "opt" / "hints" / "answer").write_text("the answer\n")
            shutil.copytree(repo, root / "testbed", symlinks=True)
            with tarfile.open(self.directory / "registry" / f"{name.replace('/', '_')}.tar", "w") as tar:
                tar.add(root, ".")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return history(tmp_path_factory.mktemp("history") / "repo")


@pytest.fixture
def stub(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path / "bin")
    made.push(IMAGE, repo)
    monkeypatch.setenv("PATH", str(made.directory), prepend=":")
    monkeypatch.setenv("SECRET", "of the trainer")
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest_asyncio.fixture(params=["overlay", "read-only"])
async def box(request: pytest.FixtureRequest, stub: Stub, cache: Cache) -> AsyncIterator[ApptainerSandbox]:
    stub.cannot(**({} if request.param == "overlay" else {"overlay": True, "limits": True}))
    made = await boot_apptainer(Source(IMAGE), cache)
    yield made
    await made.close()
    assert not made._root.exists()


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
    call, root = stub.calls("exec")[-1], box._root
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


# --- exec


async def test_exec_reports_what_a_program_did(box: ApptainerSandbox) -> None:
    done = await sh(box, "pwd; echo oops >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"/testbed\n", b"oops\n")
    assert not done.timed_out and not done.truncated and 0 < done.wall_s < 30
    assert (await sh(box, "kill -TERM $$")).returncode == 128 + 15
    assert (await sh(box, "echo FATAL: >&2; exit 255")).returncode == 255
    assert (await box.exec(["/no/such/program"], env={}, timeout_s=30)).returncode in (126, 127)
    data = os.urandom(300_000)
    assert (await box.exec(["cat"], env={}, timeout_s=30, stdin=data)).stdout == data
    assert (await box.exec(["true"], env={}, timeout_s=30, stdin=b"x" * 10**6)).returncode == 0


async def test_output_is_capped_per_stream(box: ApptainerSandbox) -> None:
    done = await sh(box, "head -c 3000000 /dev/zero; echo -n 1234567 >&2", output_cap=5)
    assert (done.stdout, done.stderr, done.truncated, done.returncode) == (b"\0" * 5, b"12345", True, 0)
    assert not (await sh(box, "echo -n 12345; echo -n 54321 >&2", output_cap=5)).truncated


async def test_environment_is_the_images_and_ours(box: ApptainerSandbox) -> None:
    done = await box.exec(["env"], env={"GIVEN": "a b\nc", "LD_GIVEN": "2"}, timeout_s=30)
    own = {"HOME": "/home/agent", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "FROM_IMAGE": "1", "LD_GIVEN": "2"}
    lines = done.stdout.decode().splitlines()
    assert {f"{key}={value}" for key, value in own.items()} <= set(lines)
    assert "GIVEN=a b" in lines and "c" in lines and b"SECRET" not in done.stdout and b"APPTAINER" not in done.stdout
    assert (await box.exec(["sh", "-c", "echo $HOME"], env={"HOME": "/else"}, timeout_s=30)).stdout == b"/else\n"


async def test_programs_run_one_after_another_on_the_same_files(box: ApptainerSandbox) -> None:
    script = 'for i in 1 2 3; do echo {0} >> "$HOME/log"; sleep 0.05; done; touch {0} "$TMPDIR/{0}"'
    await asyncio.gather(*(sh(box, script.format(name)) for name in "abc"))
    log = (await box.get("/home/agent/log")).decode().split()
    assert "".join(log) in {f"{x * 3}{y * 3}{z * 3}" for x in "abc" for y in "abc" for z in "abc"}
    assert (await sh(box, "ls a b c /tmp/a /tmp/b /var/tmp/c")).returncode == 0


@pytest.mark.parametrize("spawn", ["sleep {0} &", "(setsid env -i sleep {0} &)"])
async def test_background_processes_end_with_the_exec(box: ApptainerSandbox, spawn: str, nap: str) -> None:
    done = await sh(box, spawn.format(nap) + "\nsleep 0.05; echo done")
    assert done.stdout == b"done\n" and not alive(nap)


async def test_timeout_and_cancellation_kill_the_whole_tree(box: ApptainerSandbox, stub: Stub, nap: str) -> None:
    script = f"(setsid env -i sleep {nap} &) ; echo begun; bash -c 'sleep {nap}; true'; true"
    before = stub.cleaned_up()
    done = await sh(box, script, timeout_s=3)
    assert stub.cleaned_up() == before + 1  # it was the box that was killed, not the program that has mounts to undo
    assert done.timed_out and done.returncode is None and done.stdout == b"begun\n" and done.stderr == b""
    assert not alive(nap)
    for delay in (0, 0.01, 0.05, 0.3):
        running = asyncio.create_task(sh(box, script))
        await asyncio.sleep(delay)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not alive(nap)
    assert (await sh(box, "echo on")).stdout == b"on\n"


async def test_close_ends_a_running_exec(box: ApptainerSandbox, nap: str) -> None:
    running, waiting = (asyncio.create_task(sh(box, f"sleep {nap}")) for _ in range(2))
    while not alive(nap):
        await asyncio.sleep(0.01)
    await box.close()
    for task in (running, waiting):
        with pytest.raises(SandboxError) as failure:
            await task
        assert failure.value.cause == "closed"
    assert not alive(nap)


async def test_a_box_that_is_killed_from_outside_is_no_program_that_failed(box: ApptainerSandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.01)
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes()
            if b"apptainer\0--quiet\0exec" in words and nap.encode() in words:
                os.kill(int(name), signal.SIGKILL)
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == "box_killed" and not alive(nap)
    assert (await sh(box, "kill -KILL $PPID")).returncode == 137  # its own shell: the program's doing


async def test_limits_of_a_process(stub: Stub, cache: Cache) -> None:
    box = await boot_apptainer(Source(IMAGE), cache, limits=Limits(cpu_s=1, file_bytes=2**20, open_files=50))
    try:
        shown = await sh(box, "ulimit -t; ulimit -f; ulimit -n; ulimit -c")
        assert shown.stdout.split() == [b"1", b"1024", b"50", b"0"]
        assert (await sh(box, "head -c 2000000 /dev/zero > big")).returncode != 0
        assert (await sh(box, "while :; do :; done", timeout_s=60)).returncode in (128 + 9, 128 + 24)
    finally:
        await box.close()


# --- what is in a box


async def test_of_the_machine_there_are_binds_and_sockets_only(stub: Stub, cache: Cache, tmp_path: Path) -> None:
    tool, sockets = tmp_path / "tool", tmp_path / "s"
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    sockets.mkdir()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(answer, sockets / "sock"):
        box = await boot_apptainer(Source(IMAGE), cache, binds={tool: "/opt/tool"}, socket_dir=sockets)
        try:
            code = f"import socket; s = socket.socket(1); s.connect('{sockets}/sock'); print(s.recv(9))"
            done = await sh(box, f'/opt/tool; python3 -c "{code}"')
            assert done.stdout == b"tool\nb'hello'\n", done.stderr
            assert (await sh(box, f"rm {sockets}/sock || echo x >> /opt/tool")).returncode != 0
            assert (await sh(box, f"ls {cache.directory} {stub.directory}")).returncode != 0
        finally:
            await box.close()
    with pytest.raises(SandboxError) as failure:
        await boot_apptainer(Source(IMAGE), cache, socket_dir=tmp_path / "none")
    assert failure.value.cause == "missing_bind"


async def test_history_is_sealed(box: ApptainerSandbox) -> None:
    script = "git log --all --format=%s; git for-each-ref; git remote; git stash list; git reflog; git status --short"
    done = await sh(box, script)
    assert done.returncode == 0 and re.fullmatch(rb"The task\n[0-9a-f]{40} commit\trefs/heads/main\n", done.stdout)
    assert (await sh(box, "git ls-files tracked.log; ls .git/hooks")).stdout == b"tracked.log\n"
    assert b"the fix" not in (await sh(box, "git cat-file --batch --batch-all-objects --buffer")).stdout
    assert (await box.get("README.md")) == b"hello\n"
    assert b"the fix" not in b"".join(p.read_bytes() for p in box._sif.image.parent.iterdir())


async def test_a_patch_comes_first_and_hidden_paths_are_gone(stub: Stub, cache: Cache) -> None:
    patch = "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-hello\n+patched\n"
    source = Source(IMAGE, "a" * 40, patch, hide=("pkg", "/opt/hints"))
    box = await boot_apptainer(source, cache)
    plain = await boot_apptainer(Source(IMAGE), cache)
    try:
        assert await box.get("README.md") == b"patched\n" and await box.diff() == b""
        assert (await sh(box, "ls pkg; ls /opt/hints; ls /setup.diff")).stdout == b""
        assert (await sh(box, f"git checkout -q {'a' * 40} README.md && git log --oneline")).returncode == 0
        assert (await sh(plain, "cat /opt/hints/answer")).stdout == b"the answer\n"
    finally:
        await box.close()
        await plain.close()
    assert len(stub.calls("pull")) == 1


async def test_a_snapshot_on_a_base_image(stub: Stub, cache: Cache, tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "snapshot")
    base = tmp_path / "base.sif"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    for image in (IMAGE, str(base)):
        box = await boot_apptainer(Source(image), cache, snapshot=snapshot)
        try:
            assert (await sh(box, "git log --format=%s; echo new > new; rm link")).stdout == b"first\n"
            patch = await box.diff()
            assert patch.count(b"diff --git") == 2 and b"+new" in patch and b"a/link" in patch
        finally:
            await box.close()
    with pytest.raises(SandboxError) as failure:
        await boot_apptainer(Source(IMAGE), cache, snapshot=tmp_path / "none")
    assert failure.value.cause == "missing_snapshot"


# --- files


async def test_put_and_get(box: ApptainerSandbox, tmp_path: Path) -> None:
    for path in ("new/file", "/home/agent/a/b", "/tmp/c", "/testbed/README.md"):
        await box.put(path, b"data")
        assert await box.get(path) == b"data"
        assert (await box.exec(["cat", path], env={}, timeout_s=30)).stdout == b"data"
    secret = tmp_path / "secret"
    secret.write_text("host")
    await sh(box, f"ln -s {secret} file; ln -s {tmp_path} dir")
    for path in ("file", "dir/secret", "missing"):
        with pytest.raises(FileNotFoundError):
            await box.get(path)
    with pytest.raises(ValueError):
        await box.get("/etc/passwd")


async def test_diff_holds_every_change(box: ApptainerSandbox, repo: Path, tmp_path: Path) -> None:
    assert await box.diff() == b""
    await sh(
        box,
        "echo more >> README.md; rm pkg/mod.py; chmod -x run.sh; ln -sf /etc/passwd link; mkdir -p new/deep;"
        "head -c 1000 /dev/urandom > new/deep/bin; touch empty 'sp ace' $'tab\\tname'; echo x > debug.log; "
        "git config core.autocrlf true; echo '*.py filter=x' > .git/info/attributes; git add -A; git commit -qm x; "
        "chmod 000 new",
    )
    tree = tmp_path / "t"
    subprocess.run(["cp", "-a", repo, tree], check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=tree, input=await box.diff(), check=True)
    assert (tree / "README.md").read_text() == "hello\nmore\n" and not (tree / "pkg").exists()
    assert not os.access(tree / "run.sh", os.X_OK) and os.readlink(tree / "link") == "/etc/passwd"
    assert (tree / "new/deep/bin").stat().st_size == 1000 and (tree / "debug.log").exists()
    assert (tree / "empty").exists() and (tree / "sp ace").exists() and (tree / "tab\tname").exists()


def test_a_tree_in_an_archive_is_the_tree(repo: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(repo, tree, symlinks=True)
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
    stub: Stub, cache: Cache, tmp_path: Path, cannot: str, says: str
) -> None:
    base = tmp_path / "base.sif"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    stub.cannot(**{cannot: True})
    with pytest.raises(SandboxError, match=says) as failure:
        await boot_apptainer(Source(str(base)), cache, snapshot=make_snapshot(tmp_path / "snapshot"))
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


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("apptainer version 1.2.0", ("apptainer", (1, 2))),
        ("apptainer version 1.3.4-1.el9", ("apptainer", (1, 3))),
        ("singularity-ce version 4.1.0", ("singularity-ce", (4, 1))),
        ("apptainer version 1.1.9", None),
        ("singularity-ce version 3.11.4", None),
        ("singularity version 3.8.7", None),
        ("what?", None),
    ],
)
def test_versions(stub: Stub, version: str, known: tuple | None) -> None:
    stub.cannot(version=version)
    if known is None:
        with pytest.raises(SandboxError) as failure:
            apptainer_cli.program()
        assert failure.value.cause == "no_apptainer" and version.split()[-1].split("-")[0][:3] in str(failure.value)
    else:
        found = apptainer_cli.program()
        assert (found.name, found.version) == known
        assert found.prefix == ("APPTAINERENV_" if known[0] == "apptainer" else "SINGULARITYENV_")


# --- images


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (Source("no/such:1"), "missing_image"),
        (Source("/no/such.sif"), "missing_image"),
        (Source("dir:/x"), "missing_image"),
        (Source(IMAGE, "main"), "seal_failed"),
        (Source(IMAGE, setup_patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"), "seal_failed"),
    ],
)
async def test_images_that_cannot_be_had(stub: Stub, cache: Cache, source: Source, cause: str) -> None:
    with pytest.raises(SandboxError) as failure:
        await boot_apptainer(source, cache)
    assert failure.value.cause == cause and "\n" not in str(failure.value)
    left = {path.name.partition("-")[0] for path in cache.directory.iterdir()}
    assert left <= {"pulled"}


async def test_images_are_made_once_and_reported(stub: Stub, cache: Cache) -> None:
    wanted = [Wanted(f"task-{n}", Source(IMAGE), ("pkg/mod.py::f", "pkg/mod.py::g", "no.py::f")) for n in range(3)]
    said: list[str] = []
    reports = await prepare(cache, wanted, parallel=3, say=said.append)
    assert len(stub.calls("pull")) == 1 and len(stub.calls("build")) == 2 and said[-1] == "images: 3 of 3 ready"
    assert {key: report["residue"] for key, report in reports.items()} == {
        f"task-{n}": ["test: pkg/mod.py::f"] for n in range(3)
    }
    assert sorted(path.name.partition("-")[0] for path in cache.directory.iterdir()) == ["pulled", "sealed"]


def test_processes_share_the_work(stub: Stub, cache: Cache) -> None:
    stub.cannot(pull_s=0.5)
    code = (
        "import asyncio, sys, pathlib; from rollout.sandbox.apptainer import cli as c, images as i;"
        f"print(asyncio.run(i.plain(i.Cache(pathlib.Path(sys.argv[1])), c.program(), '{IMAGE}')).image)"
    )
    command = [sys.executable, "-c", code, str(cache.directory)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert len(outputs) == 1 and Path(outputs.pop().strip()).is_file() and len(stub.calls("pull")) == 1


async def test_the_least_recently_used_go_but_none_in_use(stub: Stub, cache: Cache, repo: Path) -> None:
    found = apptainer_cli.program()
    for name in ("swe/two", "swe/three"):
        stub.push(name, repo)
    made = [await sealed(cache, found, Source(name)) for name in (IMAGE, "swe/two", "swe/three")]
    entries = {path.name for path in cache.directory.iterdir()}
    assert len(entries) == 6
    small = Cache(cache.directory, 1)
    assert await evict(small) == []  # all were used just now
    long_ago = time.time() - 2 * apptainer_images.IN_USE_S
    for age, sif in enumerate(made):
        assert sif.entry is not None
        os.utime(sif.entry / "facts.json", (long_ago + age, long_ago + age))
    made[0].used()
    total = sum(size for _, size, _ in apptainer_images._entries(cache))
    assert await evict(Cache(cache.directory, total)) == []
    assert [str(made[1].entry)] == [str(cache.directory / n) for n in await evict(Cache(cache.directory, total - 1))]
    assert [str(made[2].entry)] == [str(cache.directory / n) for n in await evict(small)]
    assert made[0].image.is_file() and len(list(cache.directory.iterdir())) == 4
    again = await sealed(small, found, Source("swe/two"))  # over the budget, it is made all the same
    assert again.image.is_file() and await prepare(small, [Wanted("x", Source("swe/two"))], say=lambda _: None) == {}


# --- from the config to a verdict


async def test_tasks_are_graded_as_the_config_says(stub: Stub, tmp_path: Path) -> None:
    base, run = tmp_path / "base.sif", tmp_path / "run"
    shutil.copy(next((stub.directory / "registry").iterdir()), base)
    run.mkdir()
    options = [f"sandbox.base_image={base}", f"sandbox.cache_dir={tmp_path / 'cache'}", f"run.dir={run}"]
    config = compose(["sandbox=apptainer", *options])
    boot = kind_of(config.sandbox).boot(Path(os.devnull))
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
