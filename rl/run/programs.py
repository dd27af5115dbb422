"""Starting and ending other programs: free ports, an end together with this process, the last lines of a log."""

import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

_PORTS = range(10_000, 20_000)  # rl.cluster.link has its own above them
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


def tied(*command: str) -> list[str]:
    """Return a command that runs ``command`` and sends it SIGTERM when the process that started it ends in any way.

    The program itself has to end what it starts. Start it in the main thread: for the kernel, its parent is the thread
    that starts it (PR_SET_PDEATHSIG).
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, *command]


def end_processes(processes: Sequence[psutil.Process], within_s: float = 10.0) -> None:
    """End processes and return when they have ended: SIGTERM, then SIGKILL for those that live ``within_s`` later."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                send(process)
        _, processes = psutil.wait_procs(processes, within_s)


def free_ports(count: int) -> list[int]:
    """Return different TCP ports on which nobody listens on any address of this machine.

    They are below those that the kernel gives to connections, one of which could take a port before its server does.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            one = stack.enter_context(socket.socket())
            with suppress(OSError):  # it is taken
                one.bind(("", secrets.choice(_PORTS)))
                ports.append(one.getsockname()[1])
    return ports


def free_port() -> int:
    """Return a TCP port on which nobody listens on any address of this machine."""
    return free_ports(1)[0]


def last_lines(text: str, count: int = 1) -> str:
    """Return the last lines of ``text`` that are not blank; "" if there are none."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:]).strip()


def end_of_log(log: Path) -> str:
    """Return the last line of a log that is not blank, at most 300 characters of it."""
    return last_lines(log.read_text(errors="replace"))[:300] or "no output"
