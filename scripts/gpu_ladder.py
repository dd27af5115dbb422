"""Prove on one GPU, rung by rung, what could not be proved without one; a rung has five minutes, two have eight.

    python scripts/gpu_ladder.py [key=value ...]                 # goes on where it was; keys are for all training runs
    python scripts/gpu_ladder.py --only grpo --again             # this one, even if its result is there
    python scripts/gpu_ladder.py --device cpu                    # the same way with a toy, without a GPU

OUT/ladder.json and OUT/ladder.md have a table of what was expected and what was seen, written after every rung.
docs/planning.md says what each rung shows and what to do when it fails. Exit code: 0 nothing failed, 1 a rung failed,
2 it cannot start.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rl.config.compose import NO_REPORTS
from rl.run.programs import end_processes, last_lines, tied
from rollout import files, program
from rollout.dotted import attribute

HERE = Path(__file__).resolve().parent
# A GPU is lent by the minute; two cores without one take longer for the same rungs.
LIMIT_S = {"cuda": 300.0, "cpu": 1500.0}
NEEDS_GPU = "not measured: needs a GPU"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline", **NO_REPORTS}
_SET_CHILD_SUBREAPER = 36  # prctl


@dataclass(frozen=True)
class Rung:
    """A rung is one thing to prove. ``function`` ("module:name") takes a ``Place`` and yields ``Figure``s; it runs in a
    process of its own, for at most ``limits`` times the ladder's limit."""

    name: str
    expects: str
    function: str
    needs_gpu: bool = False
    limits: float = 1.0


RUNGS = (
    Rung("versions", "the pinned versions, with which the engine-free unit tests pass", "ladder_rungs:versions"),
    Rung("engine", "vLLM alone: its cache is as large as planned, it sleeps and wakes up", "ladder_rungs:engine"),
    Rung("grpo", "toy GRPO: engine and trainer agree, before and after a weight sync", "ladder_rungs:grpo"),
    Rung("size", "4 billion random weights: memory and seconds beside rl.plan", "ladder_rungs:size", limits=1.6),
    Rung("lora", "adapters reach the engine", "ladder_rungs:lora", needs_gpu=True),
    Rung("experts", "4 layers of 128 experts: do engine and trainer route alike?", "ladder_rungs:experts", limits=1.6),
    Rung("hybrid", "toy GRPO of a Qwen3.5: packed rows of linear attention are the engine's", "ladder_rungs:hybrid"),
    Rung("episodes", "the rate of whole episodes beside the engine's own", "ladder_rungs:episodes"),
    Rung("ahead", "toy GRPO beside episodes that outlive updates (colocate_async)", "ladder_rungs:ahead"),
)


