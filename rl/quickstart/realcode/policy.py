"""This module makes the policy of realcode: 2.6 million random parameters, and a tokenizer for Python.

Each operator is a token of its own. The tokenizer's BPE is trained on drills, so names that only held-out packages have
are spelled in more pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.quickstart.policy import make_policy, make_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "initializer_range": 0.08,
}
# A line break, a tag, an operator with the space before it, a word with it, a digit, indentation, other punctuation.
_PIECES = (
    r"\n|</?[A-Za-z_][^<>\n]*>| ?(?:<=|>=|==|!=|\+=|-=|//|\*\*|[<>+*/%=-])| ?[A-Za-z_]+| ?[0-9]"
    r"|[^\S\n]+(?=\S)| ?[^\sA-Za-z0-9_<>+*/%=!-]+|[^\S\n]+|!"
)
# The output layer begins as this many times the embedding (verl's weight sync on a CPU forbids to share it). So what
# attention brings from another place can be said again without being learned for each token by itself.
_OUTPUT = 0.1


def make(out: Path, seed: int, texts: Iterable[str]) -> None:
    """Write the model directory ``out``. texts: what the tokenizer is trained on."""
    tokenizer = make_tokenizer(texts, pieces=_PIECES)
    make_policy(out, seed, tokenizer=tokenizer, shape=SHAPE, output=_OUTPUT)
