"""Programs started as forks of a process that has imported what they import.

A vLLM server and verl's SFT trainer take half a minute of a core to import torch, vLLM and verl; for a model of a few
million parameters that is most of what they do. This is for a CPU: a fork cannot use a GPU that its parent has touched.
The process that forks is ``multiprocessing``'s fork server, of which there is one in a process. It and the forks end
with the process that made it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from rl.run.fork_server import forget


class Forks:
    """This starts programs (``python -m NAME``) as forks of a process that has imported ``modules``.

    environment: more variables of that process, for modules that read some when they are imported. If a module cannot
    be imported there, the programs that need it import it themselves, and fail.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *modules])
        before = {**os.environ}
        os.environ.update(environment or {})
        try:
            forkserver.ensure_running()  # which goes on importing
        finally:
            for name in environment or {}:
                del os.environ[name]
            os.environ.update(before)

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """Start ``python -m module arguments`` in a session of its own. environment: all of its variables; ``log`` gets
        what it prints."""
        process = self._context.Process(target=_become, args=(module, [*arguments], {**environment}, str(log)))
        process.start()
        return Fork(process)


class Fork:
    """A fork is a started program. Its members are those of ``subprocess.Popen`` with the same names."""

    def __init__(self, process: multiprocessing.context.ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit status, -N after signal N, None as long as it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return ``returncode``."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return ``returncode``. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()


def _end_with_maker() -> None:
    """Wait until the process that has asked for this one ends in any way, and end this one as ``tied`` does."""
    maker = multiprocessing.parent_process()
    assert maker is not None
    maker.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _become(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Go on as a program."""
    import atexit
    import runpy

    os.setsid()
    threading.Thread(target=_end_with_maker, daemon=True).start()
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.close(sink)
    forget(environment)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it runs as __main__
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
