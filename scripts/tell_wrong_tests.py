"""Train a classifier to tell tests that were made wrong from tests as they are, and print how well it does.

    python scripts/tell_wrong_tests.py [DIRECTORY ...] [--tests N] [--seed N] [--sure]

It knows how wrong tests are made (rewards.mutation), because it learns from pairs of a function as it is and made
wrong, and is asked about functions of other files, one at a time. What it sees are n-grams of a function's characters
and tokens, and its tokens with all names, texts and numbers replaced. The directories hold test files; by default, they
are the packages of this environment. An AUC of 0.5 is chance.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from rewards.literals import Pool
from rewards.mutation import FUNCTIONS, Module, wrong

_BUCKETS = 1 << 16
_FOLDS = 5
_MOST_PER_FILE = 12
_LONGEST = 4000  # characters of a function


@dataclass(frozen=True)
class Pair:
    """A pair is a test as it is and made wrong, its file's number, and what was changed."""

    right: str
    wrong: str
    file: int
    kind: str


def pairs(paths: Sequence[Path], most: int, draw: random.Random, sure: bool) -> tuple[list[Pair], int]:
    """Return pairs, and of how many tests they are; a test in which nothing can be changed has none."""
    found: list[Pair] = []
    seen = 0
    for number, path in enumerate(paths):
        if seen >= most:
            break
        try:
            source = path.read_bytes().replace(b"\r\n", b"\n")
            tree = ast.parse(source.decode())
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        module = Module(source, tree, Pool(tree, draw), sure)
        tests = [one for one in ast.walk(tree) if isinstance(one, FUNCTIONS) and one.name.startswith("test")]
        for function in draw.sample(tests, min(len(tests), _MOST_PER_FILE)):
            begin, end = module.span(function)
            begin = min([begin, *(module.span(one)[0] for one in function.decorator_list)])
            if end - begin > _LONGEST:
                continue
            seen += 1
            edits, kind = wrong(function, module)
            text = source
            for start, stop, new in sorted(edits, reverse=True):
                text = text[:start] + new.encode() + text[stop:]
                end += len(new.encode()) - (stop - start)
            if edits:
                right = source[begin : module.span(function)[1]]
                found.append(
                    Pair(right.decode(errors="replace"), text[begin:end].decode(errors="replace"), number, kind)
                )
    return found, seen


def features(text: str) -> numpy.ndarray:
    """Return the hashed features of a function: (n,) indices, sorted and unique."""
    tokens = _tokens(text)
    shapes = [_shape(token) for token in tokens]
    names = {f"c{n}{text[at : at + n]}" for n in (3, 4, 5) for at in range(len(text) - n + 1)}
    for mark, sequence in (("t", tokens), ("s", shapes)):
        for n in (1, 2, 3, 4):
            names.update(f"{mark}{n}" + "\0".join(sequence[at : at + n]) for at in range(len(sequence) - n + 1))
    for token, count in Counter(tokens).items():  # how often a text or number occurs
        if token[:1] in "\"'" or token[:1].isdigit():
            names.add(f"n{min(count, 3)}{_shape(token)}")
    return numpy.unique(numpy.array([zlib.crc32(name.encode()) % _BUCKETS for name in names] or [0]))


def _tokens(text: str) -> list[str]:
    lines = re.sub(r"^(?=\s*(?:async )?def )", "", text)
    try:
        return [token.string for token in tokenize.generate_tokens(io.StringIO(lines).readline) if token.string.strip()]
    except (tokenize.TokenError, SyntaxError):
        return text.split()


def _shape(token: str) -> str:
    if token[:1] in "\"'":
        return re.sub("[a-z]+", "a", re.sub("[A-Z]+", "A", re.sub("[0-9]", "0", token)))[:12]
    return re.sub("[0-9]", "0", token) if token[:1].isdigit() else token


def scores(examples: Sequence[numpy.ndarray], labels: numpy.ndarray, folds: numpy.ndarray) -> numpy.ndarray:
    """Return what a logistic regression says of each example that was trained on the other folds: (n,) floats."""
    said = numpy.zeros(len(examples))
    for fold in range(_FOLDS):
        weights, speed = numpy.zeros(_BUCKETS + 1), numpy.full(_BUCKETS + 1, 1e-8)
        training = numpy.flatnonzero(folds != fold)
        draw = numpy.random.default_rng(fold)
        for _ in range(4):
            for one in draw.permutation(training):
                at = examples[one]
                guess = 1 / (1 + numpy.exp(-numpy.clip(weights[at].sum() / len(at) ** 0.5 + weights[-1], -30, 30)))
                slope = (guess - labels[one]) / len(at) ** 0.5
                gradient = slope + 1e-4 * weights[at]
                speed[at] += gradient**2
                weights[at] -= 0.1 * gradient / speed[at] ** 0.5
        for one in numpy.flatnonzero(folds == fold):
            said[one] = weights[examples[one]].sum() / len(examples[one]) ** 0.5
    return said


def auc(said: numpy.ndarray, labels: numpy.ndarray) -> float:
    """Return the probability that a wrong test gets a higher score than a right one; ties count one half."""
    wrong_, right = said[labels == 1], numpy.sort(said[labels == 0])
    below, above = numpy.searchsorted(right, wrong_, "left"), numpy.searchsorted(right, wrong_, "right")
    return float((below + above).sum() / 2 / (len(wrong_) * len(right)))


def _files(directories: Sequence[Path], draw: random.Random) -> Iterator[Path]:
    """Yield test files, so that all packages get their turn."""
    groups: list[list[Path]] = []
    for directory in directories:
        for package in sorted(directory.iterdir()):
            found = sorted(package.rglob("test_*.py")) if package.is_dir() else []
            draw.shuffle(found)
            groups.append(found)
    while groups := [group for group in groups if group]:
        yield from (group.pop() for group in groups)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, default=[Path(sysconfig.get_paths()["purelib"])])
    parser.add_argument("--tests", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sure", action="store_true", help="as for tasks without a gold patch")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    some, seen = pairs([*_files(args.directories, draw)], args.tests, draw, args.sure)
    print(f"{seen} tests, of which {len(some) / seen:.1%} have a change")
    examples = [features(text) for pair in some for text in (pair.right, pair.wrong)]
    labels = numpy.tile([0, 1], len(some))
    folds = numpy.repeat([zlib.crc32(str(pair.file).encode()) % _FOLDS for pair in some], 2)
    said = scores(examples, labels, folds)
    print(f"AUC {auc(said, labels):.3f}")
    kinds = numpy.repeat([pair.kind for pair in some], 2)
    for kind, count in Counter(pair.kind for pair in some).most_common():
        chosen = kinds == kind
        print(f"  {kind:14} {count / len(some):6.1%}  AUC {auc(said[chosen], labels[chosen]):.3f}")


if __name__ == "__main__":
    main()
