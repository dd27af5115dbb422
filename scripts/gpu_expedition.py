"""Train a real model on a lent GPU by the minute: what docs/planning.md#an-expedition describes.

    python scripts/gpu_expedition.py reference WORK --rows N         # before, on a CPU: log-probabilities in fp32
    python3 scripts/gpu_expedition.py install PARTS WORK             # on the GPU machine, after each part
    ENV/bin/python scripts/gpu_expedition.py run WORK --until T      # what has no result yet; T: when GRPO stops
    ENV/bin/python scripts/gpu_expedition.py look WORK OUT           # at any time: what there is, in a few files

WORK/small has the model without weights, tasks and an expert's episodes (rollout.collect expert), WORK/weights the
packed weights (scripts/gguf_weights.py). Each result is in WORK/results.json as soon as it is known. A step that fails
does not stop those that do not need it, and the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENV = Path("/tmp/env")
CONTEXT = 10240
EXPERIMENT = [
    "+experiment=qwen2_5_coder_0_5b",
    "trainer.logger=[console]",
    "plan.check=false",
    # flash-attn has no wheel that can be carried.
    "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_4",
    # The machine may be gone any minute.
    "trainer.save_freq=2",
    "trainer.total_training_steps=400",
    "ray_kwargs.ray_init.num_cpus=64",
    "+ray_kwargs.ray_init.object_store_memory=2000000000",
]
SAMPLES = 8
_PIECE = 16_000_000
_SHARE = '--gpu-memory-utilization,"0.18"'


def offline() -> dict[str, str]:
    """Return the variables of all programs: nothing can be fetched or reported."""
    from gpu_ladder import OFFLINE

    # FlashInfer's sampler would be compiled for two minutes, and nothing here cuts probabilities.
    return {**OFFLINE, "PYTHONUNBUFFERED": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


class Expedition:
    """An expedition keeps everything below ``work``."""

    def __init__(self, work: Path) -> None:
        self.work, self.began = work, time.time()
        self.base, self.sft, self.grpo = work / "base", work / "sft", work / "grpo"
        train, self.heldout = (work / "small" / "tasks" / f"{name}.parquet" for name in ("train", "heldout"))
        self.tasks = [f"data.train_files=[{train}]", f"data.val_files=[{self.heldout}]"]
        self.file, self.lock = work / "results.json", threading.Lock()
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        (work / "log").mkdir(exist_ok=True)

    def step(self, name: str, function: Callable[[], Any]) -> bool:
        """Call ``function`` unless the step is done; keep what it returns and tell whether there is a result."""
        from rollout import files

        if "error" in self.results.get(name, {"error": ""}):
            began = time.time()
            self.say(f"{name} ...")
            try:
                found = {"result": function()}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            found |= {"seconds": round(time.time() - began, 1), "at": round(time.time() - self.began, 1)}
            with self.lock:
                self.results[name] = found
                files.write(self.file, json.dumps(self.results, indent=1), synced=True)
            self.say(f"{name}: {json.dumps(found)[:600]}")
        return "error" not in self.results[name]

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.time() - self.began:6.1f}] {text}", flush=True)

    def program(
        self, name: str, *command: str, until: Callable[[], float] | None = None, good: Sequence[int] = (0,)
    ) -> str:
        """Run a Python program to its end and return the end of its output, which is in WORK/log.

        until: gives the time (Unix) at which it gets SIGUSR1, upon which rl.train ends with a checkpoint.
        """
        log = self.work / "log" / f"{name}.log"
        with log.open("ab") as out:
            environment = {**os.environ, **offline()}
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=out, stderr=out)
            while until is not None and process.poll() is None and time.time() < until():
                time.sleep(1)
            if until is not None and process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # once: a second one would end it without a checkpoint
            process.wait()
        end = log.read_text(errors="replace")[-1500:]
        if process.returncode not in good:
            raise RuntimeError(f"{name} ended with {process.returncode}: {end}")
        return end[-600:]

    def until(self) -> float:
        """Return when GRPO is to stop; the file may be changed while it runs."""
        return float((self.work / "until").read_text())

    def run(self) -> None:
        """Make all steps that have no result."""
        self.step("machine", machine)
        if not self.step("weights", self.make_base):
            return
        with ThreadPoolExecutor() as beside:
            tuned = beside.submit(self.step, "sft", self.fine_tune)
            # One engine after the other: one that measures its memory fails if another gives some back meanwhile.
            self.step("agreement", self.agreement)
            self.step("evaluate_base", lambda: self.evaluate("base", self.base, 2))
            if not tuned.result():
                return
            grpo = self.step("grpo", lambda: self.program("grpo", *self.training(), until=self.until, good=(0, 75)))
            last = [
                beside.submit(self.step, "evaluate_warm", lambda: self.evaluate("warm", self.sft, SAMPLES)),
                beside.submit(self.step, "audit", lambda: self.program("audit", "-m", "rollout.audit", str(self.grpo))),
                beside.submit(self.step, "report", lambda: self.program("report", "-m", "rl.report", str(self.grpo))),
            ]
            if grpo:
                last += [beside.submit(self.step, "evaluate_grpo", lambda: self.evaluate("grpo", self.grpo, SAMPLES))]
            for one in last:
                one.result()
        if not grpo:
            return
        pair = [str(self.work / "evaluate" / name) for name in ("warm", "grpo")]
        self.step("compare", lambda: self.program("compare", "-m", "rl.evaluate", "compare", *pair))
        self.step("rate", self.rate)

    def training(self) -> list[str]:
        """Return the command of GRPO."""
        model = f"actor_rollout_ref.model.path={self.base}"
        return ["-m", "rl.train", *EXPERIMENT, *self.tasks, model, f"policy={self.sft}", f"run.dir={self.grpo}"]

    def make_base(self) -> str:
        """Make the model's directory."""
        shutil.copytree(self.work / "small" / "model", self.base, dirs_exist_ok=True)
        packed = next((self.work / "weights").iterdir())
        return self.program("weights", "scripts/gguf_weights.py", "unpack", str(packed), str(self.base))

    def fine_tune(self) -> Any:
        """Imitate the scripted episodes."""
        warm = self.work / "small" / "warm"
        model = [f"actor_rollout_ref.model.path={self.base}", f"run.dir={self.sft}", f"data=[{warm}]"]
        self.program("sft", "-m", "rl.sft", *EXPERIMENT, *self.tasks, *model)
        lines = [json.loads(line) for line in (self.sft / "sft_metrics.jsonl").read_text().splitlines()]
        return {"updates": len(lines), "first": lines[0], "last": lines[-1]}

    def evaluate(self, name: str, policy: Path, samples: int) -> Any:
        """Play the held-out tasks with a policy."""
        out = self.work / "evaluate" / name
        keys = EXPERIMENT[:1] if policy == self.base else []  # the others are runs, with configs of their own
        keys += [f"policy={policy}", f"tasks={self.heldout}", f"samples={samples}", f"out={out}"]
        keys += ["sandbox.concurrency=40", f"serve.args=[{_SHARE}]"]
        self.program(f"evaluate_{name}", "-m", "rl.evaluate", *keys, good=(0, 1))
        found = json.loads((out / "results.json").read_text())
        return {key: value for key, value in found.items() if not isinstance(value, (list, dict)) or len(value) < 20}

    def agreement(self) -> Any:
        """Compare the log-probabilities of fixed rows: vLLM and transformers in bf16 on this GPU, fp32 from a CPU."""
        import torch
        from transformers import AutoModelForCausalLM

        from rl.run.vllm_server import SERVED_AS, vllm_server

        reference = json.loads((self.work / "small" / "reference.json").read_text())
        engine = []
        os.environ.update(offline())
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
        trainer = [_scored(model, row["ids"]) for row in reference]
        del model
        torch.cuda.empty_cache()
        arguments = ["--gpu-memory-utilization=0.12", f"--max-model-len={CONTEXT}", "--enforce-eager"]
        with vllm_server(str(self.base), self.work / "log" / "agreement.log", *arguments) as server:
            for row in reference:
                asked = {"model": SERVED_AS, "prompt": row["ids"], "max_tokens": 1, "prompt_logprobs": 0}
                choice = _post(f"{server.url}/v1/completions", asked)["choices"][0]
                given = zip(choice["prompt_logprobs"][1:], row["ids"][1:], strict=True)
                engine.append([one[str(token)]["logprob"] for one, token in given])
        exact = [row["logprobs"] for row in reference]
        pairs = {"engine and fp32": (engine, exact), "transformers and fp32": (trainer, exact)}
        pairs["engine and transformers"] = (engine, trainer)
        return {"tokens": sum(map(len, exact)), **{name: _compared(*pair) for name, pair in pairs.items()}}

    def rate(self) -> str:
        """Measure whole episodes beside the engine's own rate."""
        model = [f"actor_rollout_ref.model.path={self.sft / 'model'}", "actor_rollout_ref.model.lora_rank=0"]
        keys = [*EXPERIMENT, *self.tasks, *model, "actor_rollout_ref.rollout.load_format=dummy"]
        keys += ["sandbox.concurrency=40"]
        return self.program("rate", "scripts/bench_gpu.py", "--episodes", "160", "--steps", "0", *keys)


