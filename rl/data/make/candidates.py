"""Candidates: the edits that are tried on a package, in an order that depends on the seed only.

Edits of all makers take turns. Among a maker's places, those that few tests run come first, because an edit there is
more likely to break few of them. Combined edits are made of edits that were kept by themselves.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from rl.data.make import (
    edits,
    makers,  # noqa: F401  registers its makers, as the next one does
    mistakes,  # noqa: F401
)
from rl.data.make.edits import Edit
from rl.data.make.sites import MAKERS, File, Maker, Site

_LARGEST = 400_000  # characters of a file
_MOST_HELPERS = 2

FEW = 40
"""Places that more tests run come later."""

FIX, WRITTEN = "undo_fix", "written"
"""The makers that take bugs from a repository's history (`rl.data.make.history`) and from another model
(`rl.data.make.written`)."""

FEATURE = "drop_feature"
"""The maker that drops a function together with those that only its own tests need."""

COMBINED = ("combine_two", "combine_three")
"""The makers of combined edits."""

NAMES = (FIX, WRITTEN, *MAKERS, FEATURE, *COMBINED)
"""The names of all makers."""


@dataclass(frozen=True)
class Candidate:
    """A candidate is an edit that is to be tried. tests: bits of the tests that run what it changes. parts: the edits
    that are combined in it, if any. files: test files of which a test has to fail, if any."""

    maker: str
    edit: Edit
    tests: int
    parts: tuple[Edit, ...] = ()
    files: frozenset[str] = frozenset()


Survivor = tuple[Candidate, Collection[str]]
"""A candidate that became a task, and the tests that it breaks."""


def parsed(sources: Mapping[str, str], lines: Mapping[str, Mapping[int, int]]) -> dict[str, File]:
    """Return the files in which bugs can be planted, by path.

    sources: the package's files. lines: bits of the tests that run each line of a file. Files that no test runs, and
    those that cannot be parsed, are left out.
    """
    shared = _shared(sources)
    files = {}
    for path, source in sources.items():
        if lines.get(path) and len(source) <= _LARGEST and "\r" not in source:
            try:
                files[path] = File(source, lines[path], shared)
            except (cst.ParserSyntaxError, RecursionError):
                continue
    return files


def _shared(sources: Mapping[str, str]) -> frozenset[str]:
    """Return the words that at least two modules have as texts: keys and names on which they agree."""
    counts = Counter[str]()
    for source in sources.values():
        try:
            nodes = ast.walk(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError):
            continue
        counts.update({n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)})
    return frozenset(word for word, count in counts.items() if count > 1 and word.isidentifier())


def singles(files: Mapping[str, File], seed: str, names: Sequence[str] = NAMES) -> Iterator[Candidate]:
    """Yield the candidates of all makers in turn, one of each at a time, until no maker has any left."""
    queues = [_of_maker(files, MAKERS[name], seed) for name in names if name in MAKERS]
    if FEATURE in names:
        queues.append(_features(files, seed))
    seen = set()
    for candidate in itertools.chain.from_iterable(itertools.zip_longest(*queues)):
        if candidate is not None and candidate.edit not in seen:
            seen.add(candidate.edit)
            yield candidate


def _of_maker(files: Mapping[str, File], maker: Maker, seed: str) -> Iterator[Candidate]:
    places = [(path, site) for path, file in files.items() for site in file.sites(maker)]
    random.Random(f"{seed}:{maker.name}").shuffle(places)
    places.sort(key=lambda place: place[1].tests.bit_count() > FEW)
    for path, site in places:
        if edit := _planted(files, path, maker, site, seed):
            yield Candidate(maker.name, edit, site.tests)


def _planted(files: Mapping[str, File], path: str, maker: Maker, site: Site, seed: str) -> Edit | None:
    own = f"{seed}:{path}:{site.start}:{site.end}:{maker.name}"
    new = files[path].planted(maker, site, own)
    return None if new is None else edits.between(path, files[path].source, new)


def _features(files: Mapping[str, File], seed: str) -> Iterator[Candidate]:
    """Yield functions dropped together with one or two helpers that no tests but theirs run."""
    maker = MAKERS["drop_function"]
    places = [(path, site) for path, file in files.items() for site in file.sites(maker)]
    random.Random(f"{seed}:{FEATURE}").shuffle(places)
    for path, site in places:
        helpers = [
            (other, one)
            for other, one in places
            if one.tests | site.tests == site.tests and not (other == path and _overlap(one, site))
        ]
        helpers.sort(key=lambda place: -place[1].tests.bit_count())  # those that most of its tests run
        parts = [part] if (part := _planted(files, path, maker, site, seed)) else []
        for other, one in helpers:
            part = _planted(files, other, maker, one, seed) if 1 <= len(parts) <= _MOST_HELPERS else None
            if part and edits.combined([*parts, part]):
                parts.append(part)
        if len(parts) > 1 and (whole := edits.combined(parts)):
            yield Candidate(FEATURE, whole, site.tests)


def _overlap(one: Site, other: Site) -> bool:
    return one.start <= other.end and other.start <= one.end


def combinations(kept: Sequence[Survivor], seed: str, most: int, names: Sequence[str] = NAMES) -> Iterator[Candidate]:
    """Return kept edits combined by twos and threes, in turn; edits of different files first.

    most: the most tests that a combination's edits may break when each is tried by itself; together they nearly always
    break the same ones. Edits are not combined if one of them breaks everything that the others break: the combination
    would fail like that edit alone.
    """
    queues = [_combined(kept, size, seed, most) for size, name in enumerate(COMBINED, 2) if name in names]
    return filter(None, itertools.chain.from_iterable(itertools.zip_longest(*queues)))


def _combined(kept: Sequence[Survivor], size: int, seed: str, most: int) -> Iterator[Candidate]:
    name = COMBINED[size - 2]
    rng = random.Random(f"{seed}:{name}")
    parts = [one for one in kept if len({change.path for change in one[0].edit}) == 1]
    many = rng.sample(range(len(parts)), len(parts))
    sets = list(itertools.islice(itertools.combinations(many, size), 20_000))
    rng.shuffle(sets)

    def wanted(numbers: Sequence[int]) -> tuple[int, int]:
        """Return the sort key of a set: many files, then few broken tests; together, edits often break more."""
        broken = {test for number in numbers for test in parts[number][1]}
        return -len({parts[number][0].edit[0].path for number in numbers}), len(broken)

    sets.sort(key=wanted)
    used = Counter[int]()
    for numbers in sets:
        if any(used[number] >= size for number in numbers):  # no edit is in too many tasks
            continue
        broken = {test for number in numbers for test in parts[number][1]}
        if len(broken) > most or any(broken == set(parts[number][1]) for number in numbers):
            continue
        several = tuple(parts[number][0].edit for number in numbers)
        if whole := edits.combined(several):
            used.update(numbers)
            tests = 0
            for number in numbers:
                tests |= parts[number][0].tests
            yield Candidate(name, whole, tests, several)
