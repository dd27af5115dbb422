"""Scripted agents attack their sandbox: programs in a box reach, learn and become nothing that they should not.

Every attack is bounded, so that a hole does no harm here, and whatever it reaches for is of the test's own. Plain boxes
isolate nothing, and of apptainer there is only a stand-in: so these are for bubblewrap, containers and pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.proxy.server import ProxyServer
from rollout.sandbox import ExecResult, Sandbox
from rollout.sandbox.docker.engine import PROJECT, get_engine
from rollout.sandbox.sealing import Source
from tests.boxes.attack_kit import make_task
from tests.boxes.kinds import TIGHT, BoxKit, Kubernetes, Podman, kinds
from tests.docker_kit import base_image
from tests.kit import QueueEngine, char_policy
from tests.sandboxes import REPOSITORY, alive, sh

ISOLATED = kinds("bwrap", "docker", "podman", "kubernetes")
# Podman's boxes are made of one image only, without the snapshots of tasks.
OF_SNAPSHOTS = kinds("bwrap", "docker", "kubernetes")

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
    """Return the places in a box that have the nonce. It is given in two halves, so that the search does not find
    itself."""
    done = await python(box, f"first, second = {nonce[:9]!r}, {nonce[9:]!r}\n{SEARCH}", 120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


async def python(box: Sandbox, code: str, timeout_s: float = 60) -> ExecResult:
    return await box.exec(["python3", "-c", code], env={}, timeout_s=timeout_s)


@pytest_asyncio.fixture
async def tight(kind: BoxKit) -> AsyncIterator[Sandbox]:
    """A box with limits."""
    made = await kind.boot(limits=TIGHT)
    yield made
    await made.close()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory for sockets with a short path."""
    with tempfile.TemporaryDirectory(prefix="cc-") as directory:
        yield Path(directory)


# --- files


@OF_SNAPSHOTS
async def test_hidden_tests_are_not_there(kind: BoxKit, tmp_path: Path) -> None:
    nonce = f"nonce-{secrets.token_hex(16)}"
    task = make_task(tmp_path, nonce=nonce)
    (tmp_path / "tasks.json").write_text(json.dumps(task.to_row()))
    box = await kind.boot(task.snapshot, limits=TIGHT)
    try:
        assert await found(box, nonce) == []
        await box.put("found/here", nonce.encode())
        assert await found(box, nonce) == [f"{box.workdir}/found/here"]  # it finds what there is
        assert (await sh(box, f"cat {tmp_path}/tasks.json {tmp_path}/snapshot/pkg/mod.py")).stdout == b""
    finally:
        await box.close()


@ISOLATED
async def test_there_is_only_the_box_to_write_to_and_a_file_has_its_limit(
    kind: BoxKit, tight: Sandbox, tmp_path: Path
) -> None:
    box, size = tight, TIGHT.file_bytes
    roots = (box.workdir, box.home, box.tmpdir)
    for root in roots:
        fill = f"head -c {size + 1} /dev/zero > {root}/big; stat -c %s {root}/big; rm {root}/big"
        assert int((await sh(box, fill)).stdout) == size
    if kind.own_system:
        await check_mounts(box, kind.mounted)
    else:
        places = await python(box, WALK + "print(*(d for d, _ in directories() if os.access(d, os.W_OK)), sep='\\n')")
        assert places.returncode == 0 and places.stdout, places.stderr
        for place in places.stdout.decode().splitlines():
            assert any(f"{place}/".startswith(f"{root}/") for root in (*roots, "/dev")), place
    # /dev may be a file system of the exec's own.
    await sh(box, f"echo x > /dev/{tmp_path.name}; echo x > /dev/shm/{tmp_path.name}")
    assert not any(Path(place, tmp_path.name).exists() for place in ("/dev", "/dev/shm"))
    assert (await python(box, f"import os; os.chmod({sys.prefix!r}, 0o777)")).returncode != 0
    outside = tmp_path / "outside"
    outside.mkdir()
    await sh(box, f"mkdir -p {outside} {kind.repository}/pkg; echo x | tee {outside}/x {kind.repository}/pkg/x")
    await sh(box, f"ln -s {outside} link; echo x > link/x")
    assert not list(outside.iterdir()) and not (kind.repository / "pkg/x").exists()


