"""Signals to the trainer's process: what SIGTERM and SIGUSR1 mean, when it ends, and what is saved first.

Schedulers send one of them some time before they kill (SLURM's ``--signal``, a preemption, a drained node). The first
signal is a request: the trainer ends as soon as nothing is lost by it, saves a checkpoint and exits with ``STOPPED``.
While episodes are played that is at once, because those that are done are kept (``rl.train.unfinished``); in the update
it is after the step. Outside of a step it exits at once with the same code. SIGTERM after that, or ``grace_s`` seconds,
ends the process in the middle of its work with ``CUT_SHORT``: work since the last checkpoint is lost. SIGUSR1 is only
ever a warning, which several may give: it changes nothing after the first signal.
If the job ends sooner (``rl.run.slurm``), the time is what is left of it, less a margin. In all cases the same command
continues the run. SIGINT keeps Python's meaning.

The state is global because signal handlers belong to the process. ``rl.train`` installs the handlers, first ``early``,
and reports the end; the trainer (``rl.train.trainer``) says when its steps begin and asks whether it should end.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

STOPPED = os.EX_TEMPFAIL  # 75, sysexits.h: a temporary failure, try again
CUT_SHORT = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
MARGIN_S = 90  # of a job's last seconds: for Ray's end and the script that requeues the job


class RunEnded(KeyboardInterrupt):
    """Something outside the trainer ends the run.

    This is a KeyboardInterrupt because Ray and asyncio let no other exception out of a signal handler. Ray turns it
    into a plain KeyboardInterrupt, so whoever catches one asks ``reason`` for the cause.
    """


class RunStopped(RunEnded):
    """The run ended with everything saved. The message is the signal's name."""


class RunCutShort(RunEnded):
    """The run ended in the middle of a step; work since the last checkpoint is lost."""


_reason: RunEnded | None = None
_grace_s: float = 0.0
_allowed_s: float = 0.0  # what the job's end leaves of the grace
_say: Callable[[str], None] = print
_job_end: Callable[[], float | None] = float  # 0: not known
_asked: str | None = None  # the name of the first signal
_in_steps: bool = False
_waiting: list[int] = []  # signals that another thread took while they were held


def early() -> None:
    """End the process with ``STOPPED`` and one line at a signal, until ``install`` is called.

    Call it before anything that takes time is imported. Python's own start cannot be covered from here: a parent that
    blocks the signals while it starts this process loses none, because they are let through now.
    """
    for number in SIGNALS:
        signal.signal(number, _on_early)
    release()


def install(grace_s: float, say: Callable[[str], None], job_end: Callable[[], float | None]) -> None:
    """Install the signal handlers.

    Call it in the main thread, and again after another library (Ray) has replaced the handlers.

    Args:
        grace_s: seconds that ending may take after the first signal.
        say: prints a line for the user.
        job_end: returns when the scheduler will kill the process (seconds since the epoch), None if that is not known.
    """
    global _grace_s, _say, _job_end
    _grace_s, _say, _job_end = grace_s, say, job_end
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    signal.signal(signal.SIGALRM, _on_alarm)


def hold() -> None:
    """Let signals wait until ``release`` is called. Processes that are forked meanwhile never see them.

    The mask is this thread's. Another thread (of numpy, of the lease) takes the signal, and Python calls the handler
    here all the same: so the handlers only note it, until ``install`` replaces them.
    """
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _waiting.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def release() -> None:
    """Let signals through, those that have waited at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while _waiting:
        signal.raise_signal(_waiting.pop(0))


def enter_steps() -> None:
    """Make the first signal a request from now on, which the trainer sees when it calls ``asked``."""
    global _in_steps
    _in_steps = True


def end(how: RunEnded) -> NoReturn:
    """Raise ``how`` and remember it as the reason. After ``RunStopped`` nothing else can become the reason."""
    global _reason
    _reason = how
    if isinstance(how, RunStopped):
        signal.setitimer(signal.ITIMER_REAL, 0)
    raise how


def reason() -> RunEnded | None:
    """Return what was raised by ``end``; None if it was not called."""
    return _reason


def asked() -> str | None:
    """Return the name of the signal that asked the run to end; None if there was none."""
    return _asked


def say(line: str) -> None:
    """Print a line for the user."""
    _say(line)


def _on_early(number: int, _frame: object) -> None:
    name = signal.Signals(number).name
    os.write(1, f"stopped by {name} before anything was started; the same command continues\n".encode())
    os._exit(STOPPED)


def _on_signal(number: int, _frame: object) -> None:
    global _asked, _allowed_s
    name = signal.Signals(number).name
    if isinstance(_reason, RunStopped):
        return  # all is saved, and the process is about to end
    if _asked is not None:
        if number == signal.SIGTERM:
            end(RunCutShort(f"a second signal ({name})"))
        return
    _asked = name
    if not _in_steps:
        end(RunStopped(name))
    signal.setitimer(signal.ITIMER_REAL, _grace_s)
    _allowed_s, why = _grace_s, ""
    if (left := (_job_end() or 0) - time.time()) > 0 and (room := left - min(MARGIN_S, left / 5)) < _grace_s:
        signal.setitimer(signal.ITIMER_REAL, room)
        at = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        _allowed_s, why = room, f" (the job ends at {at}, before run.grace_s = {_grace_s:.0f} s)"
    _say(f"{name}: ending, in {_allowed_s:.0f} s at the latest{why}; then SIGTERM ends at once")


def _on_alarm(*_: object) -> None:
    left = "" if _allowed_s == _grace_s else f", of which the job's end left {_allowed_s:.0f},"
    end(RunCutShort(f"run.grace_s = {_grace_s:.0f} s{left} were not enough to finish and save"))
