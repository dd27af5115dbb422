"""What the measuring scripts share: a vLLM server, memory of processes, rows of Markdown."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

GIB = 2**30
# verl's worker of trainer and engine adapter, as Ray names its process, and vLLM's process with model and cache.
TRAINER, ENGINE = "WorkerDict", "EngineCore"


def row(*cells: Any) -> None:
    print(f"| {' | '.join(str(c) for c in cells)} |", flush=True)


def error(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


def own(ledger: Any) -> int:
    """Bytes of the trainer's tensors in a phase of a plan (rl.plan.memory.Ledger)."""
    return sum(part.bytes for part in ledger.parts if "assumed" not in part.name and "engine" not in part.name)


@contextlib.contextmanager
def server(
    model: Path, log: Path, *arguments: str, extra: dict[str, str] | None = None, start_s: float = 600
) -> Iterator[str]:
    """A vLLM server of ``model``, named "policy", that answers: its URL. What it prints goes to ``log``.

    Raises:
        RuntimeError: it ended, or was not there after ``start_s`` seconds; the message is the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", *arguments]
    sockets = tempfile.mkdtemp(prefix="rl-")  # vLLM leaves them behind
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_RPC_BASE_PATH": sockets, **(extra or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + start_s
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text(errors="replace")[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(sockets)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


class Watch(threading.Thread):
    """Peaks of memory below a process, in bytes: ``processes``, what each has to itself, by name and id; ``gpu``, what
    is taken of the fullest GPU by anybody (0 without one). ``phase`` names what goes on now; a peak belongs to one."""

    def __init__(self, pid: int, phase: Callable[[], str] = str) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.phase = phase
        self.peaks: dict[tuple[str, str], int] = {}  # by phase and process
        self.gpu = 0
        self._smi = shutil.which("nvidia-smi")
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            now = self.phase()
            with contextlib.suppress(psutil.Error):
                for process in self.root.children(recursive=True):
                    with contextlib.suppress(psutil.Error, IndexError):
                        used, key = process.memory_info(), (now, f"{process.cmdline()[0]} {process.pid}")
                        self.peaks[key] = max(self.peaks.get(key, 0), used.rss - used.shared)
            if self._smi:
                query = [self._smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
                said = subprocess.run(query, capture_output=True, text=True).stdout.split()
                self.gpu = max([self.gpu, *(int(n) << 20 for n in said if n.isdigit())])

    def finish(self) -> None:
        self._ended.set()
        self.join()

    @property
    def processes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (_, process), peak in self.peaks.items():
            found[process] = max(found.get(process, 0), peak)
        return found

    def most(self, name: str, phase: str | None = None) -> int:
        """Of the largest process with ``name`` in its own, in one phase or in all. 0 if there was none."""
        found = (n for (when, key), n in self.peaks.items() if name in key and phase in (None, when))
        return max(found, default=0)
