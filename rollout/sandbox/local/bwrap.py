"""The bubblewrap command line of a local sandbox.

A box has its own user, pid, network, ipc and uts namespaces, no capabilities, a filter of system calls, and a root file
system made of the host's read-only system directories, the Python in use, and what the caller binds. Nothing else of
the host is there: no home directories, no repository, no /etc beyond what programs need to start, and of the packages
of this Python only pytest and what it needs. The others could be a task's own package as it is without the bug.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import logging
import os
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from rollout.sandbox import HOME, TMPDIR, WORKDIR
from rollout.sandbox.local import seccomp

logger = logging.getLogger(__name__)

_UID = "1000"
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "os-release")
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_PASSWD = f"root:x:0:0::/root:/bin/sh\nagent:x:{_UID}:{_UID}::{HOME}:/bin/sh\n"
_GROUP = f"root:x:0:\nagent:x:{_UID}:\n"
_EXHAUSTED = os.strerror(errno.EAGAIN).encode()
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


def problem() -> str:
    """Return why no bubblewrap sandbox starts on this machine and what to do, "" if one does (tried once per process).

    Raises OSError if this process is out of descriptors or processes, so that this cannot be known.
    """
    if shutil.which("bwrap") is None:
        return "bubblewrap is missing: install it (the program is called bwrap)"
    if _flavour() is not None:
        return ""
    return "user namespaces are forbidden, without which bubblewrap makes no box: allow them (sysctl, or the container)"


def filtering() -> contextlib.AbstractContextManager[list[int]]:
    """Yield the descriptors that bwrap has to inherit for its filter of system calls: one, or none where that does not
    work. Raises OSError."""
    flavour = _flavour()
    return _readable(flavour.filter if flavour else None)


@contextlib.contextmanager
def _readable(filter: bytes | None) -> Generator[list[int]]:
    fds = [] if filter is None else [seccomp.as_file(filter)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def command(
    root: Path, binds: Iterable[tuple[Path, str]], setenv: Mapping[str, str], status_fd: int, filter_fds: Sequence[int]
) -> list[str]:
    """Return the command line up to the program to run.

    root: holds tree/, home/ and tmp/ of the box and what `prepare` made. binds: (host path, path inside), read-only.
    setenv: variables that only the program gets, not bwrap. status_fd: bwrap reports the program's start and end
    there, as JSON. filter_fds: of `filtering`.
    """
    flavour = _flavour()
    assert flavour is not None, "call problem() first"
    writable = ((root / "tmp", TMPDIR), (root / "home", HOME), (root / "tree", WORKDIR))
    argv = [*flavour.argv, "--json-status-fd", str(status_fd), *_filter(filter_fds)]
    for source, inside in writable:
        argv += ["--bind", str(source), inside]
    for name in ("passwd", "group", "hosts"):
        argv += ["--ro-bind", str(root / "etc" / name), f"/etc/{name}"]
    argv += ["--bind", str(root / "shm"), "/dev/shm"]
    for node in sorted((root / "dev").iterdir()):
        argv += ["--dev-bind", str(node), f"/dev/{node.name}"]
    for source, inside in _python_prefixes():
        argv += ["--ro-bind", str(source), inside]
    for directory, shown in packages().items():
        argv += ["--tmpfs", str(directory)]
        for path in shown:
            argv += ["--ro-bind", str(path), str(path)]
    for source, inside in binds:
        argv += ["--ro-bind", str(source), inside]
    for directory in packages():  # the agent's program may be in one
        argv += ["--remount-ro", str(directory)]
    for key, value in setenv.items():
        argv += ["--setenv", key, value]
    return [*argv, *_seal(), "--chdir", WORKDIR, "--"]


def prepare(root: Path) -> None:
    """Make what a box has besides its tree, home and tmp: account files and device nodes. Raises OSError."""
    (root / "etc").mkdir()
    (root / "shm").mkdir()  # /dev/shm: files of a file system in memory would count as no process's memory
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", _HOSTS)):
        (root / "etc" / name).write_text(text)
    (root / "dev").mkdir()
    if os.geteuid() == 0:
        # bwrap would show the host's own nodes, whose mode a box run by root could change for everybody.
        with contextlib.suppress(PermissionError):  # this is root of a user namespace, which may not make nodes
            for name in _DEVICES:
                node = root / "dev" / name
                os.mknod(node, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
                node.chmod(0o666)


class _Flavour(NamedTuple):
    """A flavour is a set of options, and a filter of system calls where that works."""

    argv: tuple[str, ...]
    filter: bytes | None


@functools.cache
def _flavour() -> _Flavour | None:
    """Return the strictest set of options that works here, None if there is none."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    filter = seccomp.program()
    for kept in [filter, None] if filter else [None]:  # a kernel without seccomp
        for extra in (["--disable-userns"], []):  # bubblewrap before 0.8 has no --disable-userns
            argv = [program, *_namespaces(), *extra, *_system()]
            if _starts(argv, kept):
                if kept is None:
                    logger.warning("boxes run without a filter of system calls: they share the kernel's keys")
                return _Flavour(tuple(argv), kept)
    return None


