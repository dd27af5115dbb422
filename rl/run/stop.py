"""Ending a run in the middle: what SIGTERM and SIGUSR1 mean to the trainer's process.

Schedulers send one of them some time before they kill (SLURM ``--signal``, a preemption, a drained node). The first
one asks: the step under way is finished, a checkpoint is saved, the process ends with ``STOPPED``. Outside of a step
there is nothing to finish, and it ends at once, with the same code: either way no work is lost and the same command
goes on. A second one, or ``grace_s`` seconds after the first, ends the process where it is, with ``CUT_SHORT``: what
was done since the last checkpoint is lost. SIGINT stays Python's.

The state is the process's, as signal handlers are. ``rl.train`` installs and reports, the trainer (``rl.trainer``) says
when its steps begin and asks between two of them.
"""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

STOPPED = os.EX_TEMPFAIL  # 75, sysexits.h: a temporary failure, try again
CUT_SHORT = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Ended(KeyboardInterrupt):
    """Ends the run from outside. A KeyboardInterrupt, because Ray and asyncio let only that out of a signal handler:
    Ray as a plain one, other exceptions not at all. So whoever catches one looks at ``reason``."""


class Stopped(Ended):
    """Between two steps, after the checkpoint. The message is the signal's name."""


class CutShort(Ended):
    """Where it is."""


_reason: Ended | None = None
_grace_s: float = 0.0
_say: Callable[[str], None] = print
_asked: str | None = None  # the name of the first signal
_in_steps: bool = False


def install(grace_s: float, say: Callable[[str], None]) -> None:
    """Handle the signals. ``grace_s``: seconds that a step may still take; ``say`` tells the user what was understood.

    To be called in the main thread, and again after somebody else (Ray) has put a handler there.
    """
    global _grace_s, _say
    _grace_s, _say = grace_s, say
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    signal.signal(signal.SIGALRM, _on_alarm)


def enter_steps() -> None:
    """From now on the first signal waits until ``asked`` is looked at."""
    global _in_steps
    _in_steps = True


def end(how: Ended) -> NoReturn:
    """Raise ``how`` and remember it."""
    global _reason
    _reason = how
    raise how


def reason() -> Ended | None:
    """What ended the run, if ``end`` did."""
    return _reason


def asked() -> str | None:
    """The name of the signal that asked the run to end, None if none did."""
    return _asked


def _on_signal(number: int, _frame: object) -> None:
    global _asked
    name = signal.Signals(number).name
    if _asked is not None:
        end(CutShort(f"a second signal ({name})"))
    _asked = name
    if not _in_steps:
        end(Stopped(name))
    signal.setitimer(signal.ITIMER_REAL, _grace_s)
    _say(f"{name}: ending after this step, in {_grace_s:.0f} s at the latest; a second signal ends at once")


def _on_alarm(*_: object) -> None:
    end(CutShort(f"run.grace_s = {_grace_s:.0f} s were not enough for the step"))
