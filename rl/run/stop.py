"""This module decides what SIGTERM and SIGUSR1 mean to the trainer's process.

Schedulers send one of them some time before they kill (SLURM's ``--signal``, a preemption, a drained node). The first
signal is a request: the trainer finishes its step, saves a checkpoint and exits with ``STOPPED``. Outside of a step it
exits at once with the same code, because no work is lost. A second signal, or ``grace_s`` seconds after the first,
ends the process in the middle of the step with ``CUT_SHORT``: work since the last checkpoint is lost. In all cases the
same command continues the run. SIGINT keeps Python's meaning.

The state is global because signal handlers belong to the process. ``rl.train`` installs the handlers and reports the
end; the trainer (``rl.trainer``) says when its steps begin and asks between two steps whether it should end.
"""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

STOPPED = os.EX_TEMPFAIL  # 75, sysexits.h: a temporary failure, try again
CUT_SHORT = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Ended(KeyboardInterrupt):
    """Something outside the trainer ends the run.

    This is a KeyboardInterrupt because Ray and asyncio let no other exception out of a signal handler. Ray turns it
    into a plain KeyboardInterrupt, so whoever catches one asks ``reason`` for the cause.
    """


class Stopped(Ended):
    """The run ended between two steps, with everything saved. The message is the signal's name."""


class CutShort(Ended):
    """The run ended in the middle of a step; work since the last checkpoint is lost."""


_reason: Ended | None = None
_grace_s: float = 0.0
_say: Callable[[str], None] = print
_asked: str | None = None  # the name of the first signal
_in_steps: bool = False


def install(grace_s: float, say: Callable[[str], None]) -> None:
    """Install the signal handlers.

    Call it in the main thread, and again after another library (Ray) has replaced the handlers.

    Args:
        grace_s: seconds that the current step may still take after the first signal.
        say: prints a line for the user.
    """
    global _grace_s, _say
    _grace_s, _say = grace_s, say
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    signal.signal(signal.SIGALRM, _on_alarm)


def enter_steps() -> None:
    """Make the first signal a request from now on, which the trainer sees when it calls ``asked``."""
    global _in_steps
    _in_steps = True


def end(how: Ended) -> NoReturn:
    """Raise ``how`` and remember it as the reason."""
    global _reason
    _reason = how
    raise how


def reason() -> Ended | None:
    """Return what was raised by ``end``; None if it was not called."""
    return _reason


def asked() -> str | None:
    """Return the name of the signal that asked the run to end; None if there was none."""
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
