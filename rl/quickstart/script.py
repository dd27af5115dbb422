"""This module plays the episodes that the policy is warm-started on, without knowing the right answers.

A ``RepairScript`` is a script for ``rollout.proxy.engine.ScriptedEngine``: it takes the text of a prompt and returns
the text of a reply. It reads the module, names what the statement asks for, replaces the expression that it has read by
one of the four candidates, and stops. The candidate may be the same expression. Edit then answers with an error, and
the policy must have seen how an episode continues after one, or it babbles there until its context is full. The
candidate does not depend on what is asked for: imitation teaches the form of an episode, and only the reward can teach
which edit is right.

The file's name, the word asked for and the expression are taken from the prompt alone, so calls of different episodes
may come in any order.
"""

from __future__ import annotations

import random
import re

from rl.quickstart.tasks import CANDIDATES

DONE = "Done."
_STATEMENT = re.compile(r"\bin (\S+\.py) must return the (\w+) of a and b\.")
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_RETURN = re.compile(r"^\d+\t    return (.+)$", re.MULTILINE)


class RepairScript:
    """A repair script replies to the prompts of quickstart episodes.

    The same seed and order of prompts give the same replies.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        # (word asked for, expression read) -> edits left to draw. Drawing without replacement makes all edits equally
        # frequent for each word. In a few hundred independent draws some would correlate by chance, and the policy
        # would start out believing in that.
        self._bags: dict[tuple[str, str], list[str]] = {}

    def __call__(self, prompt_text: str) -> str:
        """Return the reply to a prompt."""
        statement = _STATEMENT.search(prompt_text)
        if statement is None:
            return DONE
        file, word = statement.groups()
        results = _RESPONSE.findall(prompt_text, statement.end())
        if not results:
            return _call("Read", file_path=file)
        read = _RETURN.search(results[-1])
        if read is None:  # the edit was made, or something went wrong that the script cannot repair
            return DONE
        old, new = read[1], self._edit(word, read[1])
        return f"The {word}: {new}\n" + _call(
            "Edit", file_path=file, old_string=f"return {old}", new_string=f"return {new}"
        )

    def _edit(self, word: str, bug: str) -> str:
        bag = self._bags.setdefault((word, bug), [])
        if not bag:
            bag.extend(CANDIDATES.values())
            self._rng.shuffle(bag)
        return bag.pop()


def _call(name: str, **parameters: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"
