"""Do work in a process of its own, which is ended if it takes too long.

A regular expression may take time by the square or the cube of a log's length. While it searches, no other thread of
its process runs, and so no deadline ends it.
"""

from __future__ import annotations

import functools
import importlib
import math
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _context(loaded: tuple[str, ...]) -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*loaded])
    return context


def apart(seconds: float, loaded: tuple[str, ...], work: Callable[..., T], *args: Any) -> T:
    """Return ``work(*args)``; ``loaded``: modules that it needs, for which the time does not run. Blocks.

    Raises what ``work`` raises, TimeoutError if it takes longer or if its process is ended by a signal, as by the
    kernel for its memory, and RuntimeError if it ends otherwise or before the work has begun.
    """
    context = _context(loaded)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, seconds, loaded, work, args), daemon=True)
    process.start()
    theirs.close()
    begun = False
    try:
        begun = ours.recv()
        if not ours.poll(seconds):
            raise TimeoutError(f"it took longer than {seconds:g} s")
        done = ours.recv()
    except EOFError:
        process.join()
        if begun and (process.exitcode or 0) < 0:
            raise TimeoutError("its process was ended") from None
        raise RuntimeError(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(done, Exception):
        raise done
    return done


def _send(
    there: Connection, seconds: float, loaded: tuple[str, ...], work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for name in loaded:
        importlib.import_module(name)
    signal.alarm(math.ceil(seconds) + 1)  # the process that waits may have been killed
    there.send(True)
    try:
        there.send(work(*args))
    except Exception as error:
        there.send(error)
