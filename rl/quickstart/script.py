"""The script of the quickstart's warm start, which plays its episodes without knowing the right answers.

A ``RepairScript`` is a script for ``rollout.proxy.engine.ScriptedEngine``: it takes the text of a prompt and returns
the text of a reply. It reads the module, names what the statement asks for, replaces the expression that it has read by
one of the four candidates, and stops. It uses Read and Edit, or commands if the agent has a tool for these. The
candidate may be the same expression. Edit then answers with an error, and the policy must have seen how an episode
continues after one, or it babbles there until its context is full. The candidate does not depend on what is asked for:
imitation teaches the form of an episode, and only the reward can teach which edit is right.

Each episode has a script of its own, and its candidate is drawn ahead (``draw``). So an episode is the same whatever
others are played before or beside it, and those that an earlier start has played need not be played again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from rewards.task import Task
from rl.quickstart.tasks import CANDIDATES

DONE = "Done."
_STATEMENT = re.compile(r"\bin (\S+\.py) must return the (\w+) of a and b\.")
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
# A line of the module, as Read or cat shows it, or in JSON.
_RETURN = re.compile(r"(?:^(?:\d+\t)?|\\n)    return ([^\n\\]+)", re.MULTILINE)
# Tools that run a command, with the parameters that they require, as the policy's template shows them.
_SHELL = re.compile(r"^(bash|exec_command|run_shell_command|terminal)\(((?:command|cmd)\b[^)]*)\)", re.MULTILINE)
# mini-swe-agent, whose prompts begin so, ends with this command, the others with a reply without a call.
_MINI, SUBMIT = "\nPlease solve this issue: ", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class RepairScript:
    """A repair script replies to the prompts of one quickstart episode, and replaces the expression by ``new``."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __call__(self, prompt_text: str) -> str:
        """Return the reply to a prompt."""
        statement = _STATEMENT.search(prompt_text)
        if statement is None:
            return DONE
        file, word = statement.groups()
        results = _RESPONSE.findall(prompt_text, statement.end())
        shell = _SHELL.search(prompt_text)
        if not results:
            return _run(shell, f"cat {file}") if shell else _call("Read", file_path=file)
        read = _RETURN.search(results[-1])
        if read is None:  # the edit was made, or something went wrong that the script cannot repair
            return _run(shell, SUBMIT) if shell and _MINI in prompt_text else DONE
        if shell:
            edit = _run(shell, sed(file, self.new))
        else:
            edit = _call("Edit", file_path=file, old_string=f"return {read[1]}", new_string=f"return {self.new}")
        return f"The {word}: {self.new}\n{edit}"


def sed(file: str, new: str) -> str:
    """Return the command that replaces the expression that a file's function returns, as short as can be: a policy that
    is right about the expression must not fail at the rest. (Qwen Code wants to read a file for any simpler `sed -i`.)
    """
    return f"sed -i '2s/.*/    return {new}/' {file}"


def asked(task: Task) -> tuple[str, str]:
    """Return the word that a task's statement asks for, and the expression that its repository has."""
    statement = _STATEMENT.search(task.problem_statement)
    assert statement is not None, task.problem_statement
    source = (task.snapshot / statement[1]).read_text()
    return statement[2], source.partition("return ")[2].strip()


def draw(seed: int, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Draw a candidate for each episode, given what is ``asked``; the same arguments give the same candidates.

    Drawing without replacement makes all edits equally frequent for each pair. In a few hundred independent draws some
    would correlate by chance, and the policy would start out believing in that.
    """
    rng = random.Random(seed)
    bags: dict[tuple[str, str], list[str]] = {}  # candidates left to draw
    drawn = []
    for pair in pairs:
        bag = bags.setdefault(pair, [])
        if not bag:
            bag.extend(CANDIDATES.values())
            rng.shuffle(bag)
        drawn.append(bag.pop())
    return drawn


def _run(shell: re.Match[str], command: str) -> str:
    """Return a call that runs a command."""
    first, *others = shell[2].split(", ")
    return _call(shell[1], **{first: command}, **{name: "false" if name.startswith("is_") else "" for name in others})


def _call(name: str, **parameters: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"
