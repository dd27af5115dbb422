"""One SSH connection to a host that has a container engine, made by the `ssh` program with its user's keys and config.

A single process is the connection. On the host it runs `keeper.sh`, which executes short commands for this process and
removes the connection's boxes when it has ended, however that came about. What else is needed goes through the same
connection, as forwarded sockets (the engine's to here, those of sessions to the host) and as copies of files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import secrets
import select
import shlex
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, cast

from rollout.sandbox import SandboxError, failed, files
from rollout.sandbox.directory import make_root
from rollout.sandbox.docker.engine import Machine

ALIVE_S, TTL_S = 5, 120
"""A connection without an answer ends after three times `ALIVE_S` here, and after `TTL_S` on the host."""

_ANSWER_S = 60.0
_HOST = re.compile(r"((?:[\w.+-]+@)?(?:\[[\da-fA-F:.%]+\]|[\w.][\w.-]*))(?::(\d+))?(/\S*)?")
_SCRIPT = Path(__file__).with_name("keeper.sh").read_text()
# ssh takes the first value that it is given, and these come before its files.
_OPTIONS = shlex.split("""
    -oBatchMode=yes -oStrictHostKeyChecking=yes -oControlMaster=yes -oControlPersist=no -oClearAllForwardings=yes
    -oForwardAgent=no -oForwardX11=no -oPermitLocalCommand=no -oRemoteCommand=none -oRequestTTY=no
    -oStreamLocalBindUnlink=yes -oConnectTimeout=15 -oServerAliveCountMax=3 -oLogLevel=INFO
