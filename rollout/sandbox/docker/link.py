"""One SSH connection to a host that has a container engine, made by the `ssh` program with its user's keys and config.

A single process is the connection. On the host it runs `keeper.sh`, which executes short commands for this process and
removes the connection's boxes when it has ended, however that came about. What else is needed goes through the same
connection, as forwarded sockets (the engine's to here, those of sessions to the host) and as copies of files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import select
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from rollout.sandbox import SandboxError, failed, files
from rollout.sandbox.directory import make_root

ALIVE_S, TTL_S = 5, 120
"""A connection without an answer ends after three times `ALIVE_S` here, and after `TTL_S` on the host."""

_ANSWER_S = 60.0
_HOST = re.compile(r"((?:[\w.+-]+@)?(?:\[[\da-fA-F:.%]+\]|[\w.][\w.-]*))(?::(\d+))?(/\S*)?")
_SCRIPT = Path(__file__).with_name("keeper.sh").read_text()
# ssh takes the first value that it is given, and these come before its files.
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "yes",
    "ControlPersist": "no",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "StreamLocalBindUnlink": "yes",
    "ConnectTimeout": "15",
    "ServerAliveCountMax": "3",
    "LogLevel": "INFO",
}
_ADVICE = {
    "host key": "its host key is unknown or has changed; check it, and connect by hand once",
    "Permission denied": "it accepts no key of this user; `ssh -o BatchMode=yes` must work by hand",
    "not found": "it has no bash",
}
_AGAIN = re.compile(r"kex_exchange_identification|Connection (closed|reset)")  # sshd refuses many at once at random

logger = logging.getLogger(__name__)


class Link:
    """A Link is a connection to one host. All methods block, and may be called by several threads.

    host: `[user@]name[:port][/path/of/the/engine's/socket]`; name may be one of ssh's config. config: a file in place
    of the user's own. home, lease: directories on the host, for its copies and for this connection; cpus: of the host.
    Raises SandboxError no_engine, in one line, if there is no connection or no engine.
    """

    def __init__(self, host: str, config: Path | None = None) -> None:
        parts = _HOST.fullmatch(host)
        if parts is None:
            raise SandboxError("no_engine", f"{host!r} is no [user@]host[:port][/socket]")
        if shutil.which("ssh") is None:
            raise SandboxError("no_engine", "there is no program ssh on this machine; install openssh-client")
        self.name, self._engine = host, parts[3] or ""
        self._to = re.sub(r"[\[\]]", "", parts[1])
        self._how = [*(["-F", str(config)] if config else []), *(["-p", parts[2]] if parts[2] else [])]
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._numbers, self._shared = itertools.count(), dict[Path, tuple[str, set[str]]]()
        self._digests: dict[tuple[Any, ...], str] = {}
        self._over = ""
        self.directory = make_root(lambda _: None)
        for pause in (0.5, 1.5, None):
            try:
                self.home, self.lease, self.cpus = self._connect()
                break
            except SandboxError as error:
                self._end()
                if pause is None or not _AGAIN.search(str(error)):
                    files.remove_tree(self.directory)
                    raise
                time.sleep(pause + secrets.randbelow(1000) / 1000)
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Return whether the connection has not ended, as far as is known."""
        return not self._over and self._process.poll() is None

    def run(self, command: str, cause: str = "docker_failed") -> str:
        """Run a line of bash on the host; return what it wrote, as one line. Raises SandboxError `cause`, no_space."""
        assert "\n" not in command
        with self._lock:
            if self._over:
                raise SandboxError("no_engine", f"{self.name}: {self.problem()}")
            self._send(f"{command}\n")
            code, _, said = self._line().partition(" ")
        if code != "0":
            raise failed(cause, f"{self.name}: {said or command}")
        return said

    def engine(self) -> Path:
        """Lead the host's engine to a socket here, and return that."""
        here = self.directory / "e"
        self._control("forward", "-L", f"{here}:{self._engine}")
        return here

    def share(self, directory: Path) -> str:
        """Make a directory on the host for the sockets of one here; return its path."""
        place = f"{self.lease}/{next(self._numbers)}"
        self.run(f"mkdir -m 711 {shlex.quote(place)}")
        self._shared[directory] = place, set()
        return place

    def let_in(self, directory: Path) -> None:
        """Lead the sockets that a shared directory has by now to the host, where all users may use them."""
        place, known = self._shared[directory]
        for path in directory.iterdir():
            if path.is_socket() and path.name not in known:
                self._control("forward", "-R", f"{place}/{path.name}:{path}")
                self.run(f"chmod 666 {shlex.quote(f'{place}/{path.name}')}")
                known.add(path.name)

    def unshare(self, directory: Path) -> None:
        """Undo what `share` and `let_in` did."""
        place, known = self._shared.pop(directory, ("", set()))
        if not place or not self.alive:
            return  # its files on the host go with the connection
        for name in known:
            self._control("cancel", "-R", f"{place}/{name}:{directory / name}")
        self.run(f"rm -rf {shlex.quote(place)}")

    def copy(self, path: Path) -> str:
        """Return where on the host a copy of a file or a directory is; it is copied if none with its content is there.

        The directories above do not count. Raises SandboxError docker_failed, no_space.
        """
        status = os.stat(path)
        key = path, status.st_mtime_ns, status.st_size, status.st_ino
        with self._copying:
            if key not in self._digests:
                hashed = hashlib.sha256()
                _pack(path, cast(BinaryIO, _Sink(hashed.update)))
                self._digests[key] = hashed.hexdigest()[:32]
            place = f"{self.home}/copies/{self._digests[key]}"
            there = f"touch -c {shlex.quote(place)} && test -e {shlex.quote(place)}/it && echo yes || echo no"
            if self.run(there) == "no":
                self._copy(path, place)
        return f"{place}/it"

    def close(self) -> None:
        """End the connection. Its boxes and files on the host are removed there."""
        self._end()
        files.remove_tree(self.directory)

    def problem(self) -> str:
        """Return why the connection has ended, as far as ssh said."""
        try:
            said = " ".join((self.directory / "log").read_text(errors="replace").split())[-400:]
        except OSError:
            said = ""
        advice = next((advice for words, advice in _ADVICE.items() if words.lower() in said.lower()), "")
        over = "" if self._over == "closed" else self._over
        parts = [over or advice, f"ssh: {said}" if said else ""]
        return "; ".join(part for part in parts if part) or "the connection has ended"

    def _connect(self) -> tuple[str, str, int]:
        token = secrets.token_hex(6)
        options = {**_OPTIONS, "ServerAliveInterval": str(ALIVE_S)}
        command = ["ssh", *self._how, *(f"-o{key}={value}" for key, value in options.items()), "-S", self._control_path]
        command += ["--", self._to, shlex.join(["bash", "-s", "--", token, str(TTL_S), self._engine])]
        self._over, self._read = "", b""
        with open(self.directory / "log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.directory,  # if this process is killed, `directory.sweep` finds it by that
                start_new_session=True,
            )
        self._send(_SCRIPT)
        while True:
            word, _, rest = self._line().partition(f" {token} ")  # a login may have written something before
            if word == "problem":
                raise SandboxError("no_engine", f"{self.name}: {rest}")
            if word == "ready":
                break
        cpus, _, home = rest.partition(" ")
        self._engine = self._line()
        return home, f"{home}/leases/{token}", int(cpus)

    def _end(self) -> None:
        self._over = self._over or "closed"
        with self._lock, self._process as process:  # closes its pipes
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    @property
    def _control_path(self) -> str:
        return str(self.directory / "c")

    def _control(self, what: str, *arguments: str) -> None:
        """Tell the connection's process to do something, such as forward a socket."""
        command = ["ssh", "-F", "none", "-S", self._control_path, "-O", what, *arguments, "--", self._to]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            if not self.alive:
                raise SandboxError("no_engine", f"{self.name}: {self.problem()}")
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise failed("docker_failed", f"{self.name} does not forward a socket ({' '.join(arguments)}): {said}")

    def _copy(self, path: Path, place: str) -> None:
        new = f"{place}.{secrets.token_hex(4)}"
        there, beside = shlex.quote(place), shlex.quote(new)
        work = f"mkdir {beside} && tar -xpof - -C {beside} && mv -T {beside} {there} || test -e {there}"
        command = ["ssh", "-F", "none", "-S", self._control_path, "--", self._to, shlex.join(["sh", "-c", work])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as sent:
            assert sent.stdin is not None and sent.stdout is not None
            with contextlib.suppress(BrokenPipeError), sent.stdin as stream:  # it says why
                _pack(path, cast(BinaryIO, stream))
            said = " ".join(sent.stdout.read().decode(errors="replace").split())
        if sent.returncode:
            if self.alive:
                self.run(f"rm -rf {beside}")
            raise failed("docker_failed", f"{self.name}: {path} is not copied there: {said}")
        self.run(f"rm -rf {beside}")  # another process was faster

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # what is read next tells why
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def _line(self) -> str:
        """Return the next line from the host."""
        assert self._process.stdout is not None
        poll, out = select.poll(), self._process.stdout.fileno()
        poll.register(out, select.POLLIN)
        while b"\n" not in self._read:
            ready = poll.poll(_ANSWER_S * 1000)
            data = os.read(out, 1 << 16) if ready else b""
            if not data:
                if not ready:
                    self._over = f"no answer for {_ANSWER_S:.0f} s"
                    self._process.kill()
                self._process.wait()
                raise SandboxError("no_engine", f"{self.name}: {self.problem()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace")

    def _beat(self) -> None:
        while self.alive:
            time.sleep(TTL_S / 12)
            try:
                self.run(":")
            except SandboxError as error:
                if self._over != "closed":
                    logger.warning("a host of boxes is lost: %s", error)
                return


class _Sink:
    """This is a file that hands on what is written to it."""

    def __init__(self, take: Any) -> None:
        self._take = take

    def write(self, data: bytes) -> int:
        self._take(data)
        return len(data)


def _pack(path: Path, out: BinaryIO) -> None:
    """Write an archive that only depends on the contents and modes of a file or a directory."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path.resolve(), "it", filter=plain)
