"""Container sandboxes on a real engine: every verb, the limits, what a box cannot reach, what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from docker.errors import APIError

from rollout.sandbox import PATCH_CAP, Limits, PatchTooLarge, SandboxError
from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import DockerSandbox, boot_docker
from rollout.sandbox.docker.engine import ContainerEngine, get_engine
from rollout.sandbox.local.box import boot_local
from tests.docker_kit import REPOSITORY, history, left, small_image, task_images
from tests.sandboxes import alive, sh

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
MIB = 2**20


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    yield small_image()
    assert left(get_engine()) == []


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same work tree as in the image."""
    return history(tmp_path_factory.mktemp("same") / "snapshot")


@pytest_asyncio.fixture
async def box(image: str) -> AsyncIterator[DockerSandbox]:
    made = await boot_docker(images.Source(image))
    yield made
    await made.close()


# --- exec


async def test_exec_reports_what_a_program_did(box: DockerSandbox) -> None:
    done = await sh(box, "pwd; echo oops >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"/testbed\n", b"oops\n")
    assert not done.timed_out and not done.truncated and 0 < done.wall_s < 30
    assert (await sh(box, "kill -TERM $$")).returncode == 128 + 15
    assert (await box.exec(["/no/such/program"], env={}, timeout_s=9)).returncode in (126, 127)
    data = os.urandom(300_000)
    assert (await box.exec(["cat"], env={}, timeout_s=30, stdin=data)).stdout == data
    assert (await box.exec(["true"], env={}, timeout_s=30, stdin=b"x" * 10**6)).returncode == 0
    done = await sh(box, "head -c 3000000 /dev/zero; echo -n 1234567 >&2", output_cap=5)
    assert (done.stdout, done.stderr, done.truncated, done.returncode) == (b"\0" * 5, b"12345", True, 0)
    assert not (await sh(box, "echo -n 12345", output_cap=5)).truncated


async def test_a_program_may_close_its_output_and_go_on(box: DockerSandbox) -> None:
    assert (await sh(box, "exec >&- 2>&-; sleep 0.5; echo end > end; exit 4")).returncode == 4
    assert await box.get("end") == b"end\n"


async def test_environment_is_the_images_and_not_the_callers(
    box: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "leak")
    done = await box.exec(["env"], env={"GIVEN": "1"}, timeout_s=30)
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    assert found.pop("PATH").endswith("/usr/bin:/sbin:/bin") and found.pop("HOSTNAME") == "sandbox"
    found.pop("PWD", None)
    if get_engine().podman:  # sets two of its own
        assert (found.pop("container"), found.pop("TERM")) == ("podman", "xterm")
    assert found == {"GIVEN": "1", "HOME": box.home, "TMPDIR": box.tmpdir, "LANG": "C.UTF-8"}
    own = await box.exec(["sh", "-c", "echo $HOME"], env={"HOME": "/elsewhere"}, timeout_s=30)
    assert own.stdout == b"/elsewhere\n"


@pytest.mark.parametrize(
    "spawn",
    [
        "sleep {0} &",
        "(setsid sleep {0} &)",
        "nohup sleep {0} >/dev/null 2>&1 &",
        "kill -9 $PPID; (setsid sleep {0} >/dev/null 2>&1 &)",  # without the shell that ends the rest
        "kill -9 $PPID; (setsid sleep {0} &)",  # and with its output still open
    ],
)
async def test_background_processes_end_with_the_exec(box: DockerSandbox, spawn: str, nap: str) -> None:
    # The last two may be ended with their shell, at once.
    done = await sh(box, f"echo done >> done; {spawn.format(nap)}\nsleep 0.05")
    assert done.wall_s < 20 and not done.timed_out and not alive(nap)
    assert await box.get("done") == b"done\n"
    assert (await sh(box, "cat done")).stdout == b"done\n"  # the box goes on, with its files


async def test_timeout_ends_all_and_the_files_stay(box: DockerSandbox, nap: str) -> None:
    done = await sh(box, f"echo 1 > one; (setsid sleep {nap} &) ; echo begun; bash -c 'sleep {nap}; true'", 1.5)
    assert done.timed_out and done.returncode is None and done.stdout == b"begun\n"
    assert done.wall_s < 20 and not alive(nap)
    assert (await sh(box, "cat one")).stdout == b"1\n"


async def test_orphans_leave_no_zombies(box: DockerSandbox) -> None:
    count = "for i in 1 2 3 4 5; do (true &); done; sleep 0.2; cat /proc/[0-9]*/stat | grep -c ' Z '"
    assert (await sh(box, count)).stdout == b"0\n"


@pytest.mark.parametrize("times", [1, 3])
async def test_cancellation_at_any_moment(box: DockerSandbox, nap: str, times: int) -> None:
    for delay in (0, 0.02, 0.1, 0.3):
        running = asyncio.create_task(sh(box, f"(setsid sleep {nap} &) ; sleep {nap}"))
        await asyncio.sleep(delay)
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert times > 1 or not alive(nap)
    await box.close()  # waits for what a second cancellation has cut off
    assert not alive(nap)


async def test_close_ends_a_running_exec(box: DockerSandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.02)
    await box.close()
    await box.close()
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == "closed" and not alive(nap)
    for use in (box.diff(), sh(box, "true"), box.get("README.md"), box.put("x", b"")):
        with pytest.raises(SandboxError, match="closed"):
            await use


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_end_of_the_loop_ends_boxes(image: str, runner: Callable, nap: str) -> None:
    async def main() -> None:
        async def episode() -> None:
            made = await boot_docker(images.Source(image))
            try:
                await sh(made, f"(setsid sleep {nap} &) ; sleep {nap}")
            finally:
                await made.close()

        episodes = asyncio.create_task(episode())  # left to the runner, which cancels every task
        while not alive(nap):
            await asyncio.sleep(0.02)
        assert not episodes.done()

    runner(main())
    assert not alive(nap) and left(get_engine()) == []


# --- limits


async def test_memory_and_processes_are_limited(image: str) -> None:
    made = await boot_docker(images.Source(image), limits=Limits(memory_bytes=64 * MIB, processes=40, cpus=0.5))
    try:
        eat = "import sys; kept = [bytearray(2**20) for _ in range(200)]; print('had it all')"
        done = await made.exec(["python3", "-c", eat], env={}, timeout_s=60)
        assert done.returncode == 137 and b"had it all" not in done.stdout
        many = "for i in $(seq 60); do sleep 9 & done; echo all"
        done = await made.exec(["sh", "-c", many], env={}, timeout_s=60)  # bash would try again for seconds
        assert b"Cannot fork" in done.stderr and done.stdout == b""
        assert (await sh(made, "echo fine")).stdout == b"fine\n"
        host = get_engine().client.inspect_container(made.container)["HostConfig"]
        assert (host["NanoCpus"], host["MemorySwap"]) == (5 * 10**8, 64 * MIB)
    finally:
        await made.close()


async def test_disk_is_limited(image: str) -> None:
    made = await boot_docker(images.Source(image), limits=Limits(disk_bytes=32 * MIB))
    try:
        one = await sh(made, "head -c 50000000 /dev/zero > big; echo $?; ls -s big")
        assert one.stdout.split()[0] != b"0"  # one file cannot be larger
        # Bounded: without a limit this ends at 96 MiB.
        fill = "rm big; for i in 1 2 3 4; do head -c 24M /dev/zero > /tmp/$i || exit 9; done; sleep 20; echo all"
        many = await sh(made, fill, timeout_s=60)
        assert b"all" not in many.stdout and many.returncode in (9, 137) and not many.timed_out
        assert await made.diff() == b""
    finally:
        await made.close()


async def test_a_box_cannot_fill_the_engines_log(box: DockerSandbox) -> None:
    await sh(box, "echo logged > /proc/1/fd/1")
    assert get_engine().client.inspect_container(box.container)["HostConfig"]["LogConfig"]["Type"] == "none"


# --- what the box cannot reach


async def test_no_privileges(box: DockerSandbox) -> None:
    status = (await sh(box, "grep -E 'CapEff|CapPrm|CapBnd|NoNewPrivs' /proc/self/status")).stdout.split()
    assert status[1::2] == [b"0000000000000000"] * 3 + [b"1"]
    for attempt in ("mount -t tmpfs none /mnt", "unshare -U true", "chown 1000 README.md", "mknod x c 1 3"):
        assert (await sh(box, attempt)).returncode != 0, attempt
    assert (await sh(box, "ls /var/run/docker.sock /run/docker.sock")).returncode != 0


async def test_no_network(box: DockerSandbox) -> None:
    assert (await sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split() == [b"lo"]
    own = "import socket; s = socket.create_server(('localhost', 0)); socket.create_connection(s.getsockname())"
    assert (await box.exec(["python3", "-c", own], env={}, timeout_s=30)).returncode == 0  # a loopback, and its name
    assert b"Read-only" in (await sh(box, "echo > /etc/hosts")).stderr
    abstract = f"\0{random.randrange(10**9)}"
    with socket.create_server(("0.0.0.0", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        port = tcp.getsockname()[1]
        for target in (("127.0.0.1", port), (_own_address(), port), abstract):
            family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET
            with socket.socket(family) as host:  # the listener is there
                host.connect(target)
            connect = f"import socket; s = socket.socket({int(family)}); s.settimeout(5); s.connect({target!r})"
            done = await box.exec(["python3", "-c", connect], env={}, timeout_s=30)
            assert done.returncode == 1 and (b"refused" in done.stderr or b"unreachable" in done.stderr), done


def _own_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


async def test_socket_and_binds_are_reachable_and_read_only(image: str, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(answer, sockets / "sock"):
        made = await boot_docker(images.Source(image), binds={tool: "/opt/tool"}, socket_dir=sockets)
        try:
            code = f"import socket; s = socket.socket(1); s.connect('{sockets}/sock'); print(s.recv(9))"
            done = await sh(made, f'/opt/tool; python3 -c "{code}"')
            assert done.stdout == b"tool\nb'hello'\n", done.stderr
            for attempt in (f"rm {sockets}/sock", f"touch {sockets}/x", "echo x >> /opt/tool", "chmod 777 /opt/tool"):
                assert b"Read-only" in (await sh(made, attempt)).stderr, attempt
            assert await made.diff() == b""
        finally:
            await made.close()


# --- put and get


async def test_put_and_get(box: DockerSandbox) -> None:
    data = os.urandom(2 * MIB)
    for path in ("new/dir/file", f"{box.home}/a/b", f"{box.tmpdir}/c", f"{box.workdir}/README.md", "pkg/é\n"):
        await box.put(path, data)
        assert await box.get(path) == data
        seen = await sh(box, 'stat -c "%a %u" "$0"; cmp - "$0" && echo x >> "$0"'.replace("$0", path), stdin=data)
        assert (seen.stdout, seen.returncode) == (b"644 0\n", 0), seen
    modes = await sh(box, "stat -c %a /tmp . new")
    assert modes.stdout.split() == [b"1777", b"755", b"755"]


async def test_put_and_get_do_not_follow_links(box: DockerSandbox) -> None:
    await sh(box, "ln -s /etc/passwd file; ln -s /etc dir; mkfifo fifo; mkdir real; cp /etc/passwd /etc/kept")
    await sh(box, "ln -s /none nowhere")
    for path in ("file", "dir/passwd", "fifo", "real", "missing", "README.md/x", "missing/x", "nowhere", "nowhere/x"):
        with pytest.raises(FileNotFoundError):
            await box.get(path)
    for path in ("dir/passwd", "dir/new/x", "file/x", "README.md/x", "nowhere/x"):
        with pytest.raises(SandboxError, match="put_failed"):
            await box.put(path, b"changed")
    await box.put("file", b"own")  # replaces the link itself
    assert await box.get("file") == b"own"
    assert (await sh(box, "cmp /etc/passwd /etc/kept")).returncode == 0
    await sh(box, "chmod u+w /; mv /tmp /was; ln -s /etc /tmp")
    with pytest.raises(SandboxError, match="put_failed"):
        await box.put("/tmp/passwd", b"changed")
    with pytest.raises(FileNotFoundError):
        await box.get("/tmp/passwd")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".", ""])
async def test_paths_outside_the_box_are_refused(box: DockerSandbox, path: str) -> None:
    with pytest.raises(ValueError):
        await box.put(path, b"")
    with pytest.raises(ValueError):
        await box.get(path)


# --- diff


CHANGES = {
    "nothing": "true",
    "some of all": "echo more >> README.md; rm pkg/mod.py; chmod -x run.sh; ln -sf /etc/passwd link; mkdir -p new/deep;"
    "head -c 1000 /dev/urandom | tee new/deep/bin >/dev/null; touch empty 'sp ace' $'tab\\tname'; echo x > debug.log",
    "only times and modes that do not count": "touch README.md pkg; chmod 600 README.md; cp -a run.sh x; mv x run.sh",
    "a directory becomes a link": "mv pkg lib; ln -s lib pkg",
    "a directory becomes a file": "rm -r pkg; echo file > pkg",
    "a directory becomes a fifo": "rm -r pkg; mkfifo pkg",
    "a file becomes a directory": "rm README.md; mkdir -p README.md/x; echo 1 > README.md/x/y",
    "a link becomes a directory": "rm link; mkdir link; echo 1 > link/passwd; echo 2 > link/README.md",
    "a directory is made again": "rm -r pkg; mkdir pkg; echo 1 > pkg/other.py",
    "hard links": "ln README.md pkg/again; ln pkg/mod.py one; ln one two",
    "names": "echo 1 > é; echo 2 > $'\\xff\\xfe'; echo 3 > $'new\\nline'; mkdir -p a/b/c; echo 4 > a/b/c/-x",
    "junk": "mkdir -p pkg/__pycache__ .pytest_cache n/.git; touch pkg/__pycache__/a.pyc b.pyc .pytest_cache/v n/.git/x;"
    "ln -s x c.pyc; mkfifo p; echo 1 > __pycache__",
    "much": "for i in $(seq 60); do mkdir -p m/$i; echo $i > m/$i/f; done; rm -r pkg; ln README.md m/1/n; mkfifo m/p",
    "much, and a directory becomes a file": "for i in $(seq 60); do echo $i > m$i; done; rm -r pkg; echo 1 > pkg",
    "all gone": "rm -rf ./* .gitignore",
    "history": "rm -rf .git; ln -s / .git; echo 'X = 1' >> pkg/mod.py",
    "attributes": "echo '*.py -diff -text filter=x diff=x' > .gitattributes; git config filter.x.clean 'echo no';"
    "git config diff.external 'echo no'; git config core.fsmonitor 'echo no'; echo 'X = 1' >> pkg/mod.py",
}


@pytest.mark.parametrize("name", CHANGES)
async def test_diff_is_the_same_as_a_local_sandboxes(box: DockerSandbox, snapshot: Path, name: str) -> None:
    local = await boot_local(snapshot, isolation="none")
    try:
        script = CHANGES[name].replace("/dev/urandom", "/bin/true")  # the same bytes in both
        if name == "some of all":
            script = script.replace("/bin/true", "run.sh")
        for place in (box, local):
            assert (await sh(place, script)).returncode == 0
        expected = await local.diff()
        assert await box.diff() == expected
        assert bool(expected) == (name not in ("nothing", "only times and modes that do not count"))
    finally:
        await local.close()


async def test_a_snapshot_of_this_machine_in_an_image(snapshot: Path) -> None:
    """Boxes of small local tasks: the image has the tools, the work tree is a copy."""
    base = images.Source(task_images().base_image(get_engine()))
    script = CHANGES["some of all"].replace("/dev/urandom", "run.sh")
    for change, gone in ((script, False), ("true", False), ("chmod u+w /; cd /; rm -r /testbed", True)):
        box, local = await boot_docker(base, snapshot=snapshot), await boot_local(snapshot, isolation="none")
        try:
            await box.put(f"{box.home}/x", b"1")
            for place in (box, local):
                await sh(place, "rm -rf ./* .gitignore" if gone and place is local else change)
            assert await box.diff() == await local.diff()
        finally:
            await box.close()
            await local.close()


async def test_diff_of_a_work_tree_that_is_gone(box: DockerSandbox, snapshot: Path) -> None:
    await sh(box, "chmod u+w /; cd /; rm -rf /testbed; ln -s /etc /testbed")
    patch = (await box.diff()).decode()
    assert patch.count("deleted file mode") == 6 and "new file" not in patch and "passwd" not in patch


async def test_diff_refuses_what_is_too_large(box: DockerSandbox) -> None:
    await sh(box, f"head -c {PATCH_CAP + 1} /dev/zero > big")
    with pytest.raises(PatchTooLarge):
        await box.diff()
    await sh(box, f"rm big; truncate -s {PATCH_CAP // 30} m; for i in $(seq 40); do cp m m$i; done")
    with pytest.raises(PatchTooLarge):
        await box.diff()


async def test_diff_ends_what_still_runs(box: DockerSandbox, nap: str) -> None:
    created = get_engine().client.exec_create(box.container, ["sleep", nap])  # behind the sandbox's back
    get_engine().client.exec_start(created["Id"], detach=True)
    while not alive(nap):
        await asyncio.sleep(0.02)
    await box.diff()
    assert not alive(nap)


# --- what is left, and what breaks


async def test_sixteen_at_once(image: str) -> None:
    async def one(number: int) -> bytes:
        made = await boot_docker(images.Source(image))
        try:
            await sh(made, f"echo {number} > README.md")
            assert b"+%d\n" % number in await made.diff()
            return await made.get("README.md")
        finally:
            await made.close()

    assert await asyncio.gather(*map(one, range(16))) == [b"%d\n" % number for number in range(16)]


async def test_cancelled_boot_leaves_nothing(image: str) -> None:
    for delay in (0, 0.01, 0.05, 0.2):
        booting = asyncio.create_task(boot_docker(images.Source(image)))
        await asyncio.sleep(delay)
        booting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await booting).close()
    assert left(get_engine()) == []


@pytest.mark.parametrize("how", ["kill", "remove_container"])
async def test_a_container_that_is_ended_from_outside(box: DockerSandbox, nap: str, how: str) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.02)
    client = get_engine().client
    await asyncio.to_thread(
        client.kill if how == "kill" else lambda c: client.remove_container(c, force=True), box.container
    )
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause in ("box_killed", "exec_failed", "docker_failed")


@pytest.mark.parametrize("listed", [[["1", "sleep"]], [], None], ids=["listed", "not listed", "an error"])
async def test_an_engine_that_lags_does_not_hide_that_the_container_was_ended(
    box: DockerSandbox, nap: str, monkeypatch: pytest.MonkeyPatch, listed: list[list[str]] | None
) -> None:
    """The first process ends after all others: on a busy machine the engine may list it when the program is gone
    already, or list nothing and yet say that the container runs."""
    assert (await sh(box, "kill -9 $$")).returncode == 137  # a program's own end is no failure of the box
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.02)
    client, said = get_engine().client, []

    def processes(self: ContainerEngine, container: str) -> list[list[str]]:
        if listed is None:
            raise APIError("top: no such process")
        return listed

    def inspect(container: str) -> Any:
        said.append(type(client).inspect_container(client, container))
        said[-1]["State"]["Running"] |= len(said) == 1
        return said[-1]

    monkeypatch.setattr(ContainerEngine, "processes", processes)
    monkeypatch.setattr(client, "inspect_container", inspect)
    await asyncio.to_thread(client.kill, box.container)
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == "box_killed"


