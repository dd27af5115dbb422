"""Boxes share one kernel: what a program leaves in it is not there for the programs of another box."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from tests.boxes.kinds import TIGHT, BoxKit, kinds

# What the kernel keeps for a user or a session, beside files: a box leaves a word in each, the next one looks for it.
SHARED = """
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ADD, REQUEST, KEYCTL, PERF, BPF = {"x86_64": (248, 249, 250, 298, 321)}.get(
    os.uname().machine, (217, 218, 219, 241, 280))
word, leaves = sys.argv[1].encode(), sys.argv[2] == "leave"
def key():
    if leaves:
        return libc.syscall(ADD, b"user", b"left", word, len(word), -3) >= 0
    found = libc.syscall(KEYCTL, 10, -3, b"user", b"left", 0)
    found = found if found >= 0 else libc.syscall(REQUEST, b"user", b"left", None, 0)
    into = ctypes.create_string_buffer(99)
    return found >= 0 and libc.syscall(KEYCTL, 11, found, into, 99) > 0 and into.value == word
def segment():
    number = libc.shmget(0x5eed, 4096, 0o1666 if leaves else 0)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(number, None, 0) if number >= 0 else None
    if at is None or at == ctypes.c_void_p(-1).value:
        return False
    if leaves:
        ctypes.memmove(at, word, len(word))
    return ctypes.string_at(at, len(word)) == word
def queue():
    librt = ctypes.CDLL("librt.so.1", use_errno=True)
    number = librt.mq_open(b"/left", 0o4302 if leaves else 0o4000, 0o666, None)
    if number < 0:
        return False
    if leaves:
        return librt.mq_send(number, word, len(word), 0) == 0
    into = ctypes.create_string_buffer(8192)
    return librt.mq_receive(number, into, 8192, None) > 0 and into.value == word
def memory():
    if leaves:
        open("/dev/shm/left", "wb").write(word)
    return os.path.exists("/dev/shm/left") and open("/dev/shm/left", "rb").read() == word
def name():
    mine = socket.socket(socket.AF_UNIX)
    if leaves:
        mine.bind(b"\\0left")
        mine.listen()
        globals()["kept"] = mine
        return True
    return mine.connect_ex(b"\\0left") == 0
for one in (key, segment, queue, memory, name):
    try:
        print(one.__name__, one())
    except OSError as error:
        print(one.__name__, False)
for what, number in (("counters", PERF), ("programs", BPF)):
    ctypes.set_errno(0)
    libc.syscall(number, 0, None, 0, -1, -1, 0)
    print(what, ctypes.get_errno() not in (1, 38))
sys.stdout.flush()
if leaves:
    time.sleep(600)
"""


@kinds("bwrap", "docker", "podman", "kubernetes")
async def test_the_kernel_keeps_nothing_for_the_next_box(kind: BoxKit) -> None:
    """Both boxes live at the same time: the first program waits with all that it has left."""
    word = secrets.token_hex(16)
    first, second = await kind.boot(limits=TIGHT), await kind.boot(limits=TIGHT)
    try:
        script = [*("python3", "-c", SHARED, word)]
        leaving = asyncio.ensure_future(
            first.exec(["sh", "-c", 'exec "$@" >said', "sh", *script, "leave"], env={}, timeout_s=90)
        )
        said = b""
        while b"programs" not in said:
            assert not leaving.done(), leaving.result()
            with contextlib.suppress(FileNotFoundError):
                said = await first.get("said")
            await asyncio.sleep(0.05)
        left = dict(line.split() for line in said.decode().splitlines())
        done = await second.exec([*script, "look"], env={}, timeout_s=60)
        found = dict(line.split() for line in done.stdout.decode().splitlines())
        assert set(left) == set(found) == {"key", "segment", "queue", "memory", "name", "counters", "programs"}, done
        assert left["segment"] == left["memory"] == "True", "the test leaves nothing"
        assert set(found.values()) == {"False"} and left["key"] == "False", (left, found)
    finally:
        await asyncio.gather(first.close(), second.close(), leaving, return_exceptions=True)


# Has process 1 call exit: eight lines that would make a failure of the policy one of the infrastructure.
TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print(os.getuid(), libc.ptrace(16, 1, None, None))
def read(name):
    try:
        with open(f"/proc/1/{name}", "rb") as file:
            return name == "mem" or bool(file.read())
    except OSError:
        return False
print(libc.ptrace(8, 1, None, None), read("mem"), read("environ"))
"""


@kinds("docker", "podman", "kubernetes")
async def test_process_1_cannot_be_traced(kind: BoxKit) -> None:
    box = await kind.boot(limits=TIGHT)
    try:
        done = await box.exec(["python3", "-c", TRACE], env={}, timeout_s=60)
        user, *said = done.stdout.split()
        assert (user, said) == (b"0", [b"-1", b"-1", b"False", b"False"]), done
        assert (await box.exec(["true"], env={}, timeout_s=60)).returncode == 0
    finally:
        await box.close()


# Calls by which programs of one user could hold each other up.
REACHING = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
print("namespace", libc.unshare(0x10000000))
others = [pid for pid in range(1, 300) if libc.syscall(434, pid, 0) >= 0 and not os.path.exists(f"/proc/{pid}")]
print("processes", len(others))
"""


@kinds("bwrap", "docker", "podman", "kubernetes")
async def test_a_box_makes_no_user_namespaces_and_holds_no_process_of_others(kind: BoxKit) -> None:
    """User namespaces are counted per user, so a box that could make some might use up those of the trainer."""
    box = await kind.boot(limits=TIGHT)
    try:
        done = await box.exec(["python3", "-c", REACHING], env={}, timeout_s=60)
        assert done.stdout.split() == [b"namespace", b"-1", b"processes", b"0"], done
    finally:
        await box.close()