@dataclass(frozen=True)
class Place:
    """A place is where a rung runs: the device ("cuda" or "cpu"), a directory of its own, one that all rungs share, and
    more keys for its training runs."""

    device: str
    directory: str
    shared: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ladder:
    """A ladder keeps its results in ``out`` and all else in ``work``."""

    rungs: Sequence[Rung]
    device: str
    out: Path
    work: Path
    keys: tuple[str, ...] = ()
    limit_s: float = 300.0

    def results(self) -> dict[str, Any]:
        """Return the results so far, by rung. Raises ValueError if they are of another device."""
        file = self.out / "ladder.json"
        found = json.loads(file.read_text()) if file.exists() else {"device": self.device, "rungs": {}}
        if found["device"] != self.device:
            raise ValueError(f"{file} has results of device {found['device']}; give another --out")
        return found["rungs"]

    def climb(self, only: Sequence[str] = (), again: bool = False, budget_s: float = float("inf")) -> dict[str, Any]:
        """Run the rungs that have no result (with ``again`` all) and return all results. ``only``: no others. A rung is
        started only while its whole time limit is left of ``budget_s``."""
        began, results = time.monotonic(), self.results()
        self.write(results)
        for rung in self.rungs:
            if (only and rung.name not in only) or (rung.name in results and not again):
                continue
            if self.device == "cpu" and rung.needs_gpu:
                results[rung.name] = {"state": NEEDS_GPU, "seconds": 0.0, "figures": [], "log": []}
            elif time.monotonic() - began + rung.limits * self.limit_s > budget_s:
                print(f"{rung.name}: not started, too little is left of the budget", flush=True)
                break
            else:
                print(f"{rung.name}: {rung.expects}", flush=True)
                results[rung.name] = self.run(rung)
            print(f"{rung.name}: {results[rung.name]['state']}", flush=True)
            self.write(results)
        return results

    def run(self, rung: Rung) -> dict[str, Any]:
        """Run one rung to its end or to the time limit; return its result. No process of it is left."""
        directory, log = self.work / rung.name, self.work / f"{rung.name}.log"
        shutil.rmtree(directory, ignore_errors=True)
        for made in (directory, self.work / "shared"):
            made.mkdir(parents=True, exist_ok=True)
        place = Place(self.device, str(directory), str(self.work / "shared"), self.keys)
        command = [sys.executable, str(HERE / "gpu_ladder.py"), "--child", rung.function, json.dumps(asdict(place))]
        paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        began, state, limit_s = time.monotonic(), "passed", rung.limits * self.limit_s
        # Short, because sockets are below it; random weights go there too, and do not outlive the rung.
        with tempfile.TemporaryDirectory(prefix="gl-", ignore_cleanup_errors=True) as scratch, open(log, "wb") as out:
            environment["TMPDIR"] = scratch
            process = subprocess.Popen(tied(*command), env=environment, stdout=out, stderr=out, start_new_session=True)
            try:
                if process.wait(limit_s):
                    state = f"failed: it ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                state = f"failed: not done after {limit_s:g} s"
            finally:
                _end(process)
        file = directory / "figures.json"
        figures = json.loads(file.read_text()) if file.exists() else []
        if state == "passed" and any(figure["ok"] is False for figure in figures):
            state = "failed: not as expected"
        lines = [] if state == "passed" else last_lines(log.read_text(errors="replace"), 30).splitlines()
        seconds = round(time.monotonic() - began, 1)
        return {"state": state, "seconds": seconds, "figures": figures, "log": lines}

    def write(self, results: dict[str, Any]) -> None:
        """Write ladder.json and ladder.md, each in one step."""
        self.out.mkdir(parents=True, exist_ok=True)
        found = {"device": self.device, "date": time.strftime("%Y-%m-%d"), "machine": _machine(), "rungs": results}
        files.write(self.out / "ladder.json", json.dumps(found, indent=1))
        files.write(self.out / "ladder.md", f"{found['date']}, {found['machine']}\n\n{self.table(results)}")

    def table(self, results: dict[str, Any]) -> str:
        """Return the table in Markdown, with the last lines of the logs of failed rungs below it."""
        rows = [("rung", "what", "expected", "seen", "as expected"), ("---",) * 5]
        ends = []
        for number, rung in enumerate(self.rungs, 1):
            result = results.get(rung.name)
            state, seconds = (result["state"], result["seconds"]) if result else ("not run yet", 0)
            took = f"{seconds:.0f} s" if seconds else ""
            rows.append((f"**{number} {rung.name}**", rung.expects, "", took, f"**{state}**"))
            for figure in result["figures"] if result else []:
                told = {True: "yes", False: "**no**", None: ""}[figure["ok"]]
                rows.append(("", figure["what"], figure["expected"], figure["seen"], told))
            if result and result["log"]:
                ends += [f"\n{rung.name}, the end of its log:\n", *(f"    {line}" for line in result["log"])]
        lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in rows]
        return "\n".join([*lines, *ends]) + "\n"


def _machine() -> str:
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return f"Python {platform.python_version()}, {os.cpu_count()} cores of {platform.machine()}, {gpu or 'no GPU'}"


def _end(process: subprocess.Popen) -> None:
    """End a rung's process, which ends all below it; if it cannot, end them here."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        below = psutil.Process(process.pid).children(recursive=True)
        for one in [psutil.Process(process.pid), *below]:
            one.kill()
        process.wait()


def child(function: str, place: Place) -> None:
    """Run one rung in this process, write each of its figures when it is there, and end all processes below."""
    # What a killed program leaves becomes a child of this process and not of init.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    figures: list[dict[str, Any]] = []
    try:
        for figure in attribute(function)(place):
            figures.append(asdict(figure))
            files.write(Path(place.directory) / "figures.json", json.dumps(figures))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while below := psutil.Process().children(recursive=True):
            end_processes(below)


def main() -> int:
    """Climb as the command line asks; return the exit code."""
    if sys.argv[1:2] == ["--child"]:
        given = json.loads(sys.argv[3])
        child(sys.argv[2], Place(**{**given, "keys": tuple(given["keys"])}))
        return 0
    parser = program.parser("python scripts/gpu_ladder.py", __doc__)
    parser.add_argument("--device", choices=tuple(LIMIT_S), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("outputs/ladder"), help="for ladder.json and ladder.md")
    parser.add_argument("--work", type=Path, help="for logs and all else (OUT/work); results do not depend on it")
    names = [rung.name for rung in RUNGS]
    parser.add_argument("--only", action="append", default=[], metavar="RUNG", choices=names, help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing that may take longer")
    parser.add_argument("keys", nargs="*", help="overrides of the config of all training runs")
    options = parser.parse_args()
    if options.device == "cuda" and shutil.which("nvidia-smi") is None:
        return program.failed("gpu_ladder: no GPU here (--device cpu goes the same way with a toy)", 2)
    out, work = options.out.resolve(), (options.work or options.out / "work").resolve()
    ladder = Ladder(RUNGS, options.device, out, work, tuple(options.keys), LIMIT_S[options.device])
    try:
        results = ladder.climb(options.only, options.again, options.budget_s)
    except ValueError as error:
        return program.failed(f"gpu_ladder: {error}", 2)
    print(f"\n{ladder.table(results)}")
    return int(any(result["state"].startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
