from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from rollout.sandbox import PATCH_CAP, Limits, PatchTooLarge, SandboxError
from rollout.sandbox.local import box as local
from rollout.sandbox.local import bwrap
from rollout.sandbox.local.box import Isolation, LocalSandbox, boot_local
from tests.sandboxes import BWRAP, ISOLATIONS, alive, make_snapshot, sh

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "snapshot")


@pytest_asyncio.fixture(params=ISOLATIONS)
async def box(request: pytest.FixtureRequest, snapshot: Path) -> AsyncIterator[LocalSandbox]:
    made = await boot_local(snapshot, isolation=request.param)
    yield made
    await made.close()


# --- exec


async def test_exec_reports_what_a_program_did(box: LocalSandbox) -> None:
    done = await sh(box, "pwd; echo oops >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{box.workdir}\n".encode(), b"oops\n")
    assert not done.timed_out and not done.truncated and 0 < done.wall_s < 30


async def test_exec_reports_signals_as_a_shell_does(box: LocalSandbox) -> None:
    assert (await sh(box, "kill -TERM $$")).returncode == 128 + 15


async def test_a_program_that_is_missing_is_no_infrastructure_failure(box: LocalSandbox) -> None:
    assert (await box.exec(["/no/such/program"], env={}, timeout_s=9)).returncode in (126, 127)


async def test_stdin_reaches_the_program_and_ends(box: LocalSandbox) -> None:
    data = os.urandom(300_000)
    done = await box.exec(["cat"], env={}, timeout_s=30, stdin=data)
    assert done.stdout == data


async def test_a_program_that_ignores_stdin_is_fine(box: LocalSandbox) -> None:
    done = await box.exec(["true"], env={}, timeout_s=30, stdin=b"x" * 10**6)
    assert done.returncode == 0


async def test_output_is_capped_per_stream_and_never_blocks(box: LocalSandbox) -> None:
    done = await sh(box, "head -c 3000000 /dev/zero; echo -n 1234567 >&2", output_cap=5)
    assert (done.stdout, done.stderr, done.truncated, done.returncode) == (b"\0" * 5, b"12345", True, 0)
    assert not (await sh(box, "echo -n 12345", output_cap=5)).truncated


async def test_environment_is_built_from_nothing(box: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "leak")
    done = await box.exec(["env"], env={"GIVEN": "1", "LD_GIVEN": "2"}, timeout_s=30)
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    found.pop("PWD", None)  # bwrap and sh set it
    assert found.pop("PATH").split(":")[0] == f"{sys.prefix}/bin"
    given = {"GIVEN": "1", "LD_GIVEN": "2", "HOME": box.home, "TMPDIR": box.tmpdir, "LANG": "C.UTF-8"}
    assert {key: value for key, value in found.items() if key not in ("OLDPWD", "_", "SHLVL")} == given
    own = await box.exec(["sh", "-c", "echo $HOME"], env={"HOME": "/elsewhere"}, timeout_s=30)
    assert own.stdout == b"/elsewhere\n"


async def test_no_descriptor_is_inherited(box: LocalSandbox) -> None:
    with open("/dev/null") as file:
        os.set_inheritable(file.fileno(), True)
        done = await box.exec(["ls", "/proc/self/fd"], env={}, timeout_s=30)
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3: the directory that ls reads


