"""Keep the garbage collector from stopping all sessions at once.

A full collection visits every item of every container. It would stop all sessions for a tenth of a second and more, to
find hardly anything: numbers are no part of a cycle, what was imported stays, and a session has no cycles
(``tests/unit/proxy/test_garbage.py``).
"""

from __future__ import annotations

import ctypes
import gc
from typing import TypeVar

Numbers = TypeVar("Numbers", list[int], list[float])

_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def untracked(numbers: Numbers) -> Numbers:
    """Return the same list, which the collector does not visit from now on. It may grow, but by numbers only.

    It is freed as before, when nobody refers to it any more.
    """
    _untrack(numbers)
    return numbers


def keep_imports() -> None:
    """Collect garbage, then hide what remains from the collector: a million objects that imports have made."""
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Collect less often than Python does by itself: fully only once per million objects that are not freed.

    Even a young collection visits the messages of all requests in progress: by default, a twentieth of all time.
    """
    gc.set_threshold(3_000, 3, 100)
