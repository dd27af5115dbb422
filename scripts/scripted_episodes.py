"""Play scripted episodes in the form of a policy that is yet to be warm-started: no model runs.

    python scripts/scripted_episodes.py POLICY OUT --tasks FILE --episodes N [key=value ...]
    python -m rl.sft +experiment=NAME policy=POLICY data=[OUT]

The script is realcode's expert, which repairs by trying and makes mistakes (rl/quickstart/realcode/script.py), on tasks
that rl.quickstart.realcode.tasks has made. It plays in the real Claude Code, through the proxy, with POLICY's tokenizer
and template, and calls are written as the template itself writes them. POLICY is a model directory; its weights are not
needed. The same command goes on where it was stopped. Keys are those of rl.train, for +experiment=realcode; the agent,
the proxy and the lengths should be those of the training that follows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rewards.task import Task, load_tasks
from rl.config import compose
from rl.quickstart import prepare
from rl.quickstart.realcode.prepare import REALCODE
from rl.quickstart.realcode.script import TryingScript
from rl.screen import Screen
from rl.tune.rows import rows_of
from rollout import program
from rollout.proxy.render import end_of_turn
from rollout.records import Reader


def writer(tokenizer: Any) -> Callable[..., str]:
    """Return a function that writes a call as the tokenizer's chat template does."""
    ask = [{"role": "user", "content": "?"}]
    before = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
    end = tokenizer.decode(end_of_turn(tokenizer)) or tokenizer.eos_token

    def write(name: str, **parameters: str) -> str:
        function = {"name": name, "arguments": parameters}
        message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        whole = tokenizer.apply_chat_template([*ask, message], tokenize=False)
        text, ended, _ = whole.removeprefix(before).partition(end)
        if not whole.startswith(before) or not ended or name not in text:
            raise SystemExit(f"the chat template does not write a call as the end of a prompt: {whole!r}")
        return text

    return write


def main() -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python scripts/scripted_episodes.py", __doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--episodes", type=int, required=True)
    args, keys = parser.parse_known_args()
    config = compose(["+experiment=realcode", f"quickstart.warm_episodes={args.episodes}", *keys])
    write = writer(AutoTokenizer.from_pretrained(args.policy))

    def scripts(seed: int, tasks: list[Task]) -> list[Any]:
        return [TryingScript(f"{seed}:{number}", write=write) for number in range(len(tasks))]

    args.out.mkdir(parents=True, exist_ok=True)
    began, tasks = time.monotonic(), load_tasks(args.tasks)
    course = replace(REALCODE, scripts=scripts)
    asyncio.run(prepare._play_missing(course, config, tasks, args.policy, args.out, Screen()))
    played = list(Reader(args.out / "episodes"))
    rows = [row for one in played for row in rows_of(one)]
    outcomes = Counter(one.verdict["outcome"] for one in played)
    print(f"{len(played)} episodes in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    tokens, trained = (sum(counts) / len(rows) for counts in zip(*((len(a), sum(b)) for a, b in rows), strict=True))
    print(f"{len(rows)} rows of {tokens:.0f} tokens on average, {trained:.0f} of them trained on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
