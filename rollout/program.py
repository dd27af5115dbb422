"""What all programs share: ``--help``, output that is safe in a terminal, and how they end when nobody reads it."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

# The status that a shell reports for a program that has ended because nobody reads its output.
UNREAD = 128 + signal.SIGPIPE


def plain(docstring: str | None) -> str:
    """Return a docstring without the marks around names."""
    return re.sub(r"(`{1,2})(.+?)\1", r"\2", (docstring or "").strip("\n").rstrip(), flags=re.DOTALL)


def parser(command: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program, whose ``--help`` has the program's docstring (``plain``) above its options."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(command, description=plain(docstring), formatter_class=form)


# What a terminal obeys or shows in another order: control characters, marks of direction, invisible marks, halves of
# characters, and tags.
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def shown(text: str) -> str:
    """Return a text that may be printed, whoever wrote it: what a terminal would obey is spelled out (``\\x1b``)."""
    return _HOSTILE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class _PrintableStream:
    """A stream of which all that is written is ``shown``: a program prints what was recorded, names of files too."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        self._out.write(shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def end(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and end the process with the status that it returns; with ``UNREAD`` if nobody reads its output.

    No escape code reaches the terminal by way of stdout or stderr.
    """
    out: Any = _PrintableStream(sys.stdout)
    err: Any = _PrintableStream(sys.stderr)
    sys.stdout, sys.stderr = out, err
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


def failed(text: str, status: int = 1) -> int:
    """Print what has gone wrong on stderr, and return the exit status."""
    print(text, file=sys.stderr)
    return status


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
