"""Talk to the bench, as all gateways' programs do: it asks by lines of standard input, and reads lines with @.

``open``: begin an episode; the answer is the URL that the agent is told, and its key. ``rows``: what would be trained
on of that episode, a list of ``row``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence


def row(ids: Sequence[int], mask: Sequence[int | bool], logprobs: Sequence[float] = ()) -> list[list]:
    """Return a training row: its ids, whether each is trained on, and the log-probabilities of those that are.

    ``logprobs``: of all ids, empty if there are none.
    """
    return [[*ids], [int(one) for one in mask], [known for known, said in zip(logprobs, mask, strict=False) if said]]


async def answer(opened: Callable[[], Awaitable[list[str]]], rows: Callable[[], Awaitable[list]]) -> None:
    """Answer until standard input ends."""
    print('@"ready"', flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print("@" + json.dumps(await (opened if line == "open\n" else rows)()), flush=True)
