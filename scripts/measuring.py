"""This module holds what the measuring scripts share: memory of processes, rows of Markdown."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable
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
