"""This module reads files that other programs wrote, line by line or whole, and counts what was wrong with them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
LONGEST_LINE = 64 << 20  # bytes; what is longer is passed over
LARGEST_FILE = 256 << 20  # bytes of a file that is one JSON value, which is read whole
_SHOWN = 20  # problems that are reported in a line each
_LONE = re.compile("[\ud800-\udfff]")


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


def lines(path: Path, findings: Findings) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; blank ones and those over LONGEST_LINE are left out.

    A last line without an end is yielded if it may be whole. Raises OSError.
    """
    with open(path, "rb", buffering=1 << 20) as file:
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
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if b"\\ud" not in text and b"\\uD" not in text:
            raise ValueError(str(error)) from error
        try:
            return msgspec.convert(json.loads(text, parse_constant=_refused), decoder.type)
        except (ValueError, RecursionError) as worse:  # msgspec's errors are ValueErrors, too
            raise ValueError(str(worse)) from worse
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def whole(path: Path, decoder: msgspec.json.Decoder[Kind]) -> Kind:
    """Return a file that is one JSON value. Raises ValueError and OSError."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"{size >> 20} MiB of JSON in one piece; at most {LARGEST_FILE >> 20} are read")
    return repaired(decode(path.read_bytes(), decoder))


def repaired(value: Any) -> Any:
    """Return a JSON value, or a struct, with U+FFFD for each lone surrogate; the value itself if it has none."""
    try:
        msgspec.json.encode(value)
        return value
    except UnicodeEncodeError:
        if isinstance(value, msgspec.Struct):
            return msgspec.convert(_mended(msgspec.to_builtins(value)), type(value))
        return _mended(value)


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, list) else value