def machine() -> dict[str, Any]:
    """Return what the machine is."""
    import importlib.metadata

    import torch

    names = ("torch", "vllm", "verl", "transformers", "ray", "numpy")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    found = {name: importlib.metadata.version(name) for name in names}
    return {"gpu": driver, "cuda": torch.cuda.is_available(), "cores": os.cpu_count(), **found}


def reference(work: Path, count: int) -> None:
    """Write WORK/small/reference.json: rows of the scripted episodes, and fp32 log-probabilities of WORK/base."""
    import torch
    from transformers import AutoModelForCausalLM

    from rl.sft.episodes import rows_of
    from rollout.records.reading import Reader

    records = list(Reader(work / "small" / "warm" / "episodes"))
    rows = [ids for one in records[:: max(1, len(records) // count)] for ids, _ in rows_of(one)][:count]
    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32, attn_implementation="sdpa")
    found = []
    for ids in rows:
        found.append({"ids": ids, "logprobs": [round(value, 5) for value in _scored(model, ids)]})
        print(len(found), len(ids), flush=True)
    (work / "small" / "reference.json").write_text(json.dumps(found))


def _scored(model: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after the first."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device=model.device)[:, None])
    return chosen[:, 0].tolist()


def _compared(ours: list[list[float]], exact: list[list[float]]) -> dict[str, float]:
    import numpy

    one, two = (numpy.concatenate([numpy.array(row) for row in rows]) for rows in (ours, exact))
    difference = two - one
    return {
        "correlation of probabilities": round(float(numpy.corrcoef(numpy.exp(one), numpy.exp(two))[0, 1]), 6),
        "mean |difference|": round(float(abs(difference).mean()), 5),
        "largest |difference|": round(float(abs(difference).max()), 4),
        "k3, nats per token": float(numpy.mean(numpy.exp(difference) - difference - 1)),
    }


def _post(url: str, body: dict[str, Any]) -> Any:
    import urllib.request

    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def install(parts: Path, work: Path) -> None:
    """Unpack what is there, and install it: ``ENV``, behind which the machine's own packages stay visible."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_pack.py"), "unpack", str(parts), str(work)])
    packages = ENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    bundled = packages / "claude_agent_sdk" / "_bundled" / "claude"
    if (work / "environment").exists() and not (packages / "given.pth").exists():
        _make_environment(work / "environment", packages)
    if (work / "claude").exists() and packages.exists() and not bundled.exists():
        bundled.parent.mkdir()
        shutil.copy2(work / "claude" / "claude", bundled)
    if (work / "small" / "bwrap").exists() and shutil.which("bwrap") is None:
        _install_bwrap(work / "small" / "bwrap")


def _make_environment(source: Path, packages: Path) -> None:
    import compileall

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(ENV)], check=True)
    shutil.copytree(source, packages, dirs_exist_ok=True)
    (finder,) = packages.glob("__editable___claude_code_rl*_finder.py")
    finder.write_text(finder.read_text().replace(next(iter(_mapped(finder))), str(ROOT)))
    compileall.compile_dir(packages, quiet=2, workers=os.cpu_count() or 1)
    (packages / "given.pth").write_text(sysconfig.get_path("purelib") + "\n")  # written last
    print("installed the environment", flush=True)


def _install_bwrap(carried: Path) -> None:
    """Install bubblewrap, and those of the libraries beside it that the machine lacks."""
    shutil.copy2(carried / "bwrap", "/usr/local/bin/bwrap")
    missing = subprocess.run(["ldd", "/usr/local/bin/bwrap"], capture_output=True, text=True).stdout
    for library in carried.glob("lib*"):
        if f"{library.name} => not found" in missing:
            shutil.copy2(library, "/usr/lib/x86_64-linux-gnu")
    subprocess.run(["ldconfig"])


def _mapped(finder: Path) -> set[str]:
    """Return the project's directory that an editable install's finder names."""
    line = next(line for line in finder.read_text().splitlines() if line.startswith("MAPPING"))
    return {os.path.dirname(path) for path in json.loads(line.partition(" = ")[2].replace("'", '"')).values()}


def look(work: Path, out: Path) -> None:
    """Write what there is to ``out``: results and logs, metrics, records of some episodes, the adapter in pieces."""
    out.mkdir(parents=True, exist_ok=True)
    grpo, keep = work / "grpo", [work / "results.json", *sorted((work / "log").glob("*"))]
    for directory in (grpo, work / "sft", *sorted((work / "evaluate").glob("*"))):
        keep += [path for path in sorted(directory.glob("*")) if path.is_file() and path.stat().st_size < 20e6]
    with tarfile.open(out / "results.tar.xz", "w:xz", preset=1) as tar:
        for path in keep:
            tar.add(path, path.relative_to(work))
    played = [sorted(work.glob(f"evaluate/{name}/episodes/*.cep"))[:3] for name in ("base", "warm", "grpo")]
    with tarfile.open(out / "records.tar", "w") as tar:
        size = 0
        for path in (path for some in (*played, sorted(grpo.glob("episodes/*.cep"))[-12:]) for path in some):
            if (size := size + path.stat().st_size) < 15e6:
                tar.add(path, path.relative_to(work))
    saved = sorted(grpo.glob("checkpoints/*/actor/**/adapter_model.safetensors"), key=lambda path: path.stat().st_mtime)
    for name, found in (("grpo", saved[-1:]), ("sft", sorted(work.glob("sft/adapter/adapter_model.safetensors")))):
        for path in found:
            data = path.read_bytes()
            for number, begin in enumerate(range(0, len(data), _PIECE)):
                (out / f"adapter-{name}.{number}").write_bytes(data[begin : begin + _PIECE])


def main() -> int:
    """Run the command and return its exit status."""
    about, plain = (__doc__ or "").replace("`", ""), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python scripts/gpu_expedition.py", description=about, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True)
    places_of = {"reference": ["work"], "install": ["parts", "work"], "run": ["work"], "look": ["work", "out"]}
    for name, places in places_of.items():
        one = commands.add_parser(name)
        for place in places:
            one.add_argument(place, type=Path)
        if name == "reference":
            one.add_argument("--rows", type=int, default=12)
        if name == "run":
            one.add_argument("--until", type=float, required=True, help="Unix time at which GRPO stops")
    args = parser.parse_args()
    if args.command == "reference":
        reference(args.work, args.rows)
    elif args.command == "install":
        install(args.parts, args.work)
    elif args.command == "run":
        (args.work / "until").write_text(str(args.until))
        Expedition(args.work).run()
    else:
        look(args.work, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
