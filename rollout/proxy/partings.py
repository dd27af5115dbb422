"""Cut spans between their blocks, where a client has joined a reply of ours with something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rollout.proxy.blocks import Block, blocks_of
from rollout.proxy.messages import Span, WireMessage

# Spans with more blocks than this are not searched for inserted ones; Claude Code's have a few.
_MAX_PARTED = 16


def cuts(span: Span) -> Iterator[tuple[Span, Span]]:
    """Yield every way to cut an assistant span between two blocks, the longest first part first."""
    blocks = _assistant_blocks(span)
    for end in range(len(blocks) - 1, 0, -1):
        yield _from_blocks(blocks[:end], assistant=True), _from_blocks(blocks[end:], assistant=True)


def pieces_of(span: Span, find: Callable[[Span], Any]) -> list[tuple[Span, Any]]:
    """Cut an assistant span where ``find`` knows a part of it; return the parts, each with what ``find`` returned."""
    blocks, parts, start, at = _assistant_blocks(span), list[tuple[Span, Any]](), 0, 0
    while at < len(blocks):
        known = ((end, find(_from_blocks(blocks[at:end], assistant=True))) for end in range(len(blocks), at, -1))
        end, found = next(((end, found) for end, found in known if found is not None), (at, None))
        if found is not None:
            parts += [(_from_blocks(blocks[start:at], assistant=True), None)] if start < at else []
            parts.append((_from_blocks(blocks[at:end], assistant=True), found))
            start = end
        at = max(end, at + 1)
    return parts + ([(_from_blocks(blocks[start:], assistant=True), None)] if start < len(blocks) else [])


def _assistant_blocks(span: Span) -> list[tuple[Any, Block]]:
    blocks = [("assistant", block) for message in span.messages() for block in blocks_of(message.content)]
    return blocks if len(blocks) <= _MAX_PARTED else []


def partings(span: Span) -> Iterator[tuple[Span, Span]]:
    """Yield every way to take a run of blocks out of a context span, as (the span without them, the blocks)."""
    blocks = [(message.role, block) for message in span.messages() for block in blocks_of(message.content)]
    last = len(blocks) if len(blocks) <= _MAX_PARTED else 0
    for end in range(last, 0, -1):
        for start in range(end - 1, -1, -1):
            if 0 < end - start < len(blocks):
                yield _from_blocks(blocks[:start] + blocks[end:]), _from_blocks(blocks[start:end])


def _from_blocks(blocks: list[tuple[Any, Block]], assistant: bool = False) -> Span:
    messages: list[WireMessage] = []
    for role, block in blocks:
        if messages and messages[-1].role == role and isinstance(messages[-1].content, list):
            messages[-1].content.append(block)
        else:
            messages.append(WireMessage(role, [block]))
    return Span.of(messages, assistant)
