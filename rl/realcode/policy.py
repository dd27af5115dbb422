"""This module makes the policy of realcode: about three million random parameters, and a tokenizer for Python.

The tokenizer's BPE is trained on episodes about the training tasks, as the warm start will play them; of the held-out
tasks it has seen nothing, so their names are spelled in more pieces. Each operator is a token of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewards.task import Task
from rl.quickstart.policy import BASH, EDIT, EDITED, READ, SYSTEM, make_policy, make_tokenizer, rendered
from rl.realcode.script import TryingScript, is_ok
from rl.realcode.swaps import swaps

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "initializer_range": 0.08,
}
# A line break, a tag, an operator with the space before it, a word with it, a digit, indentation, other punctuation.
_PIECES = (
    r"\n|</?[A-Za-z_][^<>\n]*>| ?(?:<=|>=|==|!=|\+=|-=|//|\*\*|[<>+*/%=-])| ?[A-Za-z_]+| ?[0-9]"
    r"|[^\S\n]+(?=\S)| ?[^\sA-Za-z0-9_<>+*/%=!-]+|[^\S\n]+|!"
)
_EPISODES = 3  # of each task, for the tokenizer


def make(out: Path, seed: int, tasks: list[Task]) -> None:
    """Write the model directory ``out``. tasks: those that are trained on."""
    tokenizer = make_tokenizer(_corpus(tasks), pieces=_PIECES)
    make_policy(out, seed, tokenizer=tokenizer, shape=SHAPE)


def _corpus(tasks: list[Task]) -> Iterator[str]:
    for task in tasks:
        for number in range(_EPISODES):
            yield rendered(example_messages(task, f"corpus {number}"), [BASH, EDIT, READ])


def example_messages(task: Task, seed: str) -> list[dict[str, Any]]:
    """Return the chat of an episode that the script plays, with what Claude Code's tools would say."""
    file = task.problem_statement.partition("In ")[2].partition(", ")[0]
    text = (task.snapshot / file).read_text()
    wrong, rng = task.problem_statement.partition(", ")[2].partition(", not ")[0], random.Random(seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.problem_statement},
    ]
    results = {
        "Read": "\n".join(f"{number}\t{line}" for number, line in enumerate(text.split("\n"), 1)),
        "Edit": EDITED.format(file=file),
    }
    script, prompt = TryingScript(seed), f"<|im_start|>user\n{task.problem_statement}"
    assert swaps(text)
    while "<tool_call>" in (reply := script(prompt)):
        name = reply.partition("<function=")[2].partition(">")[0]
        checked = "ok" if rng.random() < 0.2 else f"Exit code 1\n{wrong}"
        result = results.get(name, checked)
        messages += [{"role": "assistant", "content": reply}, {"role": "tool", "content": result}]
        prompt += f"<tool_response>\n{result}\n</tool_response>"
        if is_ok(result):
            break
    return [*messages, {"role": "assistant", "content": "Done."}]
