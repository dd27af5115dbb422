"""Add an adapter (LoRA) to the weights that it adapts.

    python -m rl.tune.adapter BASE ADAPTER OUT

BASE is the directory or hub name of a model, ADAPTER a directory in PEFT's format; OUT becomes a model directory with
the base's precision, config and tokenizer. Exit status: 0 done, 1 failed, 2 OUT is there already.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config import CPU_ENVIRONMENT
from rl.run.programs import end_of_log
from rollout import files


def merge_adapter(base: str, adapter: Path, out: Path) -> None:
    """Write the model ``out``: ``base`` with an adapter added to its weights. Raises FileExistsError."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with files.making(out) as new:
        adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
        adapted.merge_and_unload().save_pretrained(new)
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
        tokenizer.save_pretrained(new)


def split_adapter(sharded: Path, base: str, out: Path, log: Path) -> None:
    """Make ``out/adapter`` of verl's checkpoint of an adapted model, and ``out/model``, which has it added to ``base``.

    log: what the programs print is appended to it. Raises RuntimeError.
    """
    merged = out / ".merged"
    shutil.rmtree(merged, ignore_errors=True)
    merge = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(sharded), "--target_dir"]
    try:
        if not (out / "adapter").exists():
            _run([*merge, str(merged)], log)
            # verl writes the base's name as it was given to it
            about = merged / "lora_adapter" / "adapter_config.json"
            files.write(about, json.dumps(json.loads(about.read_text()) | {"base_model_name_or_path": base}, indent=1))
            (merged / "lora_adapter").rename(out / "adapter")
        merge_apart(base, out / "adapter", out / "model", log)
    finally:
        shutil.rmtree(merged, ignore_errors=True)


def merge_apart(base: str, adapter: Path, out: Path, log: Path) -> None:
    """Do ``merge_adapter`` in a process of its own, whose memory is free afterwards. Raises RuntimeError."""
    _run(["rl.tune.adapter", base, str(adapter), str(out)], log)


def _run(module: Sequence[str], log: Path) -> None:
    with open(log, "ab") as sink:
        done = subprocess.run(
            [sys.executable, "-m", *module], env={**os.environ, **CPU_ENVIRONMENT}, stdout=sink, stderr=sink
        )
    if done.returncode:
        raise RuntimeError(f"the adapter cannot be merged, see {log}: {end_of_log(log)}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if len(arguments) != 3:
        print((__doc__ or "").strip())
        return 2
    base, adapter, out = arguments
    try:
        merge_adapter(base, Path(adapter), Path(out))
    except FileExistsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
