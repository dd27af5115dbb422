"""Read files that other programs wrote, line by line or whole, and count what was wrong with them."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollout import files

Kind = TypeVar("Kind")
LONGEST_LINE = 64 << 20  # bytes; what is longer is passed over
LARGEST_FILE = 256 << 20  # bytes of a file that is one JSON value, which is read whole
_SHOWN = 20  # problems that are reported in a line each
LONE = re.compile("[\ud800-\udfff]")  # halves of a surrogate pair, which are no Unicode


class Findings:
    """Findings are what an ingest counts: ``counts`` by what it is, in words, and problems, each with its place.

    show: is called with the MiB read so far, whenever another one was read.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[int], object] = lambda read: None) -> None:
        self._say, self._show = say, show
        self.counts = Counter[str]()
        self.problems = self._read = 0

    def read(self, size: int) -> None:
        """Count bytes that were read."""
        before, self._read = self._read, self._read + size
        if self._read >> 20 > before >> 20:
            self._show(self._read >> 20)

    def problem(self, place: str, what: object) -> None:
        """Report a problem in one line, and count it; after the first few, problems are only counted."""
        self.problems += 1
        if self.problems <= _SHOWN:
            self._say(f"{place}: {' '.join(str(what).split())[:300]}")
        if self.problems == _SHOWN:
            self._say("further problems are counted, but not shown")

    @contextlib.contextmanager
    def watching(self, place: str) -> Generator[None]:
        """End the block where a recording is not what it should be, and report that as a problem."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            self.problem(place, error)


def lines(path: Path, findings: Findings) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; blank ones and those over LONGEST_LINE are left out.

    A last line without an end is yielded if it may be whole. Raises OSError.
    """
    with files.opened(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            findings.read(len(line))
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                while (more := file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
                    pass
                findings.problem(f"{path}: line {number}", f"longer than {LONGEST_LINE >> 20} MiB, passed over")
            elif not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
                findings.problem(f"{path}: line {number}", "the file breaks off in this line")
            elif line.strip():
                yield number, line


def decode(text: bytes, decoder: msgspec.json.Decoder[Kind]) -> Kind:
    """Return a JSON text as what ``decoder`` makes. Raises ValueError with what is wrong.

    Lone surrogates, which are not valid Unicode, stay in its texts; ``repaired`` replaces them.
    """
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except ValueError:
            if b"\\ud" not in text and b"\\uD" not in text:
                raise
            return msgspec.convert(json.loads(text, parse_constant=_refused), decoder.type)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def values(path: Path, kind: type[Kind], findings: Findings) -> Iterator[tuple[str, Kind]]:
    """Yield what is in the lines of a file, each with its place; other lines are problems. Raises OSError."""
    decoder = msgspec.json.Decoder(kind)
    for number, text in lines(path, findings):
        place = f"{path}: line {number}"
        with findings.watching(place):
            yield place, repaired(decode(text, decoder))


def whole(path: Path, kind: type[Kind], findings: Findings) -> Kind | None:
    """Return a file that is one JSON value; None, with a problem, if it is not or cannot be read."""
    try:
        with files.opened(path) as file:
            text = file.read(LARGEST_FILE + 1)
        findings.read(len(text))
        if len(text) > LARGEST_FILE:
            raise ValueError(f"more than {LARGEST_FILE >> 20} MiB of JSON in one piece")
        return repaired(decode(text, msgspec.json.Decoder(kind)))
    except (OSError, ValueError) as error:
        findings.problem(str(path), error)
        return None


def repaired(value: Any) -> Any:
    """Return a JSON value, or a struct, with U+FFFD for each lone surrogate; the value itself if it has none."""
    try:
        msgspec.json.encode(value)
        return value
    except UnicodeEncodeError:
        return msgspec.convert(_mended(msgspec.to_builtins(value)), type(value))


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return LONE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, list) else value
