"""Add an adapter (LoRA) to the weights that it adapts.

    python -m rl.sft.adapter BASE ADAPTER OUT

BASE is the directory or hub name of a model, ADAPTER a directory in PEFT's format; OUT becomes a model directory with
the base's precision, config and tokenizer. Exit status: 0 done, 1 failed, 2 OUT is there already.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl.config.compose import CPU_ENVIRONMENT
from rl.run.programs import end_of_log
from rl.run.weights import add_adapter, run_merger
from rollout import files, program


def merge_adapter(base: str, adapter: Path, out: Path) -> None:
    """Write the model ``out``: ``base`` with an adapter added to its weights. Raises FileExistsError."""
    from transformers import AutoTokenizer

    with files.making(out) as new:
        add_adapter(base, adapter, new)
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
        tokenizer.save_pretrained(new)


def split_adapter(sharded: Path, base: str, out: Path, log: Path) -> None:
    """Make ``out/adapter`` of verl's checkpoint of an adapted model, and ``out/model``, which has it added to ``base``.

    log: what the programs print is appended to it. Raises RuntimeError and ServeError.
    """
    merged = out / ".merged"
    shutil.rmtree(merged, ignore_errors=True)
    try:
        if not (out / "adapter").exists():
            run_merger(sharded, merged, log)
            # verl writes the base's name as it was given to it
            about = merged / "lora_adapter" / "adapter_config.json"
            files.write(about, json.dumps(json.loads(about.read_text()) | {"base_model_name_or_path": base}, indent=1))
            (merged / "lora_adapter").rename(out / "adapter")
        merge_apart(base, out / "adapter", out / "model", log)
    finally:
        shutil.rmtree(merged, ignore_errors=True)


def merge_apart(base: str, adapter: Path, out: Path, log: Path) -> None:
    """Do ``merge_adapter`` in a process of its own, whose memory is free afterwards. Raises RuntimeError."""
    command = [sys.executable, "-m", "rl.sft.adapter", base, str(adapter), str(out)]
    with open(log, "ab") as sink:
        done = subprocess.run(command, env={**os.environ, **CPU_ENVIRONMENT}, stdout=sink, stderr=sink)
    if done.returncode:
        raise RuntimeError(f"the adapter cannot be merged, see {log}: {end_of_log(log)}")


def main() -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.sft.adapter", __doc__)
    for name in ("base", "adapter", "out"):
        parser.add_argument(name, metavar=name.upper())
    given = parser.parse_args()
    try:
        merge_adapter(given.base, Path(given.adapter), Path(given.out))
    except (OSError, ValueError) as error:
        return program.failed(f"error: {' '.join(str(error).split())}", 2 if isinstance(error, FileExistsError) else 1)
    return 0


if __name__ == "__main__":
    program.end(main)
