"""Workers that share work."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def workers(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` ``count`` times side by side. Raises what the first of them raised; it has ended the others."""

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
