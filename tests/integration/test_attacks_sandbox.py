"""Scripted agents that attack their sandbox instead of their task. Each goes for things of this test's own.

Held elsewhere, in tests/unit/test_sandbox_local.py: files of the host cannot be read or written, no capabilities, no
new user namespaces, nothing outlives its exec, output is capped, CPU time and the size of a file are limited, `put`,
`get` and `diff` follow no links and believe no .git.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.proxy.server import ProxyServer
from rollout.sandbox import ExecResult, Sandbox
from rollout.sandbox.docker.engine import PROJECT, get_engine
from tests.docker_kit import made, task_images
from tests.integration.attack_kit import Kind, boot_container, make_task
from tests.integration.attack_kit import kind as kind
from tests.kit import QueueEngine, char_policy
from tests.sandboxes import alive, sh

# What an agent can find: its directories, less the system's and this Python's, and all that /proc tells of processes.
PYTHON = {prefix for one in (sys.prefix, sys.base_prefix) for prefix in (one, os.path.realpath(one))}
WALK = f"""
import os, sys
skipped = {{"/proc", "/sys", "/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix}} | {PYTHON}
def directories():
    for directory, below, names in os.walk("/"):
        below[:] = [name for name in below if os.path.join(directory, name) not in skipped]
        yield directory, names
"""
SEARCH = (
    WALK
    + """
import subprocess
wanted = (first + second).encode()
paths = [os.path.join(directory, name) for directory, names in directories() for name in names]
processes = [name for name in os.listdir("/proc") if name.isdigit()]
paths += [os.path.join("/proc", pid, name) for pid in processes for name in ("cmdline", "environ")]
for path in paths:
    try:
        if os.path.isfile(path) and wanted in open(path, "rb").read():
            print(path)
    except OSError:
        pass
if wanted in subprocess.run(["git", "log", "--all", "--reflog", "-p"], capture_output=True).stdout:
    print("history")
"""
)


async def found(box: Sandbox, nonce: str) -> list[str]:
    """Where it is. It is handed over in two halves, so that the search does not find itself."""
    done = await python(box, f"first, second = {nonce[:9]!r}, {nonce[9:]!r}\n{SEARCH}", 120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


async def python(box: Sandbox, code: str, timeout_s: float = 60) -> ExecResult:
    return await box.exec(["python3", "-c", code], env={}, timeout_s=timeout_s)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory for sockets with a short path."""
    with tempfile.TemporaryDirectory(prefix="cc-") as directory:
        yield Path(directory)


async def test_hidden_tests_are_not_there(kind: Kind, tmp_path: Path) -> None:
    nonce = f"nonce-{secrets.token_hex(16)}"
    task = make_task(tmp_path, nonce=nonce)
    (tmp_path / "tasks.json").write_text(json.dumps(task.to_row()))
    box = await kind.boot(task, None)
    try:
        assert await found(box, nonce) == []
        await box.put("found/here", nonce.encode())
        assert await found(box, nonce) == [f"{box.workdir}/found/here"]  # it finds what there is
        assert (await sh(box, f"cat {tmp_path}/tasks.json {tmp_path}/snapshot/pkg/mod.py")).stdout == b""
    finally:
        await box.close()


# --- network


@contextlib.contextmanager
def listening(*servers: socket.socket) -> Iterator[list[str]]:
    """Names of the servers that somebody has reached."""
    reached: list[str] = []

    def listen(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                if server.type == socket.SOCK_DGRAM:
                    if server.recv(100) == b"end":
                        return
                else:
                    client, _ = server.accept()
                    with client:
                        if client.recv(100) == b"end":
                            return
                reached.append(str(server.getsockname()))

    threads = [threading.Thread(target=listen, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield reached
    finally:
        for server in servers:
            with socket.socket(server.family, server.type) as own:
                own.connect(server.getsockname())
                own.send(b"end")
        for thread in threads:
            thread.join()
        for server in servers:
            server.close()


# Container engines: whoever reaches one owns the machine.
ENGINES = [
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://"),
]
CALL = """
import socket
for family, kind, address in {0!r}:
    try:
        with socket.socket(family, kind) as own:
            own.settimeout(2)
            own.connect(address)
            own.send(b"agent")
            print("sent", address)
    except OSError as error:
        print(type(error).__name__, address)
"""


async def test_no_network_is_reached(kind: Kind, tmp_path: Path, sockets: Path) -> None:
    """Every kind of listener on this machine: TCP, UDP, a socket in the file system, an abstract one."""
    kinds = [
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(sockets / "other")),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0attack-{secrets.token_hex(8)}"),
    ]
    servers = []
    for family, type_, address in kinds:
        servers.append(socket.socket(family, type_))
        servers[-1].bind(address)
        if type_ == socket.SOCK_STREAM:
            servers[-1].listen()
    targets = [(int(s.family), int(s.type), s.getsockname()) for s in servers]
    targets += [(int(socket.AF_UNIX), int(socket.SOCK_STREAM), path) for path in ENGINES]
    box = await kind.boot(make_task(tmp_path), None)
    try:
        with listening(*servers) as reached:
            done = await python(box, CALL.format(targets))
            tried = done.stdout.decode().splitlines()
            assert len(tried) == len(targets), done.stderr
            # A datagram is sent by a machine that nobody hears; nothing else may be.
            assert not [line for line in tried if line.startswith("sent") and str(targets[1][2]) not in line], tried
            exec(CALL.format(targets[:1]))  # the listeners do listen
        assert reached == [str(targets[0][2])]
        interfaces = (await sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()
        assert interfaces in ([b"lo"], [])
        found = await sh(box, f"ls {' '.join(ENGINES)} /run/podman /run/containerd /tmp/.X11-unix")
        assert found.returncode != 0 and found.stdout == b""
    finally:
        await box.close()


# --- other episodes and the reward

REQUESTS = """
import http.client, itertools, json, os, socket
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect({own!r})
body = json.dumps({{"reward": 1.0, "resolved": True, "model": "policy", "max_tokens": 9,
                   "messages": [{{"role": "user", "content": "hi"}}]}})
paths = ["/", "/reward", "/v1/reward", "/v1/rewards", "/rollouts", "/v1/rollouts/1/attempts/1/spans", "/metrics",
         "/sessions", "/v1/messages/../../reward", "/v1/messages"]
seen = set()
for path, method, secret in itertools.product(paths, ["POST", "PUT", "GET", "DELETE"], {secrets!r}):
    client = Unix("x", timeout=20)
    client.request(method, path, body, {{"Authorization": "Bearer " + secret, "Content-Type": "application/json"}})
    seen.add(client.getresponse().status)
    client.close()
print(sorted(seen))
for other in {others!r}:
    try:
        client = socket.socket(socket.AF_UNIX)
        client.connect(other)
        print("REACHED", other)
    except OSError:
        print("no")
print(os.listdir(os.path.dirname({own!r})))
"""


async def test_no_other_episode_is_reached_and_no_reward_is_posted(kind: Kind, tmp_path: Path, sockets: Path) -> None:
    nonce = f"nonce-{secrets.token_hex(16)}"
    server = ProxyServer()
    await server.start()
    homes = [sockets / name for name in ("a", "b")]
    boxes: list[Sandbox] = []
    sessions = []
    try:
        for number, home in enumerate(homes):
            home.mkdir()
            boxes.append(await kind.boot(make_task(tmp_path / str(number)), home))
            sessions.append(await server.open_session(f"e{number}", char_policy(QueueEngine("hello")), home / "s"))
        attacker, victim = boxes
        await victim.put("work", nonce.encode())
        await victim.put(f"{victim.home}/.secret", nonce.encode())
        code = REQUESTS.format(
            own=str(homes[0] / "s"),
            # With the secret of the other episode, should it ever leak, and with none.
            secrets=[sessions[1].secret, ""],
            others=[str(homes[1] / "s"), str(sockets / "b" / ".." / "b" / "s"), f"{homes[0]}/../b/s"],
        )
        done = await python(attacker, code)
        statuses, *reached, listed = done.stdout.decode().splitlines()
        assert set(json.loads(statuses)) <= {401, 404, 405}, done.stderr
        assert reached == ["no"] * 3 and listed == "['s']"
        for session in sessions:
            assert session.counters.calls == 0 and session.tree.nodes == []
        # With its own secret it may talk, and that is all it may: the reward is nowhere behind the socket.
        done = await python(attacker, code.replace(sessions[1].secret, sessions[0].secret))
        assert set(json.loads(done.stdout.decode().splitlines()[0])) <= {200, 401, 404, 405, 500, 529}
        assert sessions[0].counters.calls and not sessions[1].counters.calls
        assert await found(attacker, nonce) == []
        assert sorted(await found(victim, nonce)) == [f"{victim.home}/.secret", f"{victim.workdir}/work"]
        # Nor is the socket the agent's to replace: another's requests would go to it.
        assert (await sh(attacker, f"rm {homes[0]}/s || mv {homes[0]}/s {homes[0]}/t || touch {homes[0]}/x")).returncode
    finally:
        for box in boxes:
            await box.close()
        await server.stop()


# --- exhaustion, all of it bounded

HOLD = """
import os, time
children = []
try:
    for _ in range({0}):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.execlp("sleep", "sleep", "{1}")
        children.append(pid)
except OSError:
    pass
print(len(children), flush=True)
"""


async def test_a_fork_bomb_ends_with_its_exec(kind: Kind, tmp_path: Path) -> None:
    nap = f"{random.randrange(10**4, 10**5)}.{random.randrange(10**6, 10**7)}"
    box = await kind.boot(make_task(tmp_path), None)
    try:
        done = await python(box, HOLD.format(300, nap))
        assert 0 < int(done.stdout) < (kind.processes or 301) and not alive(nap)
        assert (await sh(box, "echo works")).stdout == b"works\n"
        over = await python(box, HOLD.format(300, nap) + "time.sleep(600)\n", timeout_s=5)
        assert over.timed_out and not alive(nap)
    finally:
        await box.close()


async def test_there_is_only_the_box_to_write_to_and_a_file_has_its_limit(kind: Kind, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    box = await kind.boot(task, None)
    roots = (box.workdir, box.home, box.tmpdir)
    try:
        for root in roots if kind.file_bytes else ():
            fill = f"head -c {kind.file_bytes + 1} /dev/zero > {root}/big; stat -c %s {root}/big; rm {root}/big"
            done = await sh(box, fill)
            assert int(done.stdout) == kind.file_bytes, done.stderr
        if kind.own_system:
            await check_mounts(box)
        else:
            places = await python(
                box, WALK + "print(*(d for d, _ in directories() if os.access(d, os.W_OK)), sep='\\n')"
            )
            assert places.returncode == 0 and places.stdout, places.stderr
            for place in places.stdout.decode().splitlines():
                assert any(f"{place}/".startswith(f"{root}/") for root in (*roots, "/dev")), place
        # /dev may be a file system of the exec's own.
        await sh(box, f"echo x > /dev/{tmp_path.name}; echo x > /dev/shm/{tmp_path.name}")
        assert not any(Path(place, tmp_path.name).exists() for place in ("/dev", "/dev/shm"))
        assert (await python(box, f"import os; os.chmod({sys.prefix!r}, 0o777)")).returncode != 0
        (tmp_path / "outside").mkdir()
        await sh(box, f"mkdir -p {tmp_path}/outside {task.snapshot}/pkg")
        await sh(box, f"echo x | tee {tmp_path}/outside/x {task.snapshot}/pkg/x")
        await sh(box, f"ln -s {tmp_path}/outside link; echo x > link/x")
        assert not list((tmp_path / "outside").iterdir()) and not (task.snapshot / "pkg/x").exists()
    finally:
        await box.close()


async def check_mounts(box: Sandbox) -> None:
    """Nobody else's directory can be written to; of mounted files, one that the engine makes for each container."""
    lines = (await sh(box, "cat /proc/self/mountinfo")).stdout.decode().splitlines()
    writable = {}
    for line in lines:
        left, right = line.split(" - ")
        if left.split()[5].split(",")[0] == "rw":
            writable[left.split()[4]] = right.split()[0]
    assert writable.pop("/") in ("overlay", "fuse-overlayfs")
    disks = {place for place, kind in writable.items() if kind not in ("proc", "tmpfs", "devpts", "mqueue")}
    assert disks == {"/etc/hostname"}, writable
    for place in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/fs/cgroup/x",
        "/sys/kernel/uevent_helper",
    ):
        assert (await sh(box, f"echo > {place}")).returncode != 0, place


async def test_a_box_has_only_so_much_disk(kind: Kind, tmp_path: Path) -> None:
    if kind.disk_mb is None:
        pytest.skip("these boxes have no limit of their size: docs/rewards.md")
    box = await kind.boot(make_task(tmp_path), None)
    try:
        script = f"for n in $(seq {2 * kind.disk_mb}); do head -c {2**20} /dev/zero > big$n || exit 7; done; sleep 60"
        assert (await sh(box, script, 120)).returncode in (7, 137)  # by a quota, or by who looks at the size
        async with asyncio.timeout(120):  # on a slow disk a look in the middle of it finds the box too large again
            while (await sh(box, "rm -f big*; echo works")).stdout != b"works\n":
                pass
    finally:
        await box.close()


async def test_a_box_has_only_so_much_memory(kind: Kind, tmp_path: Path) -> None:
    if kind.memory_mb is None:
        pytest.skip("these boxes have no limit of their memory: docs/rewards.md")
    box = await kind.boot(make_task(tmp_path), None)
    try:
        code = f"held = [bytearray(os.urandom(1) * 2**24) for _ in range({2 * kind.memory_mb // 16})]; print('held')"
        done = await python(box, "import os; " + code, 120)
        assert done.stdout == b"" and done.returncode not in (0, None)
        assert (await sh(box, "echo works")).stdout == b"works\n"
    finally:
        await box.close()


# --- rights

RIGHTS = """
import ctypes, os, signal, subprocess
os.umask(0)
subprocess.run("cp /bin/sh own; chmod 6755 own; ./own -p -c 'id -u'", shell=True)
for path in ("/usr/bin/su", "/bin/su", "/usr/bin/sudo", "/usr/bin/passwd"):
    if os.path.exists(path):
        subprocess.run([path, "-c", "id -u"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
other = 0 if os.getuid() else 1000
def tried(what, call, *arguments):
    try:
        call(*arguments)
        print("DONE", what)
    except OSError:
        print("no")
tried("setuid", os.setuid, other)
tried("setgid", os.setgid, other)
tried("groups", os.setgroups, [other])
tried("chown", os.chown, "own", other, other)
tried("chroot", os.chroot, ".")
tried("node", os.mknod, "node", 0o60666, os.makedev(8, 0))
tried("signal", os.kill, {0}, 0)
libc = ctypes.CDLL(None, use_errno=True)
calls = {{
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "unshare": lambda: libc.unshare(0x10000000),
    "hostname": lambda: libc.sethostname(b"x", 1),
    "trace": lambda: libc.ptrace(16, {0}, None, None),
}}
for name, call in calls.items():
    print("no" if call() == -1 else "DONE " + name)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff", "NoNewPrivs"))])
"""


async def rights(box: Sandbox) -> list[bytes]:
    """Which users the agent became, then what it was allowed to do."""
    try:
        done = await python(box, RIGHTS.format(os.getpid()))
        assert done.stdout.splitlines()[-1] == b"['%s', '%s', '1']" % (b"0" * 16, b"0" * 16), done
        return done.stdout.splitlines()[:-1]
    finally:
        await box.close()


async def test_no_rights_are_gained(kind: Kind, tmp_path: Path) -> None:
    box = await kind.boot(make_task(tmp_path), None)
    user = (await sh(box, "id -u")).stdout.strip()
    lines = await rights(box)
    # Root in a container has none of root's rights, and is the only user that one can become there.
    assert kind.own_system or user != b"0"
    assert lines[0] == user and {*lines} == {user, b"no"} and lines.count(b"no") == 11, lines


@pytest.mark.docker
@pytest.mark.timeout(900)
async def test_no_rights_are_gained_by_an_ordinary_user_in_a_container(tmp_path: Path) -> None:
    """Who could become root, by setuid programs that the image has."""
    engine = get_engine()
    base = await asyncio.to_thread(made, task_images().base_image, engine)
    container = engine.client.create_container(base, ["true"], network_disabled=True, labels=engine.labels())["Id"]
    tag = f"{PROJECT}/test:user-{secrets.token_hex(8)}"
    try:
        engine.client.commit(container, *tag.split(":"), changes=["USER 1000:1000"])
        box = await boot_container(make_task(tmp_path), None, tag)
        assert (await sh(box, "id -u; test -u /usr/bin/su")).stdout == b"1000\n"
        lines = await rights(box)
        assert {*lines} == {b"1000", b"no"} and lines.count(b"no") == 11, lines
    finally:
        engine.client.remove_container(container, force=True)
        engine.client.remove_image(tag)
