"""This module keeps long lists of numbers out of the garbage collector's way.

A full collection looks at every item of every list. Sessions hold millions of token ids, so it would stop all of them
for a tenth of a second and more, to find what cannot be there: a number is no part of a cycle.
"""

from __future__ import annotations

import ctypes
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