async def check_mounts(box: Sandbox, mounted: set[str]) -> None:
    """Check that nobody else's directory can be written to; of mounts only those that are made for each box."""
    writable, own = {}, set()
    for line in (await sh(box, "cat /proc/self/mountinfo")).stdout.decode().splitlines():
        (_, _, device, root, place, options, *_), (kind, *_) = (part.split() for part in line.split(" - "))
        if options.split(",")[0] == "rw":
            writable[place] = (device, kind)
        if root == "/" and kind in ("proc", "tmpfs", "devpts", "mqueue"):
            own.add(device)  # all of it is the box's; of a directory of the machine's, a part would be mounted
    assert writable.pop("/")[1] in ("overlay", "fuse-overlayfs")
    disks = {place for place, (device, _) in writable.items() if device not in own}
    assert disks == mounted, writable
    kernel = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/fs/cgroup/x", "/sys/kernel/uevent_helper")
    for place in kernel:
        assert (await sh(box, f"echo > {place}")).returncode != 0, place


async def test_socket_and_binds_are_reachable_and_read_only(kind: BoxKit, tmp_path: Path) -> None:
    # Podman 4.3 reads a comma in a mount's source as the end of it.
    tool, sockets = tmp_path / ("tool" if isinstance(kind, Podman) else "a,tool"), tmp_path / "s"
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    sockets.mkdir(mode=0o700)
    inside = "/opt/tool" if kind.isolated else str(tool)  # a plain box cannot move it

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(answer, sockets / "sock"):
        box = await kind.boot(binds={tool: inside}, socket_dir=sockets)
        try:
            code = f"import socket; s = socket.socket(1); s.connect('{sockets}/sock'); print(s.recv(9))"
            done = await sh(box, f'{inside}; python3 -c "{code}"')
            assert done.stdout == b"tool\nb'hello'\n", done.stderr
            attacks = (f"rm {sockets}/sock", f"touch {sockets}/x", f"echo x >> {inside}", f"chmod 777 {inside}")
            for attack in attacks if kind.isolated else ():
                assert b"Read-only" in (await sh(box, attack)).stderr, attack
            seen = await sh(box, f"ls {tmp_path}; ls {REPOSITORY}/rollout")
            assert not kind.isolated or seen.stdout == b"s\n"  # nothing else of the machine
            assert await box.diff() == b""
        finally:
            await box.close()


# --- network


@contextlib.contextmanager
def listening(*servers: socket.socket) -> Iterator[list[str]]:
    """Accept connections; yields the addresses of the servers that somebody has reached."""
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


