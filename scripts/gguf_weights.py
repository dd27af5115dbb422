"""Make a Hugging Face model directory's weights of a Qwen2 GGUF, where no hub can be reached.

    python scripts/gguf_weights.py pack GGUF OUT.bin      # its tensors without output.weight: the embeddings are tied
    python scripts/gguf_weights.py unpack IN.bin DIR      # DIR/model.safetensors, bf16

`pack` is for carrying: a GGUF of a tied model holds the embeddings twice. Config, tokenizer and template come from
transformers (`AutoConfig` and `AutoTokenizer.from_pretrained(dir, gguf_file=NAME)`), with `tie_word_embeddings` true;
generation_config.json must name what ends a turn (`eos_token_id`). Needs the package gguf.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file

from rollout import program

_NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"blk\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blk\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"blk\.(\d+)\.attn_output\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"blk\.(\d+)\.ffn_(gate|up|down)\.weight": r"model.layers.\1.mlp.\2_proj.weight",
}


def pack(source: Path, target: Path) -> None:
    """Write the quantized tensors, after a head in JSON: name, type, shape and bytes of each."""
    import gguf  # ty: ignore[import-not-found]

    head, blobs = [], []
    for tensor in gguf.GGUFReader(source).tensors:
        if tensor.name == "output.weight":
            continue
        raw = numpy.ascontiguousarray(tensor.data).tobytes()
        head.append((tensor.name, int(tensor.tensor_type), [int(size) for size in reversed(tensor.shape)], len(raw)))
        blobs.append(raw)
    described = json.dumps(head).encode()
    with target.open("wb") as file:
        file.write(struct.pack("<I", len(described)) + described)
        file.writelines(blobs)


def unpack(source: Path, directory: Path) -> None:
    """Dequantize the packed tensors to bf16, and write them under the names that transformers has."""
    import gguf  # ty: ignore[import-not-found]
    from gguf.quants import dequantize  # ty: ignore[import-not-found]

    made: dict[str, torch.Tensor] = {}
    with source.open("rb") as file:
        head = json.loads(file.read(struct.unpack("<I", file.read(4))[0]))
        for name, kind, shape, size in head:
            raw = numpy.frombuffer(file.read(size), numpy.uint8)
            quantized = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[quantized]
            rows = raw.reshape(-1, shape[-1] // block * block_bytes)
            numbers = numpy.array(dequantize(rows, quantized)).reshape(shape)
            made[_name(name)] = torch.from_numpy(numbers).to(torch.bfloat16)
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in made.values()) / 1e6:.1f} million weights")


def _name(name: str) -> str:
    for pattern, replacement in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise SystemExit(f"the tensor {name} is not one of a Qwen2 model")


def main() -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python scripts/gguf_weights.py", __doc__)
    parser.add_argument("command", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    (pack if args.command == "pack" else unpack)(args.source, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