def _starts(argv: Sequence[str], filter: bytes | None) -> bool:
    """Raise OSError if there is no descriptor or process for it: else no box would be isolated, because of a moment."""
    try:
        with _readable(filter) as fds:
            argv = [*argv, *_filter(fds), *_seal(), "--", "/bin/sh", "-c", "exit 0"]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, pass_fds=fds)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode and _EXHAUSTED in done.stderr:
        raise BlockingIOError(errno.EAGAIN, done.stderr.decode(errors="replace").strip())
    return done.returncode == 0


def _filter(fds: Sequence[int]) -> list[str]:
    return [word for fd in fds for word in ("--seccomp", str(fd))]


def _namespaces() -> list[str]:
    unshare = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
    identity = ["--uid", _UID, "--gid", _UID, "--hostname", "sandbox"]
    # --as-pid-1: bwrap's own init would live on until the program's orphans end. Without it the namespace ends with
    # the program, and bwrap returns only after that.
    return [*unshare, *identity, "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]


def _system() -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--dir", "/run"]
    argv += ["--symlink", "../tmp", "/var/tmp"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            argv += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            argv += ["--ro-bind", name, name]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _seal() -> list[str]:
    """Return the options that make /proc, /dev and / read-only; they come last, because mount points are made first.

    /dev is a file system in memory, and nobody would count what is written to it.

    /proc is read-only because, if this process runs as root, the kernel takes the box's user for root wherever it
    looks only at the owner of a file, and /proc/sys has files of root (one names a program that is run as root).
    """
    return ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]


@functools.cache
def packages() -> dict[Path, tuple[Path, ...]]:
    """Return where the Python in use, and the one that it is based on, have packages; and what of each boxes show."""
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    found = {*site.getsitepackages(), *(sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib"))}
    places = {Path(path) for one in found for path in (one, os.path.realpath(one)) if os.path.isdir(one)}
    shown: dict[str, set[str]] = {}
    for one in map(importlib.metadata.distribution, _needed("pytest")):
        tops = {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}
        shown.setdefault(os.path.realpath(str(one.locate_file(""))), set()).update(tops)
    return {
        place: tuple(place / name for name in sorted(shown.get(os.path.realpath(place), ())))
        for place in sorted(places)
    }


def _needed(name: str) -> set[str]:
    """Return a distribution and those that it needs, as far as they are installed."""
    found, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted = map(Requirement, importlib.metadata.requires(name) or ())
            more = {one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
            found.add(name)
            waiting += more - found
    return found


@functools.cache
def _python_prefixes() -> tuple[tuple[Path, str], ...]:
    """Return the running Python and, for a virtual environment, the Python that it is based on, at their own paths."""
    wanted = {path for prefix in (sys.prefix, sys.base_prefix) for path in (prefix, os.path.realpath(prefix))}
    return tuple((Path(path), path) for path in sorted(wanted) if not Path(path).is_relative_to("/usr"))