@ISOLATED
async def test_no_network_is_reached(kind: BoxKit, tight: Sandbox, sockets: Path) -> None:
    """No listener on this machine: on TCP at two addresses, UDP, a socket in the file system, an abstract one."""
    box = tight
    kinds = [
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, (own_address(), 0)),
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
    mine = targets[:1] + targets[2:]
    targets += [(int(socket.AF_UNIX), int(socket.SOCK_STREAM), path) for path in ENGINES]
    with listening(*servers) as reached:
        done = await python(box, CALL.format(targets))
        tried = done.stdout.decode().splitlines()
        assert len(tried) == len(targets), done.stderr
        # A datagram is sent by a machine that nobody hears; nothing else may be.
        assert not [line for line in tried if line.startswith("sent") and str(targets[1][2]) not in line], tried
        assert reached == []
        exec(CALL.format(mine))  # the listeners do listen
    assert sorted(reached) == sorted(str(address) for _, _, address in mine)
    interfaces = (await sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()
    assert interfaces in ([b"lo"], [])
    # A loopback of the box's own, and its name.
    own = "import socket; s = socket.create_server(('localhost', 0)); socket.create_connection(s.getsockname())"
    assert (await python(box, own)).returncode == 0
    if kind.name != "kubernetes":  # whose nodes write one for each pod
        assert b"Read-only" in (await sh(box, "echo > /etc/hosts")).stderr
    found = await sh(box, f"ls {' '.join(ENGINES)} /run/podman /run/containerd /tmp/.X11-unix")
    assert found.returncode != 0 and found.stdout == b""


def own_address() -> str:
    """Return an address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


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


@ISOLATED
async def test_no_other_episode_is_reached_and_no_reward_is_posted(kind: BoxKit, sockets: Path) -> None:
    nonce = f"nonce-{secrets.token_hex(16)}"
    server = ProxyServer()
    await server.start()
    homes = [sockets / name for name in ("a", "b")]
    boxes: list[Sandbox] = []
    sessions = []
    try:
        for number, home in enumerate(homes):
            home.mkdir()
            boxes.append(await kind.boot(limits=TIGHT, socket_dir=home))
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


# --- processes

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


@ISOLATED
async def test_a_fork_bomb_ends_with_its_exec(kind: BoxKit, tight: Sandbox, nap: str) -> None:
    # Where no control group refuses more than a box may have, the program would be killed (test_lifetime has that).
    count = 2 * kind.processes or TIGHT.processes // 2
    done = await python(tight, HOLD.format(count, nap))
    assert 0 < int(done.stdout) < (kind.processes or count + 1) and not alive(nap)
    assert (await sh(tight, "echo works")).stdout == b"works\n"
    for timeout_s in (1.5, 5, 20):  # on a busy machine forking takes a while
        over = await python(tight, HOLD.format(count, nap) + "time.sleep(600)\n", timeout_s)
        assert over.timed_out and not alive(nap)
        if over.stdout:
            break
    assert over.stdout


# --- rights

RIGHTS = """
import ctypes, os, signal, subprocess
os.umask(0)
subprocess.run("cp /bin/sh own; chmod 6755 own; ./own -p -c 'id -u'", shell=True)
for path in ("/usr/bin/su", "/bin/su", "/usr/bin/sudo", "/usr/bin/passwd"):
    if os.path.exists(path):
        subprocess.run([path, "-c", "id -u"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
other, group = (0 if one else 1000 for one in (os.getuid(), os.getgid()))
def tried(what, call, *arguments):
    try:
        call(*arguments)
        print("DONE", what)
    except OSError:
        print("no")
tried("setuid", os.setuid, other)
tried("setgid", os.setgid, group)
tried("groups", os.setgroups, [group])
tried("chown", os.chown, "own", other, group)
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


async def check_rights(box: Sandbox, user: bytes) -> None:
    """Check that a box's programs are this user, become no other, and may do nothing of what `RIGHTS` tries."""
    done = await python(box, RIGHTS.format(os.getpid()))
    *lines, status = done.stdout.splitlines()
    assert status == b"['%s', '%s', '1']" % (b"0" * 16, b"0" * 16), done
    assert lines[0] == user and {*lines} == {user, b"no"} and lines.count(b"no") == 11, lines


@ISOLATED
async def test_no_rights_are_gained(kind: BoxKit, tight: Sandbox) -> None:
    # Root in a container has none of root's rights, and is the only user that one can become there.
    await check_rights(tight, b"0" if kind.own_system else b"1000")
    bounds = (await sh(tight, "grep CapBnd /proc/self/status")).stdout.split()[1]
    assert bounds == b"0" * 16 or not kind.own_system
    assert int((await sh(tight, "ls -d /proc/[0-9]* | wc -l")).stdout) < 10


@kinds("docker", "kubernetes")
async def test_no_rights_are_gained_by_an_ordinary_user_in_a_container(kind: BoxKit) -> None:
    """Such a user could become root by the setuid programs that the image has."""
    tag = f"{PROJECT}/test:user-{secrets.token_hex(8)}"
    client, labels = get_engine().client, get_engine().labels()
    made = client.create_container(base_image(), ["true"], network_disabled=True, labels=labels)["Id"]
    try:
        client.commit(made, *tag.split(":"), changes=["USER 1000:1000"])
        if isinstance(kind, Kubernetes):
            await asyncio.to_thread(kind.cluster.load, tag)
        box = await kind.boot(kind.repository, source=Source(tag), limits=TIGHT)
        try:
            assert (await sh(box, "test -u /usr/bin/su")).returncode == 0
            await check_rights(box, b"1000")
        finally:
            await box.close()
    finally:
        client.remove_container(made, force=True)
        client.remove_image(tag)
