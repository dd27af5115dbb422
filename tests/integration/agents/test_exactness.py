"""The bench of exactness still runs, and this project's own row in it is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.published import tokenizer_of

# vLLM wants a model's sizes, not its weights.
SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
}


def without_weights(place: Path) -> None:
    """Write a model's directory: Qwen3's published chat template, a tokenizer with its control tokens, a config."""
    tokenizer = tokenizer_of("Qwen3")
    tokenizer.save_pretrained(place)
    (place / "config.json").write_text(json.dumps({**SIZES, "vocab_size": len(tokenizer)}))


def test_our_own_row_is_exact(tmp_path: Path) -> None:
    without_weights(tmp_path)
    chosen = ("--systems", "this project", "--agents", "claude_code", "--scenes", "loop", "parallel")
    command = [sys.executable, "scripts/exactness/bench.py", "--model", str(tmp_path), *chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    episodes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(one["scene"], one["rows"], one["calls"]) for one in episodes] == [("loop", 1, 4), ("parallel", 1, 2)]
    assert all(one["once"] == one["sampled"] == one["logprobs"] for one in episodes)
    assert not any(one.get(name) for one in episodes for name in ("lost", "altered", "twice", "unread", "made up"))
