"""Take long texts in pieces, between which other threads get their turn, and limit their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
# The size of a piece in characters.
PIECE = 1 << 16
# A text with more characters than this for each token of room is counted in pieces before it is encoded, because it
# hardly ever fits. If that count is less than a tenth over the limit, the exact count decides.
_SPARSE, _NEAR = 4, 1.1


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most ``PIECE`` characters."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def squeezed(text: str) -> str:
    """Return a text without white space and reminders, in linear time whatever the text is."""
    kept: list[str] = []
    at = 0
    while (start := text.find(_REMINDER, at)) >= 0 and (end := text.find(_REMINDER_END, start)) >= 0:
        kept.append(text[at:start])
        at = end + len(_REMINDER_END)
    kept.append(text[at:])
    return "".join("".join(piece.split()) for part in kept for piece in pieces(part))


class NoRoom(Exception):
    """A text has more tokens than there is room for; ``tokens`` of them were counted. Or nobody waits for the text."""

    def __init__(self, tokens: int = 0) -> None:
        super().__init__(f"more than {tokens} tokens" if tokens else "nobody waits for this text")
        self.tokens = tokens


@dataclass
class Room:
    """A Room is how many ``tokens`` may be encoded, and for how long: while ``wanted`` returns True.

    Near the limit, the exact count decides, because the pieces of a text may have more tokens than the whole.
    """

    tokens: int
    wanted: Callable[[], bool]

    def take(self, tokens: int) -> None:
        """Raise NoRoom if there is no room for so many tokens, or nobody waits for them."""
        if not self.wanted():
            raise NoRoom
        if tokens > _NEAR * self.tokens:
            raise NoRoom(tokens)

    def take_text(self, text: str, encode: Callable[[str], Sequence[int]]) -> None:
        """Raise NoRoom if there is no room for a text. No more of it is encoded than it takes to know that."""
        self.take(0)
        if len(text) > _SPARSE * self.tokens:
            tokens = 0
            for piece in pieces(text):
                self.take(tokens := tokens + len(encode(piece)))


_room: ContextVar[Room | None] = ContextVar("room", default=None)


@contextlib.contextmanager
def within(room: Room) -> Generator[None]:
    """Limit what is encoded in this block, in this thread, to ``room``."""
    before = _room.set(room)
    try:
        yield
    finally:
        _room.reset(before)


def here() -> Room | None:
    """Return the room for what is encoded now; None: it is not limited."""
    return _room.get()


# Each session uses one of these threads at a time, which the tokenizer lets run beside the event loop.
_threads = ThreadPoolExecutor(64, "proxy-encode")


async def in_thread(left: threading.Event, work: Callable[..., Any], *args: Any) -> Any:
    """Do work in a thread. If the caller is cancelled, set ``left``, and return only when the work has ended."""
    working = asyncio.get_running_loop().run_in_executor(_threads, work, *args)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        left.set()
        await asyncio.gather(working, return_exceptions=True)
        raise
