"""This module makes drills: made-up episodes in which a policy learns to handle code that it has never seen.

A drill is a file of lines that are drawn from the training packages' sources, with many of their names replaced by
other or invented ones, a statement about nothing, and the calls of the expert; what the check says
is drawn, too. Nothing of it can be known by heart, so what is learned is to read: to find a line by its number, to copy
a text, to exchange an operator. Nobody plays drills, and they teach nothing about which exchange is right.
"""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl.make.prepare import prepare
from rl.quickstart.policy import BASH, READ, SYSTEM, rendered
from rl.quickstart.realcode.functions import bare
from rl.quickstart.realcode.script import DONE, TryingScript
from rl.quickstart.realcode.swaps import command, swaps
from rl.quickstart.realcode.tasks import CHECK, FILE
from rl.quickstart.script import call

TOOLS = [BASH, READ]
_SHORTEST, _LONGEST = 8, 72  # characters of a line
_LINES = 6  # of a file, at most
_FEWEST_SWAPS, _MOST_SWAPS = 3, 16
_EVERY = 3  # one of so many drills is an episode; the others exchange all of a file, ten times as much to look up
_STOPS = 0.1  # more seldom than in the episodes: each further try is one more place to look up
_WORD = re.compile(r"[A-Za-z_]\w*")
_SAID = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
_CALL = re.compile(r"<function=(\w+)>")
_CHANGED = f"[This command modified 1 file you've previously read: {FILE}. Call Read before editing.]"  # says Bash
_VALUES = ("0", "1", "[]", "True", "None", "''", "[1, 2]")


class Drills:
    """Drills are made of the sources of packages. The same sources and seeds give the same drills."""

    def __init__(self, sources: Iterable[str]) -> None:
        lines = (line for text in sources for line in _plain(text).split("\n"))
        self.lines = sorted({line for line in lines if _is_usable(line)})
        self._words = sorted({word for line in self.lines for word in _names(line)})
        if not self._words:
            raise ValueError("the training packages have no lines to drill with; name others")

    @classmethod
    def of(cls, specs: Iterable[str], directory: Path) -> Drills:
        """Return the drills of packages that are kept in ``directory``. Raises MakeError, SandboxError."""
        packages = [prepare(spec, directory, copies=True).package for spec in specs]
        return cls((one.tree / path).read_text(errors="replace") for one in packages for path in one.sources())

    def messages(self, seed: str) -> list[dict[str, Any]]:
        """Return the chat of a drill."""
        rng = random.Random(seed)
        name = self._name(rng)
        while len(swaps(text := self._file(rng, name))) < _FEWEST_SWAPS:
            pass
        given = ", ".join(self._value(rng) for _ in range(rng.randint(1, 3)))
        wrong = f"{name}({given}) gives {self._value(rng)}"
        statement = f"{wrong}, not {self._value(rng)}."
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"{SYSTEM.partition(chr(10))[0]}\n{PROMPT}"},
            {"role": "user", "content": statement},
        ]
        script, prompt = TryingScript(seed, _STOPS), f"<|im_start|>user\n{statement}"
        while found := _CALL.search(reply := script(prompt)):
            result = _numbered(text) if found[1] == "Read" else _CHANGED
            if CHECK in reply:
                result = "ok" if rng.random() < 0.25 else f"Exit code 1\n{wrong}"
            messages += [{"role": "assistant", "content": reply}, {"role": "tool", "content": result}]
            prompt += f"<tool_response>\n{result}\n</tool_response>"
        return [*messages, {"role": "assistant", "content": reply}]

    def exchanges(self, seed: str) -> list[dict[str, Any]]:
        """Return the chat of a drill in which one command exchanges everything that can be, in a random order."""
        rng = random.Random(seed)
        while len(places := swaps(text := self._file(rng, self._name(rng)))) < _FEWEST_SWAPS:
            pass
        chosen = rng.sample(places, min(len(places), _MOST_SWAPS))
        return [
            {"role": "system", "content": f"{SYSTEM.partition(chr(10))[0]}\n{PROMPT}"},
            {"role": "user", "content": "Exchange everything."},
            {"role": "assistant", "content": call("Read", file_path=FILE)},
            {"role": "tool", "content": _numbered(text)},
            {"role": "assistant", "content": call("Bash", command=command(chosen, FILE))},
            {"role": "tool", "content": _CHANGED},
            {"role": "assistant", "content": DONE},
        ]

    def rows(self, tokenizer: Any, seed: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield ids and mask of drills: 1 for what the assistant says and the token that ends it."""
        for number in range(count):
            make = self.messages if number % _EVERY == 0 else self.exchanges
            text = rendered(make(f"{seed}:{number}"), TOOLS)
            ids, mask = list[int](), list[int]()
            for place, part in enumerate(_SAID.split(text)):  # every second part is the assistant's
                new = tokenizer.encode(part, add_special_tokens=False)
                ids += new
                mask += [place % 2] * len(new)
            yield ids, mask

    def _file(self, rng: random.Random, name: str) -> str:
        renamed: dict[str, str] = {}

        def other(found: re.Match[str]) -> str:
            word = found[0]
            if keyword.iskeyword(word):
                return word
            return renamed.setdefault(word, self._name(rng) if rng.random() < 0.6 else word)

        lines = [_WORD.sub(other, line) for line in rng.sample(self.lines, rng.randint(2, _LINES))]
        depth = 0
        for place, line in enumerate(lines):  # as in Python, a line is at most one step deeper than the one before
            bare = line.lstrip()
            depth = min(depth + 1, (len(line) - len(bare)) // 4)
            lines[place] = "    " * depth + bare
        parameters = ", ".join(self._name(rng) for _ in range(rng.randint(1, 3)))
        return "\n".join([f"def {name}({parameters}):", *lines, ""])

    def _name(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return rng.choice(self._words)
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 5)))
        return word if rng.random() < 0.5 else f"{word}_{rng.choice(self._words)}"

    def _value(self, rng: random.Random) -> str:
        return rng.choice([*_VALUES, repr(self._name(rng)), str(rng.randint(2, 99))])


PROMPT = f"Fix the bug in {FILE}. `{CHECK}` shows it."
"""What the policy is told; ``agent.system_prompt`` of the experiment says the same."""


def _plain(text: str) -> str:
    """Return a source in the form of the tasks' files, nothing if it is no Python."""
    try:
        return bare(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""


def _is_usable(line: str) -> bool:
    bare = line.strip()
    plain = line[:1] == " " and line.isascii() and not bare.startswith(("'", '"', "@"))
    return plain and _SHORTEST <= len(bare) <= _LONGEST


def _names(line: str) -> Sequence[str]:
    return [word for word in _WORD.findall(line) if not keyword.iskeyword(word)]


def _numbered(text: str) -> str:
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(text.split("\n"), 1))
