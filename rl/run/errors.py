"""The last error of an agent loop, handed to the trainer, which can then name it. Ray's log has all of it.

Each process has a file of its own in ``errors/`` of the run directory, which may be on a disk that nodes share.
"""

import contextlib
import os
import socket
from pathlib import Path

from rollout import files


def note(run_dir: Path, error: Exception) -> None:
    """Write down an error of this process, in place of the one before."""
    directory = run_dir / "errors"
    text = " ".join(str(error).split())[:300]
    with contextlib.suppress(OSError):  # the disk may be what the error is about
        directory.mkdir(exist_ok=True)
        files.write(directory / f"{socket.gethostname()}-{os.getpid()}.txt", f"{type(error).__name__}: {text}")


def last(run_dir: Path) -> str:
    """Return the error that was written down last."""
    noted = sorted((run_dir / "errors").glob("[!.]*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return noted[-1].read_text() if noted else "see run.log"