async def test_exec_leaks_no_descriptor_here(box: LocalSandbox) -> None:
    await sh(box, "true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await sh(box, "true")
        await sh(box, "sleep 9", timeout_s=0.05)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_python_and_the_directories_of_the_box_work(box: LocalSandbox) -> None:
    script = 'touch "$HOME/a" "$TMPDIR/b" c && python3 -c "import sys; print(sys.prefix)" && git status --short'
    done = await sh(box, script)
    assert (done.stdout.decode().splitlines(), done.stderr) == ([sys.prefix, "?? c"], b"")


# --- nothing outlives its exec


@pytest.mark.parametrize("spawn", ["sleep {0} &", "(setsid sleep {0} &)", "nohup sleep {0} >/dev/null 2>&1 &"])
async def test_background_processes_end_with_the_exec(box: LocalSandbox, spawn: str, nap: str) -> None:
    done = await sh(box, spawn.format(nap) + "\nsleep 0.05; echo done", timeout_s=120)
    assert done.stdout == b"done\n" and done.wall_s < 60
    assert not alive(nap)


async def test_timeout_kills_grandchildren(box: LocalSandbox, nap: str) -> None:
    done = await sh(box, f"(setsid sleep {nap} &) ; echo begun; bash -c 'sleep {nap}; true'; true", timeout_s=2)
    assert done.timed_out and done.returncode is None and done.stdout == b"begun\n"
    assert done.wall_s < 60
    assert not alive(nap)


async def test_cancellation_kills_and_passes_on(box: LocalSandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"(setsid sleep {nap} &) ; sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(nap)


@pytest.mark.parametrize("times", [1, 3])
async def test_cancellation_at_any_moment(box: LocalSandbox, nap: str, times: int) -> None:
    for delay in (0, 0.001, 0.003, 0.01, 0.02, 0.03):
        running = asyncio.create_task(sh(box, f"(setsid sleep {nap} &) ; sleep {nap}"))
        await asyncio.sleep(delay)
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await box.close()  # waits for what a second cancellation has cut off
    assert not alive(nap)


async def test_close_ends_a_running_exec(box: LocalSandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    while not alive(nap):
        await asyncio.sleep(0.01)
    await box.close()
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == "closed" and not alive(nap)


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_end_of_the_loop_ends_processes(snapshot: Path, isolation: Isolation, runner: Callable, nap: str) -> None:
    async def main() -> None:
        async def episode() -> None:
            box = await boot_local(snapshot, isolation=isolation)
            try:
                await sh(box, f"(setsid sleep {nap} &) ; sleep {nap}")
            finally:
                await box.close()

        episodes = asyncio.create_task(episode())  # left to the runner, which cancels every task
        while not alive(nap):
            assert not episodes.done(), episodes.result()
            await asyncio.sleep(0.01)
        # asyncio (3.11) waits for ever for a process whose pipes it was connecting when the loop was ended,
        # which takes it a few turns.
        for _ in range(20):
            await asyncio.sleep(0.01)

    runner(main())
    assert not alive(nap)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_on_uvloop_too(snapshot: Path, isolation: Isolation, nap: str) -> None:
    """Ray runs the agent loop workers on it."""

    async def main() -> None:
        box = await boot_local(snapshot, isolation=isolation)
        data = os.urandom(300_000)
        done = await box.exec(["bash", "-c", "cat; echo oops >&2; exit 4"], env={}, timeout_s=30, stdin=data)
        assert (done.returncode, done.stdout, done.stderr) == (4, data, b"oops\n")
        script = f"(setsid sleep {nap} &) ; sleep {nap}"
        assert (await sh(box, script, timeout_s=0.2)).timed_out and not alive(nap)
        for delay in (0, 0.003, 0.03):
            running = asyncio.create_task(sh(box, script))
            await asyncio.sleep(delay)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not alive(nap)
        await box.close()

    uvloop.run(main())


# --- limits


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_limits(snapshot: Path, isolation: Isolation) -> None:
    limits = Limits(cpu_s=1, file_bytes=2**20, open_files=50)
    box = await boot_local(snapshot, isolation=isolation, limits=limits)
    try:
        shown = await sh(box, "ulimit -t; ulimit -f; ulimit -n; ulimit -c; ulimit -v")
        assert shown.stdout.split() == [b"1", b"1024", b"50", b"0", b"unlimited"]
        assert (await sh(box, "head -c 2000000 /dev/zero > big")).returncode != 0
        spun = await sh(box, "while :; do :; done", timeout_s=60)
        assert not spun.timed_out and spun.returncode in (128 + 9, 128 + 24)
    finally:
        await box.close()


# --- what the box cannot reach


@pytest.mark.parametrize("isolation", [BWRAP])
async def test_bwrap_hides_host_files(snapshot: Path, tmp_path: Path, isolation: Isolation) -> None:
    box = await boot_local(snapshot, isolation=isolation)
    home, system = Path.home(), [Path("/var/lib"), Path("/sys/kernel")]
    try:
        for path in (tmp_path, REPOSITORY / "rollout", REPOSITORY / ".git", home / ".ssh", *system):
            assert (await sh(box, f"ls {path}")).returncode != 0, path
        # Read-only, or another's: the box may be run by root, whom ownership alone does not stop.
        for target in ("/x", "/usr/x", "/etc/x", "/etc/passwd", f"{sys.prefix}/x", "/proc/x"):
            assert (await sh(box, f"exec 3>>{target}")).returncode != 0, target
        found = await sh(box, "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print -quit")
        assert found.stdout == b""
        before = os.stat("/dev/null")
        await sh(box, "chmod 600 /dev/null; touch -d 2001-01-01 /dev/null; chmod 666 /dev/null")
        after = os.stat("/dev/null")
        assert (before.st_ctime_ns, before.st_mode) == (after.st_ctime_ns, after.st_mode)
        assert (await sh(box, "echo x > /dev/null; head -c 1 /dev/urandom > /dev/null")).returncode == 0
    finally:
        await box.close()


@pytest.mark.parametrize("isolation", [BWRAP])
async def test_bwrap_hides_processes_and_network(snapshot: Path, isolation: Isolation) -> None:
    box = await boot_local(snapshot, isolation=isolation)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            connect = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
            assert b"refused" in (await box.exec(["python3", "-c", connect], env={}, timeout_s=30)).stderr
        seen = await sh(box, "ls -d /proc/[0-9]* | wc -l; grep -E 'CapEff|NoNewPrivs' /proc/self/status")
        count, capabilities, sealed = seen.stdout.decode().splitlines()
        assert int(count) < 10 and int(capabilities.split()[1], 16) == 0 and sealed.split()[1] == "1"
        assert (await sh(box, "unshare --user --map-root-user true")).returncode != 0
    finally:
        await box.close()


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_socket_and_binds_are_reachable(snapshot: Path, tmp_path: Path, isolation: Isolation) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    sockets = tmp_path / "s"
    sockets.mkdir()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(answer, sockets / "sock"):
        box = await boot_local(snapshot, isolation=isolation, binds={tool: str(tool)}, socket_dir=sockets)
        try:
            code = f"import socket; s = socket.socket(1); s.connect('{sockets}/sock'); print(s.recv(9))"
            done = await sh(box, f'{tool}; python3 -c "{code}"')
            assert done.stdout == b"tool\nb'hello'\n", done.stderr
            if isolation == "bwrap":
                assert (await sh(box, f"rm {sockets}/sock || echo x >> {tool}")).returncode != 0
        finally:
            await box.close()


# --- put and get


async def test_put_and_get(box: LocalSandbox) -> None:
    for path in ("new/dir/file", f"{box.home}/a/b", f"{box.tmpdir}/c", f"{box.workdir}/README.md"):
        await box.put(path, b"data")
        assert await box.get(path) == b"data"
        assert (await box.exec(["cat", path], env={}, timeout_s=30)).stdout == b"data"
    assert (await sh(box, "ls -A . new/dir | grep put-")).stdout == b""


async def test_put_and_get_do_not_follow_links(box: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    await sh(box, f"ln -s {secret} file; ln -s {tmp_path} dir; mkfifo fifo; mkdir real")
    for path in ("file", "dir/secret", "fifo", "real", "missing", "README.md/x"):
        with pytest.raises(FileNotFoundError):
            await box.get(path)
    with pytest.raises(SandboxError):
        await box.put("dir/secret", b"changed")
    await box.put("file", b"own")  # replaces the link itself
    assert secret.read_text() == "host" and await box.get("file") == b"own"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".", ""])
async def test_paths_outside_the_box_are_refused(box: LocalSandbox, path: str) -> None:
    with pytest.raises(ValueError):
        await box.put(path, b"")
    with pytest.raises(ValueError):
        await box.get(path)


# --- diff


async def applied(snapshot: Path, target: Path, patch: bytes) -> Path:
    subprocess.run(["cp", "-a", snapshot, target], check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=target, input=patch, check=True)
    return target


async def test_diff_holds_every_change(box: LocalSandbox, snapshot: Path, tmp_path: Path) -> None:
    assert await box.diff() == b""
    await sh(
        box,
        "echo more >> README.md; rm pkg/mod.py; chmod -x run.sh; ln -sf /etc/passwd link; mkdir -p new/deep;"
        "head -c 1000 /dev/urandom > new/deep/bin; touch empty 'sp ace' $'tab\\tname'; echo x > debug.log",
    )
    tree = await applied(snapshot, tmp_path / "t", await box.diff())
    assert (tree / "README.md").read_text() == "hello\nmore\n" and not (tree / "pkg").exists()
    assert not os.access(tree / "run.sh", os.X_OK) and os.readlink(tree / "link") == "/etc/passwd"
    assert (tree / "new/deep/bin").read_bytes() == await box.get("new/deep/bin")
    assert (tree / "empty").exists() and (tree / "sp ace").exists() and (tree / "tab\tname").exists()
    assert (tree / "debug.log").exists()  # ignored by .gitignore, but no junk


@pytest.mark.parametrize(
    "attack",
    [
        "rm -rf .git",
        "rm -rf .git; echo 'gitdir: /etc' > .git",
        "rm -rf .git; ln -s / .git",
        "git add -A; git -c user.name=a -c user.email=a commit -qm hidden",
        "git init -q pkg",
        "echo '*' >> .gitignore",
        "echo '*.py -diff -text filter=x diff=x' > .gitattributes; git config filter.x.clean 'echo no';"
        "git config diff.x.textconv 'echo no'; git config diff.external 'echo no'; git config diff.noprefix 1",
        "git update-index --assume-unchanged pkg/mod.py; git config core.worktree /; touch .git/index.lock",
        "git config core.fsmonitor 'echo no'; git config core.hooksPath /tmp; git config core.excludesFile /x",
    ],
)
async def test_diff_is_out_of_the_agents_reach(box: LocalSandbox, snapshot: Path, tmp_path: Path, attack: str) -> None:
    await sh(box, f"echo 'X = 1' >> pkg/mod.py; echo new > pkg/new.py; {attack}")
    tree = await applied(snapshot, tmp_path / "t", await box.diff())
    assert (tree / "pkg/mod.py").read_text().endswith("X = 1\n")
    assert (tree / "pkg/new.py").read_text() == "new\n"


async def test_diff_leaves_out_junk_and_special_files(box: LocalSandbox) -> None:
    await sh(
        box,
        "mkdir -p pkg/__pycache__ .pytest_cache; touch pkg/__pycache__/a.pyc b.pyc .pytest_cache/v; mkfifo p",
    )
    assert await box.diff() == b""


async def test_diff_refuses_what_is_too_large(box: LocalSandbox) -> None:
    await sh(box, f"head -c {PATCH_CAP + 1} /dev/zero > big")
    with pytest.raises(PatchTooLarge):
        await box.diff()


# --- boot and close


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_boxes_are_private_and_vanish(snapshot: Path, isolation: Isolation) -> None:
    first, second = [await boot_local(snapshot, isolation=isolation) for _ in range(2)]
    await sh(first, "echo 1 > README.md; chmod -R 000 pkg; mkdir -p $(printf 'd/%.0s' {1..1500})")
    assert (await second.get("README.md")) == b"hello\n" == (snapshot / "README.md").read_bytes()
    workspace = first._root.parent
    for made in (first, second):
        await made.close()
        await made.close()
    assert os.listdir(workspace) == ["lock"]
    for use in (first.diff(), sh(first, "true")):
        with pytest.raises(SandboxError) as failure:
            await use
        assert failure.value.cause == "closed"


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_sixteen_at_once(snapshot: Path, isolation: Isolation) -> None:
    async def one(number: int) -> bytes:
        made = await boot_local(snapshot, isolation=isolation)
        try:
            await sh(made, f"echo {number} > README.md")
            assert b"+%d\n" % number in await made.diff()
            return await made.get("README.md")
        finally:
            await made.close()

    assert await asyncio.gather(*map(one, range(16))) == [b"%d\n" % number for number in range(16)]


async def test_cancelled_boot_leaves_nothing(snapshot: Path) -> None:
    made = await boot_local(snapshot, isolation="none")
    workspace = made._root.parent
    await made.close()
    for delay in (0, 0.001, 0.003):
        booting = asyncio.create_task(boot_local(snapshot, isolation="none"))
        await asyncio.sleep(delay)
        booting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await booting).close()
    assert os.listdir(workspace) == ["lock"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"snapshot": Path("/no/such")}, "missing_snapshot"),
        ({"binds": {Path("/no/such"): "/x"}}, "missing_bind"),
    ],
)
async def test_boot_failures_have_causes(snapshot: Path, options: dict, cause: str) -> None:
    with pytest.raises(SandboxError) as failure:
        await boot_local(**{"snapshot": snapshot, **options}, isolation="none")
    assert failure.value.cause == cause


