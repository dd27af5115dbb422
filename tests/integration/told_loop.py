"""This is our agent loop, whose policy is told what to say: a script's replies, each with the probabilities that the
real engine's weights give it.

So a policy that has learned nothing plays whole episodes in real agents, with sub-agents, and trainer and engine can
be compared. Of each group the first episode repairs its task, the others do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rewards.credit import CreditRow
from rl.quickstart.tasks import CANDIDATES
from rl.train import agent_loop, engine
from rollout.proxy.engine import SAMPLED, Completion
from rollout.proxy.render import turn_end

SUB_CREDIT = 0.75


def credit(rows: Sequence[CreditRow], reward: float) -> list[float]:
    """Give a sub-agent's row the same whatever becomes of its episode."""
    return [reward if row.role == "main" else SUB_CREDIT for row in rows]


def say(tool: str, **asked: str) -> str:
    told = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in asked.items())
    return f"<tool_call>\n<function={tool}>\n{told}</function>\n</tool_call>"


def script(prompt: str, right: bool) -> str:
    """Start sub-agents, wait for what they find, edit, stop."""
    statement = re.search(r"in (\w+\.py) must return the (\w+) of a and b", prompt)
    if statement is None:
        return "It is in line 2."
    answers = prompt.count("<|im_start|>assistant\n") - 1
    new = next(one for name, one in CANDIDATES.items() if (name == statement[2]) == right)
    edit = f"sed -i '2s/.*/    return {new}/' {statement[1]}"
    if "exec_command(" in prompt:
        known = re.search(r'agent_id"?: ?"([\w-]+)', prompt)
        replies = [
            say("multi_agent_v1__spawn_agent", message="Find it."),
            say("multi_agent_v1__wait_agent", targets=f'["{known[1] if known else ""}"]'),
            say("exec_command", cmd=edit),
        ]
    else:
        begins = {"description": "d", "prompt": "Find it.", "run_in_background": "false"}
        kinds = ("Explore", "general-purpose")
        replies = ["\n".join(say("Agent", subagent_type=kind, **begins) for kind in kinds), say("Bash", command=edit)]
    return replies[answers] if answers < len(replies) else "Done."


class Told(engine.VerlEngine):
    """The engine, which scores a reply in place of sampling one."""

    def __init__(self, client: Any, tokenizer: Any) -> None:
        super().__init__(client)
        self.tokenizer = tokenizer
        self.played: dict[str, list[str]] = {}  # the episodes of each file

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        place = re.search(r"in \w+\.py must", prompt)
        episodes = self.played.setdefault(place[0] if place else "", [])
        if request_id not in episodes:
            episodes.append(request_id)
        text = script(prompt, right=episodes.index(request_id) % 2 == 0)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), turn_end(self.tokenizer)]
        assert len(ids) <= sampling["max_tokens"], len(ids)
        engine._attempts.set([])
        out = await self.client.generate(
            request_id=request_id,
            prompt_ids=[*prompt_ids, *ids],
            sampling_params={**sampling, "max_tokens": 1, "prompt_logprobs": 0},
        )
        known = [row[0] for row in out.extra_fields["prompt_logprobs"]]  # of each token after the first
        logprobs = known[len(prompt_ids) - 1 :][: len(ids)]
        return Completion(ids, logprobs, (out.extra_fields["global_steps"],) * len(ids), logprobs_of=SAMPLED)


class Worker(agent_loop.Worker):
    def __init__(self, config: Any, tokenizer: Any, model_type: str, asked: engine.VerlEngine) -> None:
        super().__init__(config, tokenizer, model_type, Told(asked.client, tokenizer))


class Loop(agent_loop.ClaudeCodeAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        agent_loop.Worker = Worker  # what the loop makes; not where this module is only imported
        return await super().run(sampling_params, **row)
