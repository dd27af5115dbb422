"""This module makes realcode's policy: 2.3 million parameters, with heads that look up from the start, and a tokenizer.

Each operator is a token of its own. The tokenizer's BPE is trained on drills, so names that only held-out packages have
are spelled in more pieces.

To repeat a word of a file, a network needs two heads in successive layers (induction heads): the first notes at each
token which token came before it; the second finds by these notes a token that followed an earlier copy of the one said
last, and says it. An earlier version with random weights had learned no look-up after 130 updates. So such heads are
there from the beginning, and all weights are trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.quickstart.policy import make_policy, make_tokenizer

_HEAD = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    # Small, so that what the heads below find is not drowned.
    "initializer_range": 0.03,
    # A head that compares tokens needs dimensions that hardly turn over a file's length: with this value three quarters
    # of them do, with the usual 1e4 a third.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}
# A line break, a tag, an operator or keyword with the spaces around it, a word, a digit, indentation, other
# punctuation with the space after it. A space is seldom a token of its own: looking for what followed the last token
# would find everything that follows a space.
_KEYWORDS = (
    "(?:if|elif|while) not|is not|is|not in|in|and|or|not|if|elif|else|for|while|return|lambda|yield|raise|import|from|"
    "as|def|class|with|assert|del|except|try"
)
_SIGNS = r"[^\sA-Za-z0-9_<>+*/%=!-]"
PIECES = (
    rf"\n|</?[A-Za-z_][^<>\n]*>| (?:<=|>=|==|!=|\+=|-=|//|\*\*|[<>+*/%=-]) |<=|>=|==|!=|//|\*\*|[<>+*/%=-]"
    rf"| ?\b(?:{_KEYWORDS})\b ?|[A-Za-z_]+|[0-9]|[^\S\n]+(?=\S)|{_SIGNS}*[,:] |{_SIGNS}+|[^\S\n]+|!"
)
# The output layer begins as this many times the embedding (verl's weight sync on a CPU forbids sharing it). So what
# attention brings from another place can be said again without being learned for each token by itself.
_OUTPUT = 0.1
_SHARP = 1.5  # scale of queries and keys, each; with 1.0 attention to one of 500 tokens is weak
_GAIN = 3.0  # of what the heads below write
_FAST = 10  # of 32 pairs of dimensions; these turn by more than a hundredth per token
_TURNS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)  # weights of the fastest-turning dimensions in telling "one before"


def make(out: Path, seed: int, texts: Iterable[str]) -> None:
    """Write the model directory ``out``. texts: what the tokenizer is trained on."""
    tokenizer = make_tokenizer(texts, pieces=PIECES)
    make_policy(out, seed, head_dim=_HEAD, tokenizer=tokenizer, shape=SHAPE, output=_OUTPUT, begin=look_up)


def look_up(model: Any) -> None:
    """Give a random Qwen3 induction heads: in its first layer a head that notes at each token the one before, in its
    second two that find the place whose note is the token said last and say the token there; and others that say
    whatever they look at.

    The hidden state has a part for the token itself, and one, as wide as a head, for the token before.
    """
    import torch

    embedding = model.get_input_embeddings().weight
    first = model.model.layers[0].self_attn
    own = embedding.shape[1] - _HEAD  # dimensions of the first part; the last of them is the same for all tokens
    names = own - 1
    theta = model.config.rope_parameters["rope_theta"]
    turns = theta ** (-torch.arange(_HEAD // 2) / (_HEAD // 2))  # per token
    strength = torch.zeros(_HEAD // 2)
    strength[: len(_TURNS)] = torch.tensor(_TURNS).sqrt()
    slow = (torch.arange(_HEAD) % (_HEAD // 2) >= _FAST)[:, None]  # dimensions that tell tokens apart at any distance
    eye = torch.eye(_HEAD)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(_SHARP)
            layer.self_attn.k_norm.weight.fill_(_SHARP)
        embedding[:, own:], embedding[:, names] = 0.0, 2.0
        short = torch.linalg.qr(torch.randn(names, names))[0][:_HEAD]  # a token's name in as few numbers as a head has
        head = slice(0, _HEAD)
        for matrix in (first.q_proj, first.k_proj, first.v_proj):
            matrix.weight[head] = 0.0
        first.q_proj.weight[head, names] = torch.cat([strength, 0 * strength])
        first.k_proj.weight[head, names] = torch.cat([strength * turns.cos(), strength * turns.sin()])
        first.v_proj.weight[head, :names] = short
        first.o_proj.weight[:, head] = 0.0
        first.o_proj.weight[own:, head] = _GAIN * eye
        for layer, number in ((layer, number) for layer in (1, 2) for number in range(4)):  # each says half of the name
            attention = model.model.layers[layer].self_attn
            head = slice(number * _HEAD, (number + 1) * _HEAD)
            half = torch.arange(number % 2 * _HEAD, min((number % 2 + 1) * _HEAD, names))
            place = half + (number - number % 2) * _HEAD
            looks_up = layer == 1 and number < 2  # what the others look for is learned
            attention.v_proj.weight[head], attention.o_proj.weight[:, head] = 0.0, 0.0
            attention.v_proj.weight[place, half] = 1.0
            attention.o_proj.weight[half, place] = _GAIN if looks_up else 1.0
            if looks_up:
                attention.q_proj.weight[head], attention.k_proj.weight[head] = 0.0, 0.0
                attention.q_proj.weight[head, :names] = slow * short
                attention.k_proj.weight[head, own:] = slow * eye