""")
_ADVICE = {
    "host key": "its host key is unknown or has changed; check it, and connect by hand once",
    "Permission denied": "it accepts no key of this user; `ssh -o BatchMode=yes` must work by hand",
    "not found": "it has no bash",
}
_AGAIN = re.compile(r"kex_exchange_identification|Connection (closed|reset)")  # sshd refuses many at once at random


class Link(Machine):
    """A Link is a connection to one host, the machine of an engine. Several threads may call its methods.

    host: `[user@]name[:port][/path/of/the/engine's/socket]`; name may be one of ssh's config. config: a file in place
    of the user's own. home, lease: directories on the host, for its copies and for this connection; cpus: of the host.
    Raises SandboxError no_engine, in one line, if there is no connection or no engine.
    """

    def __init__(self, host: str, config: Path | None = None) -> None:
        parts = _HOST.fullmatch(host)
        if parts is None:
            raise SandboxError("no_engine", "this is no [user@]host[:port][/socket]")
        self.name, self._engine = host, parts[3] or ""
        self._to = re.sub(r"[\[\]]", "", parts[1])
        self._how = [*(["-F", str(config)] if config else []), *(["-p", parts[2]] if parts[2] else [])]
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._numbers, self._shared = itertools.count(), dict[Path, tuple[str, set[str]]]()
        for pause in (0.5, 1.5, None):
            try:
                self.home, self.lease, self.cpus = self._connect()
                break
            except SandboxError as error:
                self.close()
                if pause is None or not _AGAIN.search(str(error)):
                    raise
                time.sleep(pause + secrets.randbelow(1000) / 1000)
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Return whether the connection has not ended, as far as is known."""
        return not self._over and self._process.poll() is None

    def run(self, command: str) -> str:
        """Run a line of bash on the host; return what it wrote, as one line. Raises SandboxError."""
        with self._lock:
            if self._over:
                raise SandboxError("no_engine", self.problem())
            self._send(f"{command}\n")
            code, _, said = self._line().partition(" ")
        if code != "0":
            raise failed("docker_failed", said or command)
        return said

    def read(self, path: str) -> str:
        """Return the text of a file of the host; its lines become one."""
        return self.run(f"cat {shlex.quote(path)}")

    def most_processes(self) -> int:
        """Return how many processes the host lets its user have."""
        return min(map(int, re.findall(r"\d+", self.run("cat /proc/sys/kernel/pid_max; ulimit -Hu"))))

    def engine(self) -> Path:
        """Lead the host's engine to a socket here, and return that."""
        self._control("forward", "-L", f"/proc/self/cwd/e:{self._engine}")
        return Path(f"/proc/{os.getpid()}/fd/{self._opened}/e")

    def shared(self, directory: Path) -> str:
        """Make a directory on the host for the sockets of one here; return its path."""
        place = f"{self.lease}/{next(self._numbers)}"
        self.run(f"mkdir -m 711 {place}")
        self._shared[directory] = place, set()
        return place

    def let_in(self, directory: Path, uid: int) -> None:
        """Lead the sockets that a shared directory has by now to the host, where all users may use them."""
        place, known = self._shared[directory]
        for path in directory.iterdir():
            if path.is_socket() and path.name not in known:
                self._control("forward", "-R", f"{place}/{path.name}:{path}")
                self.run(f"chmod 666 {place}/{path.name}")
                known.add(path.name)

    def hand_over(self, spare: Path, directory: Path) -> None:
        """Let a directory be the one that a box shows in place of the directory above it."""
        place, _ = self._shared[directory] = self._shared.pop(spare)
        self.run(f"ln -s . {place}/{shlex.quote(directory.name)}")
        spare.rmdir()

    def unshare(self, directory: Path) -> None:
        """Undo what `shared` and `let_in` did."""
        place, known = self._shared.pop(directory, ("", set()))
        if not place or not self.alive:
            return  # its files on the host go with the connection
        for name in known:
            self._control("cancel", "-R", f"{place}/{name}:{directory / name}")
        self.run(f"rm -rf {place}")

    def shown(self, path: Path) -> str:
        """Return where on the host a copy of a file or a directory is; it is copied if none with its content is there.

        The directories above do not count. Raises SandboxError docker_failed, no_space.
        """
        status = os.stat(path)
        with self._copying:
            place = f"{self.home}/copies/{_digest(path, status.st_mtime_ns, status.st_size, status.st_ino)}"
            if self.run(f"touch -c {place} && test -e {place}/it || echo no"):
                self._copy(path, place)
        return f"{place}/it"

    def close(self) -> None:
        """End the connection. Its boxes and files on the host are removed there."""
        self._over = True
        self._process.kill()
        with self._lock:
            with contextlib.suppress(BrokenPipeError), self._process:
                pass  # this closes its pipes, of which one may hold what could not be sent
            files.remove_tree(self.directory)
            os.close(self._opened)

    def problem(self) -> str:
        """Return why the connection has ended, as far as ssh said."""
        said = ""
        with contextlib.suppress(OSError):
            said = " ".join((self.directory / "log").read_text(errors="replace").split())[-400:]
        advice = [f"{advice} ({said})" for words, advice in _ADVICE.items() if words.lower() in said.lower()]
        return advice[0] if advice else said or "the connection has ended"

    def _connect(self) -> tuple[str, str, int]:
        token, pipe = secrets.token_hex(6), subprocess.PIPE
        self.directory = make_root(lambda _: None)  # if this process is killed, `directory.sweep` finds ssh by its cwd
        # The directory's own path may be too long for those of sockets, so nothing names them by it.
        self._opened = os.open(self.directory, os.O_PATH | os.O_CLOEXEC)
        self._mux = ["ssh", "-F", "none", "-S", "c"]
        there = shlex.join(["bash", "-s", "--", token, str(TTL_S), self._engine])
        options = [*_OPTIONS, f"-oServerAliveInterval={ALIVE_S}", *self._mux[-2:]]
        command = ["ssh", *self._how, *options, "--", self._to, there]
        self._over, self._read = False, b""
        with open(self.directory / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, cwd=self.directory, start_new_session=True
            )
        self._in, self._out = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._send(_SCRIPT)
        while True:
            word, _, rest = self._line().partition(f" {token} ")  # a login may have written something before
            if word == "problem":
                raise SandboxError("no_engine", rest)
            if word == "ready":
                break
        cpus, _, home = rest.partition(" ")
        self._engine = self._line()
        return home, f"{home}/leases/{token}", int(cpus)

    def _control(self, what: str, *arguments: str) -> None:
        """Tell the connection's process to do something, such as forward a socket."""
        command = [*self._mux, "-O", what, *arguments, "--", self._to]
        done = subprocess.run(command, cwd=self.directory, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise failed("docker_failed", f"it does not forward a socket ({' '.join(arguments)}): {said}")

    def _copy(self, path: Path, place: str) -> None:
        new = f"{place}.{secrets.token_hex(4)}"
        work = f"mkdir {new} && tar -xpof - -C {new} && mv -T {new} {place} || test -e {place}"  # another may be faster
        work += f"; code=$?; rm -rf {new}; exit $code"
        command = [*self._mux, "--", self._to, shlex.join(["sh", "-c", work])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=self.directory, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as sent:
            assert sent.stdin is not None and sent.stdout is not None
            with contextlib.suppress(BrokenPipeError), sent.stdin as stream:  # it says why
                _pack(path, cast(BinaryIO, stream))
            said = " ".join(sent.stdout.read().decode(errors="replace").split())
        if sent.returncode:
            raise failed("docker_failed", f"{path} is not copied there: {said}")

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # what is read next tells why
            self._in.write(text.encode())
            self._in.flush()

    def _line(self) -> str:
        """Return the next line from the host."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while b"\n" not in self._read:
            ready = poll.poll(_ANSWER_S * 1000)
            data = os.read(self._out.fileno(), 1 << 16) if ready else b""
            if not data:
                self._process.kill()
                self._process.wait()
                raise SandboxError("no_engine", self.problem())
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace")

    def _beat(self) -> None:
        with contextlib.suppress(SandboxError):
            while True:
                time.sleep(TTL_S / 12)
                self.run(":")


@functools.cache
def _digest(path: Path, *_: int) -> str:
    """Return what stands for the contents and modes of a file or a directory. A change of the other values is looked
    for."""
    hashed = hashlib.sha256()
    _pack(path, cast(BinaryIO, SimpleNamespace(write=hashed.update)))
    return hashed.hexdigest()[:32]


def _pack(path: Path, out: BinaryIO) -> None:
    """Write an archive that only depends on the contents and modes of a file or a directory."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path.resolve(), "it", filter=files.unowned)
