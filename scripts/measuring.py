"""The measuring scripts share this: a training run with its peaks of memory, and tables of Markdown."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from rl.metrics.episodes import read_jsonl
from rl.run.programs import last_lines

ROOT = Path(__file__).resolve().parents[1]
GIB, MIB = 2**30, 2**20
# verl's worker of trainer and engine adapter, as Ray names its process.
TRAINER = "WorkerDict"


def row(*cells: Any) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def head(*cells: str) -> None:
    """Print the head of a Markdown table."""
    print()
    row(*cells)
    row(*["---"] * len(cells))


def compare(what: str, planned: float, measured: float, unit: float = 1) -> None:
    """Print a row of what, plan, measured (0: it was not) and error; ``unit`` is the number of bytes that the table
    counts in."""
    digits = 1 if unit == GIB else 0
    numbers = [f"{number / unit:,.{digits}f}" for number in (planned, measured)]
    row(what, *numbers, f"{100 * (planned / measured - 1):+.1f} %" if measured else "not measured")


def tensors(ledger: Any) -> int:
    """Return the bytes of the trainer's tensors in a phase of a plan (``rl.plan.memory.Ledger``)."""
    return sum(size for name, size in ledger.parts.items() if "assumed" not in name and "engine" not in name)


def gpu_used() -> int:
    """Return the bytes that are taken of the fullest GPU; 0 without a GPU."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return 0
    query = [smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return max((int(mib) * MIB for mib in said if mib.isdigit()), default=0)


def watch(process: subprocess.Popen) -> Counter[str]:
    """Wait for a process to end and return peaks of memory in bytes: what each process below it has to itself, named by
    command and id, and what is taken of the fullest GPU, named "GPU"."""
    peaks = Counter[str]()
    root = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(0.1)
        found = {"GPU": gpu_used()}
        with contextlib.suppress(psutil.Error):
            for child in root.children(recursive=True):
                with contextlib.suppress(psutil.Error, IndexError):
                    used = child.memory_info()
                    found[f"{child.cmdline()[0]} {child.pid}"] = used.rss - used.shared
        peaks |= Counter(found)
    return peaks


def peak(peaks: Counter[str], name: str) -> int:
    """Return the highest peak of a name that contains ``name``; 0 if there was none."""
    return max((size for what, size in peaks.items() if name in what), default=0)


def train(directory: Path, *keys: str) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Run ``rl.train`` in ``directory`` without validation and return its peaks and the metrics of its steps.

    Raises:
        RuntimeError: it failed; the message is the end of its log.
    """
    command = [sys.executable, "-m", "rl.train", *keys, f"run.dir={directory}"]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1", "plan.check=false"]
    # Freed memory goes back at once: malloc would keep blocks of up to 32 MiB, and the peaks would not be tensors'.
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)})
    peaks = watch(process)
    if process.returncode:
        log = directory / "run.log"
        said = last_lines(log.read_text(errors="replace"), 30) if log.exists() else "rl.train did not start"
        raise RuntimeError(said)
    return peaks, [line for line in read_jsonl(directory / "metrics.jsonl") if "timing_s/step" in line]
