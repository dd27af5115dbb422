"""This module plays the episodes that a policy is warm-started on: an expert that repairs by trying, with mistakes.

A ``TryingScript`` is a script for ``rollout.proxy.engine.ScriptedEngine``. It reads the file, exchanges a word or an
operator of a line for its counterpart with sed, runs the check, and if that did not help takes the edit back and tries
another one. It does not know which is right: it draws. Often it gives up after a try, or does not run the check;
sometimes it tries again what it has tried, or forgets to take an edit back. So what is imitated seldom repairs
anything, and reward can teach what does: to go on, to try each place once, to believe the check.

An episode's script draws from a seed of its own and reads the conversation from its beginning at each call, so an
episode is the same whatever others are played before or beside it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator

from rl.quickstart.realcode.swaps import Swap, swaps
from rl.quickstart.realcode.tasks import CHECK, FILE
from rl.quickstart.script import call

DONE = "Done."
TRIES = 6
STOPS = 0.7
"""How often it gives up after a try that did not help."""
BACK = f"git checkout -q {FILE}"
"""The command that takes all edits back."""
_SKIPS_CHECK, _FORGETS, _REPEATS = 0.2, 0.15, 0.3
_STATEMENT = re.compile(r"<\|im_start\|>user\n(?=.*, not )")
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n?</tool_response>", re.DOTALL)
_LINE = re.compile(r"^ *(\d+)\t(.*)$")


class TryingScript:
    """A trying script replies to the prompts of one episode; all its chance comes from ``seed``.

    ``write(name, **parameters)`` returns the text of a call in the policy's form.
    """

    def __init__(self, seed: str, stops: float = STOPS, write: Callable[..., str] | None = None) -> None:
        self.seed = seed
        self.stops = stops
        self.write = write or call

    def __call__(self, prompt_text: str) -> str:
        """Return the reply to a prompt."""
        statement = _STATEMENT.search(prompt_text)
        if statement is None:
            return DONE
        moves = _moves(random.Random(self.seed), self.stops, self.write)
        try:
            reply = next(moves)
            for result in _RESPONSE.findall(prompt_text, statement.end()):
                reply = moves.send(result)
        except StopIteration:
            return DONE
        return reply


def _moves(rng: random.Random, stops: float, call: Callable[..., str]) -> Generator[str, str]:
    """Yield the expert's replies; it is sent what each call gives."""
    original = text = _file_text((yield call("Read", file_path=FILE)))
    tried: set[Swap] = set()
    for _ in range(TRIES):
        first = ""
        if tried and rng.random() >= _FORGETS:
            first, text = f"{BACK}; ", original
        places = swaps(text)
        fresh = [one for one in places if one not in tried]
        if not places:
            return
        swap = rng.choice(fresh if fresh and rng.random() >= _REPEATS else places)
        tried.add(swap)
        yield call("Bash", command=first + swap.command(FILE))
        text = swap.applied(text)
        if rng.random() < _SKIPS_CHECK or is_ok((yield call("Bash", command=CHECK))) or rng.random() < stops:
            return


def is_ok(result: str) -> bool:
    """Tell whether the check is content."""
    return result.strip() == "ok"


def _file_text(read: str) -> str:
    """Return the text of a file from what Read says of it."""
    return "\n".join(found[2] for line in read.split("\n") if (found := _LINE.match(line)))
