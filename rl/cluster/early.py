"""Keep signals that come before ``rl.cluster`` can act on them. Nothing is imported but what Python has loaded.

The batch script starts Python with these signals blocked where it can, so one that comes while Python starts is
delivered by ``install``.
"""

import os
import signal

from rl.run import stop

seen: list[int] = []
"""The signals that have come to the head of the job."""


def install() -> None:
    """Install handlers for SIGUSR1 and SIGTERM that end nothing in the head, and let the signals in."""
    if int(os.environ.get("SLURM_PROCID", 0)) > 0:
        # Only the head's exit code counts: when the head ends before it listens, SLURM ends the other nodes.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR1, lambda *_: None)
    else:
        for number in stop.SIGNALS:
            signal.signal(number, lambda number, _: seen.append(number))
    stop.release()
