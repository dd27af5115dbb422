"""This module is what all programs share: their ``--help`` text, and how they end when nobody reads their output."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

# The status that a shell reports for a program that has ended because nobody reads its output.
UNREAD = 128 + signal.SIGPIPE


def plain(docstring: str | None, paragraphs: int | None = None) -> str:
    """Return a docstring without the marks around names. ``paragraphs``: how many to keep, None: all."""
    text = "\n\n".join((docstring or "").strip("\n").rstrip().split("\n\n")[:paragraphs])
    return re.sub(r"(`{1,2})(.+?)\1", r"\2", text, flags=re.DOTALL)


def parser(command: str, docstring: str | None, paragraphs: int | None = None) -> argparse.ArgumentParser:
    """Return the parser of a program, whose ``--help`` has the program's docstring (``plain``) above its options."""
    return argparse.ArgumentParser(
        prog=command,
        description=plain(docstring, paragraphs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def end(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and end the process with the status that it returns; with ``UNREAD`` if nobody reads its output."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _unread():
            raise  # it is another pipe that broke
        to_nowhere(1)
        status = UNREAD
    sys.exit(status)


def to_nowhere(fd: int) -> None:
    """Discard everything that is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def _unread() -> bool:
    """Tell whether the reader of our output has gone."""
    poll = select.poll()
    poll.register(1, 0)  # POLLERR and POLLHUP are always reported
    return bool(poll.poll(0))
