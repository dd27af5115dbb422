"""The forwarder: a small program that leads a port of a box's own loopback to the session's socket.

Only Claude Code can be told of a unix socket; the other agents need TCP, and a box has no network but its loopback.
``forward.c`` is built once on each machine, without any library, so that it runs in every box, whatever its image is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from rollout.files import replacing

SOCKET = "FORWARD_SOCKET"
"""The variable that tells the forwarder where the socket is. Without it, it only starts the program."""

PORT = "\x1fport\x1f"
"""What the forwarder replaces, in its program's arguments and environment, by the number of its port."""

BASE_URL = f"http://127.0.0.1:{PORT}"
"""Where its program finds the session."""

_SOURCE = Path(__file__).with_suffix(".c")


def cache() -> Path:
    """Return the directory in which programs of agents are kept. The user's cache is shared by all checkouts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "claude-code-rl", "agents")


def program() -> Path:
    """Return the forwarder; see `compiled`."""
    return compiled(_SOURCE)


def compiled(source: Path) -> Path:
    """Return a program, built if this machine has none yet of this C file. Raises FileNotFoundError if it cannot be."""
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    path = cache() / f"{source.stem}-{name}"
    if path.exists():
        return path
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError(f"{source.name} needs a C compiler, once: install gcc and libc6-dev")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        done = subprocess.run(
            [compiler, "-static", "-Os", "-s", "-o", str(new), str(source)], capture_output=True, text=True
        )
        if done.returncode:
            raise FileNotFoundError(f"{source.name} cannot be built: {done.stderr.strip()[-500:]}")
    return path
