"""Say what the policy says in each scene, with each agent's own tools. A prompt names its episode: SCENE agent scene n.

The n-th call of a thread gets the n-th reply, and the last one for ever; every reply has a number of its own, so that
no two are equal. Each begins with thinking, as Qwen3's do: vLLM's parser takes a text in which none ends for thinking.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

_NAMED = re.compile(r"SCENE (\w+) (\w+) (\w+)")
_THINKS = "<think>\nWhat is next?\n</think>\n\n"
SCENES = ("loop", "parallel", "error", "cut", "thinking", "spelling", "sub_agent", "compaction")


def _call(name: str, **arguments: object) -> str:
    """Return a call as Qwen3's chat template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _run(agent: str, command: str) -> str:
    if agent == "claude_code":
        return _call("Bash", command=command, description="Runs it")
    return _call("bash", command=command)


def plays(agent: str, scene: str) -> bool:
    """Tell whether an agent has what a scene is about."""
    return agent == "claude_code" or scene not in ("sub_agent", "compaction")


def _replies(agent: str, scene: str, name: str) -> list[str]:
    def run(command: str) -> str:
        return _run(agent, f"{command} # @@")

    done = _run(agent, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if agent == "mini_swe_agent" else "All is done."
    look, more, last = run("cat a.txt"), run("printf '    two\\n\\n  three\\n'"), f"I am through (@@).\n{done}"
    if scene == "parallel":
        return [f"Both at once.\n{look}\n{more}", last]
    if scene == "error":
        return [run("echo one; exit 3"), _call("no_such_tool", x="@@"), more, last]
    if scene == "thinking":
        return [
            f"<think>\nLet me see.\n\n  First, look.\n</think>\n\nI look.\n{look}",
            f"<think>\nTwo more.\n</think>\n\n{more}",
            f"<think>\nEnough.\n</think>\n\n{last}",
        ]
    if scene == "spelling":  # as a policy at temperature 1 says it, not as the template would write it
        tool = "Bash" if agent == "claude_code" else "bash"
        loose = json.dumps({"arguments": {"description": "é", "command": "cat  a.txt # @@"}, "name": tool}, indent=1)
        code = "Two ways:\n\n    def f():\n        return 1\n\n\nand so on. "
        return [f"{code}\n\n<tool_call>\n{loose}\n</tool_call>", f"\nSo\x00me|thing\x00 else.\n\n{more}\n", last]
    if scene == "sub_agent":
        task = _call("Agent", description="d", prompt=f"Look around. SUB {name}", subagent_type="general-purpose")
        return [f"Someone else may look (@@).\n{task}", more, last]
    if scene == "compaction":
        return [f"Step.\n{run('seq 1 1700')}" for _ in range(12)] + [last]
    return [f"I look first.\n{look}", more, run("echo four"), last]


class Script:
    """The replies of all episodes."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.calls = Counter[tuple[str, bool]]()

    def reply(self, prompt: str) -> list[str]:
        """Return the next reply to a prompt, in the pieces in which it is encoded: a policy does not always choose the
        tokens that a tokenizer would."""
        named = _NAMED.search(prompt)
        if named is None:
            return ["Hello."]
        agent, scene, _ = named.groups()
        sub = "SUB SCENE" in prompt and "MAIN SCENE" not in prompt
        if scene == "compaction" and "summary" in prompt[-9000:] and "continued from a previous" not in prompt:
            text, self.calls[named[0], sub] = f"<summary>\nMAIN {named[0]}: lines were read (@@).\n</summary>", 12
        else:
            number = self.calls[named[0], sub]
            self.calls[named[0], sub] += 1
            looks = ["I look.\n" + _run(agent, "cat a.txt # @@"), "It is there (@@)."]
            known = looks if sub else _replies(agent, scene, named[0])
            text = known[min(number, len(known) - 1)]
        text = text if text.startswith("<think>") else _THINKS + text
        return text.replace("@@", f"no. {next(self.numbers)}").split("\x00")