async def test_a_full_disk_is_named(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise local.shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr(local.shutil, "copytree", full)
    with pytest.raises(SandboxError) as failure:
        await boot_local(snapshot, isolation="none")
    assert failure.value.cause == "no_space"


async def test_without_isolation_a_bind_cannot_move(snapshot: Path) -> None:
    with pytest.raises(ValueError):
        await boot_local(snapshot, isolation="none", binds={snapshot: "/elsewhere"})


async def test_auto_without_bwrap_warns_once(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bwrap, "available", lambda: False)
    local._warn_unprotected.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = await boot_local(snapshot, isolation="auto")
            assert made.isolation == "none"
            await made.close()
    assert len(caplog.records) == 1 and "without isolation" in caplog.text
    with pytest.raises(SandboxError) as failure:
        await boot_local(snapshot, isolation="bwrap")
    assert failure.value.cause == "no_bwrap"


def test_directories_of_a_killed_process_are_swept(snapshot: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def boot_and(end: str) -> None:
        program = f"""
            import asyncio, os
            from pathlib import Path
            from rollout.sandbox.local.box import boot_local
            async def main():
                box = await boot_local(Path({str(snapshot)!r}), isolation="none")
                {end}
            asyncio.run(main())
        """
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True)

    boot_and("os._exit(0)")
    assert len(list(temporary.iterdir())) == 1
    boot_and("pass")  # sweeps the first one's, and its own at its exit, though it forgot to close
    assert list(temporary.iterdir()) == []


@pytest.mark.bwrap
def test_what_a_killed_process_was_starting_is_swept(snapshot: Path, tmp_path: Path, nap: str) -> None:
    """bwrap's programs end with their parent, but not if that dies while bwrap starts them."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = f"""
        import asyncio
        from pathlib import Path
        from rollout.sandbox.local.box import boot_local
        async def main():
            box = await boot_local(Path({str(snapshot)!r}), isolation="bwrap")
            print("booted", flush=True)
            await box.exec(["sleep", {nap!r}], env={{}}, timeout_s=60)
        asyncio.run(main())
    """
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
    for delay in range(12):
        worker = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], env=environment, stdout=subprocess.PIPE
        )
        assert worker.stdout is not None and worker.stdout.readline() == b"booted\n"
        while not alive(nap):  # as soon as there is bwrap's command line
            pass
        time.sleep(delay / 2000)
        worker.kill()
        worker.communicate()
    end_all = [sys.executable, "-c", "from rollout.sandbox import directory; directory.sweep()"]
    subprocess.run(end_all, env=environment, check=True)
    assert not alive(nap) and list(temporary.iterdir()) == []
