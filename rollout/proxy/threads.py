"""Threads in which a session encodes large requests, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

# Each session uses one of these threads at a time, which the tokenizer lets run beside the event loop.
_threads = ThreadPoolExecutor(64, "proxy-encode")


async def in_thread(left: threading.Event, work: Callable[..., R], *args: Any) -> R:
    """Do work in a thread. If the caller is cancelled, set ``left``, and return only when the work has ended."""
    working = asyncio.get_running_loop().run_in_executor(_threads, work, *args)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        left.set()
        await asyncio.gather(working, return_exceptions=True)
        raise
