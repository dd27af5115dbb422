"""Warm boxes: containers that are booted before anybody asks for them, so that a boot only has to take one.

An engine's `Spares` keep one container of each sort that was booted lately: of one image, with the same limits and
mounts. Who boots a box takes it, and the next one is booted meanwhile. No program has ever run in a spare, and none is
used twice. One for an agent shows a directory of its own in place of `scratch`, the directory in which those of
sockets are made; the box's sockets are then made there.

A spare is removed when newer ones need its place, after `IDLE_S`, and at the end of the process, however that comes
about: another process waits for it. On a host of its own, `keeper.sh` does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.sandbox.docker.engine import ContainerEngine

IDLE_S = 600.0
"""A spare that nobody has taken for so many seconds is removed."""

# Nobody's child, because Ray kills those of a worker that ends. It connects, and so reaps.
_WAIT = 'exec 3<&0; { read -r _ <&3; exec "$0" -c "$1"; } >/dev/null 2>&1 &'
_REAP = "from rollout.sandbox.docker.engine import get_engine; get_engine()"

logger = logging.getLogger(__name__)
_boots: collections.deque[tuple[bool, float]] = collections.deque(maxlen=10_000)

Spare = tuple["Future[tuple[str, bool, Path | None]]", threading.Timer]
"""A spare is a container, whether the engine limits its disk, and the directory that it shows for sockets, if any, all
of which may yet have to come; and what ends its time."""


class Spares:
    """Spares are those of one engine. Several threads may call the methods, which block.

    No failure of a spare is anybody else's: whoever wants a box boots one as if there were none.
    """

    def __init__(self, engine: ContainerEngine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._all = dict[Hashable, Spare]()  # by sort; the one that was asked for last is last

    def boot(
        self, boot: functools.partial[tuple[str, bool]], sockets: Path | None, most: int, scratch: str | None
    ) -> tuple[str, bool]:
        """Return what `boot` of a directory for sockets returns, or a spare that it has made. Afterwards there is one.

        boot: its arguments are the sort of its containers; it also takes the path at which the directory appears. most:
        spares of this engine, 0 for none. scratch: None, or where the sockets' directory lies, at a path that no image
        has; if it lies elsewhere, no spare is taken.
        """
        if most < 1 or (sockets and str(sockets.parent) != scratch):
            return boot(sockets)
        started, sort = time.monotonic(), (boot.args, sockets and scratch)
        found = self._take(sort, sockets)
        made = found or boot(sockets)
        _boots.append((found is not None, time.monotonic() - started))

        def ahead() -> tuple[str, bool, Path | None]:
            place = Path(tempfile.mkdtemp(prefix="cc-", dir=scratch)) if sockets else None
            return *boot(place, scratch), place

        with contextlib.suppress(Exception), self._lock:  # out of threads, or about to end: the box is there
            if not self._engine.name:
                _reap_after(os.getpid())
            if (spare := self._all.pop(sort, None)) is None:
                timer = threading.Timer(IDLE_S, self._drop, [sort])
                timer.daemon = True
                timer.start()
                spare = self._engine.pool.submit(ahead), timer
            self._all[sort] = spare
            for old in [*self._all][:-most]:
                self._engine.pool.submit(self._remove, self._all.pop(old))
        return made

    def _take(self, sort: Hashable, sockets: Path | None) -> tuple[str, bool] | None:
        with self._lock:
            if (spare := self._all.get(sort)) is None or not spare[0].done():
                return None
            del self._all[sort]
        try:
            container, limited, place = spare[0].result()
            state = self._engine.state(container)
            if state["Running"] and not state.get("Paused"):
                if sockets and place:
                    self._engine.machine.hand_over(place, sockets)
                spare[1].cancel()
                return container, limited
        except Exception as error:
            logger.info("a spare box is of no use: %s", error)
        self._remove(spare)
        return None

    def _drop(self, sort: Hashable) -> None:
        with self._lock:
            spare = self._all.pop(sort, None)
        if spare:
            self._remove(spare)

    def _remove(self, spare: Spare) -> None:
        spare[1].cancel()
        with contextlib.suppress(Exception):  # another process finds it by its labels
            container, _, place = spare[0].result()
            self._engine.remove(container)
            if place:
                self._engine.machine.unshare(place)
                shutil.rmtree(place)


@functools.cache
def _reap_after(pid: int) -> None:
    """Start the process that removes the boxes of this one when it has ended."""
    end, _ = os.pipe()  # the other one stays open as long as this process lives
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["sh", "-c", _WAIT, sys.executable, _REAP], stdin=end, env=environment, start_new_session=True)
    os.close(end)


def told() -> dict[str, float]:
    """Return what this process has booted since the last call: `boots`, `warm_boots` (those that took a spare) and
    their seconds, `booting_s`; nothing if it keeps no spares."""
    known = [_boots.popleft() for _ in range(len(_boots))]
    warm, seconds = (sum(values) for values in zip(*known, strict=True)) if known else (0, 0.0)
    return {"boots": len(known), "warm_boots": warm, "booting_s": seconds} if known else {}