async def test_boot_failures_have_causes(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, cause in (
        ({"source": images.Source("localhost:1/no/such:1")}, "missing_image"),
        ({"source": images.Source("dir:snapshot")}, "missing_image"),
        ({"source": images.Source("dir:/some/snapshot")}, "missing_image"),
        ({"source": images.Source(image, "main")}, "seal_failed"),
        ({"source": images.Source(image, setup_patch="no patch")}, "seal_failed"),
        ({"source": images.Source("no/such:1"), "snapshot": tmp_path}, "missing_image"),
        ({"snapshot": tmp_path / "none"}, "missing_snapshot"),
        ({"binds": {Path("/no/such"): "/x"}}, "missing_bind"),
        ({"socket_dir": tmp_path / "none"}, "missing_bind"),
    ):
        with pytest.raises(SandboxError) as failure:
            await boot_docker(**{"source": images.Source(image), **options})
        assert failure.value.cause == cause
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError) as failure:
        ContainerEngine()
    assert failure.value.cause == "no_engine" and "\n" not in str(failure.value)


def test_containers_of_a_killed_process_are_reaped_and_no_others(image: str) -> None:
    program = f"""
        import asyncio, os, sys
        from rollout.sandbox.docker.box import boot_docker
        from rollout.sandbox.docker.images import Source
        async def main():
            box = await boot_docker(Source({image!r}))
            print(box.container, flush=True)
            sys.stdin.read()
            os._exit(1)
        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    runs = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        dead, living = [run.stdout.readline().strip() for run in runs]  # type: ignore[union-attr]
        assert dead and living
        runs[0].kill()
        runs[0].wait()
        assert dead in get_engine().reap()
        found = {container["Id"] for container in get_engine().client.containers(all=True)}
        assert dead not in found and living in found
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdin.close()  # type: ignore[union-attr]
            run.stdout.close()  # type: ignore[union-attr]
        get_engine().reap()


def test_output_that_comes_at_once_is_whole(image: str) -> None:
    """Many short programs, from two loops: what they say is there, from the first byte."""

    async def main() -> None:
        made = await boot_docker(images.Source(image))
        try:
            for number in range(10):
                assert (await made.exec(["echo", str(number)], env={}, timeout_s=30)).stdout == b"%d\n" % number
        finally:
            await made.close()

    other = threading.Thread(target=asyncio.run, args=(main(),))
    other.start()
    uvloop.run(main())
    other.join()
