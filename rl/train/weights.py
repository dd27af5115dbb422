"""Weigh the rows of a batch: a share in its episode for each, and an advantage of its own if it has a reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl.train.groups import group_of, session_of

if TYPE_CHECKING:
    from tensordict import TensorDict


def row_weights(sessions: list[str], row_tokens: list[int]) -> list[float]:
    """Return the weights with which token means of rows add up to token means of episodes.

    Args:
        sessions: episode key of each row.
        row_tokens: number of sampled tokens of each row; 0 for padding.

    Returns:
        Per row, its share of the sampled tokens of its episode. The weights of an episode sum to 1.
    """
    totals: dict[str, int] = {}
    for session, tokens in zip(sessions, row_tokens, strict=True):
        totals[session] = totals.get(session, 0) + tokens
    return [t / totals[s] if t else 0.0 for s, t in zip(sessions, row_tokens, strict=True)]


def rejected(keys: list[str], row_tokens: list[int]) -> set[str]:
    """Return the episodes whose last row has no token left in the loss, because rejection sampling took it.

    verl reads an episode's advantage from the tokens of its last row (the main thread's); without any it is 0 for all.

    Args:
        keys: the rows' keys.
        row_tokens: number of tokens of each row that are left.
    """
    rows = sorted(zip(keys, row_tokens, strict=True), key=lambda row: place(row[0]))
    last = {session_of(key): tokens for key, tokens in rows}
    return {session for session, tokens in last.items() if not tokens}


def credited(data: TensorDict, extras: list[dict[str, Any]]) -> torch.Tensor:
    """Return the advantages of rows that have rewards of their own.

    GRPO's advantage is an episode's reward less the mean of its group. A row's is its own reward less that mean, so it
    differs by what its reward has more than the episode's (``credit`` in ``extras``).

    Args:
        data: columns advantages and response_mask, nested tensors with one row of tokens each.
        extras: the rows' extra fields.
    """
    rows = zip(data["advantages"].unbind(0), data["response_mask"].unbind(0), extras, strict=True)
    moved = [row + extra.get("credit", 0.0) * mask for row, mask, extra in rows]
    return torch.nested.as_nested_tensor(moved, layout=torch.jagged)


def left_out(advantages: Any, sessions: Sequence[str]) -> torch.Tensor:
    """Return the advantages of rows whose episodes are compared with the others of their group, without themselves.

    advantages: of GRPO without a standard deviation, a nested tensor. sessions: the rows' episodes.
    """
    size = Counter(map(group_of, {*sessions}))
    factors = [size[group_of(one)] / max(1, size[group_of(one)] - 1) for one in sessions]
    rows = [row * factor for row, factor in zip(advantages.unbind(0), factors, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def place(key: str) -> tuple[int, int]:
    """Return (session, row) of a row's key."""
    session, row = key.split("_")[-2:]
    return int(session), int(row)
