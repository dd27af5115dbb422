"""Run Claude Code over tasks without training, and keep everything that the episodes say. docs/traces.md

    python -m rollout.collect vllm      data=FILE endpoint=URL models.high=NAME models.low=NAME [key=value ...]
    python -m rollout.collect anthropic data=FILE models.high=NAME models.low=NAME [key=value ...]
    python -m rollout.collect openai    data=FILE models.high=NAME models.low=NAME [endpoint=URL] [key=value ...]
    python -m rollout.collect expert    data=FILE policy=MODEL [expert.check=COMMAND] [+experiment=NAME] [key=value ...]

vllm: any vLLM server (or policy=DIR, for which one is started), with exact token ids and logprobs. anthropic: the
official API, with the key in ANTHROPIC_API_KEY. openai: any endpoint of chat completions, with the key in
OPENAI_API_KEY; endpoint=URL is what /chat/completions comes after. key_env=NAME names another variable, key_env=null
none. The key stays in this process. expert: no model runs; a script that knows the gold patches and finds them by
trying plays in the form of the policy, which can be fine-tuned on it (rl.sft).

    models.high, models.low     what answers for Claude Code's opus and sonnet, and for its haiku
    agent.max_turns=30  agent.timeout_s=1800  limit=N  epochs=1  sandbox.concurrency=N  cooldown_s=0
    grade=false                 dry run: nothing is graded, and there is no reward
    agent.settings= agent.hooks= agent.mcp_servers= agent.skills= agent.output_style= agent.append_system_prompt=
    out=DIR                     default: outputs/collect/<name>-<hash of what decides how an episode ends>

All keys: configs/collect.yaml and configs/evaluate.yaml. The same command continues a collection that was stopped, and
retries the episodes that were lost to the infrastructure. Exit status: 0 every episode has ended, 1 not all have, 2 the
config is wrong, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from omegaconf import DictConfig

from rl.config.compose import ConfigError
from rl.evaluate.config import check_evaluation, compose_evaluation
from rl.evaluate.run import play_all, run
from rl.run.screen import Screen
from rl.traces.collect.outputs import Collection
from rollout import program

# The overrides that each back end stands for; those of the command line come after them.
BACKENDS = {
    "vllm": ["protocol=tokens"],
    "anthropic": ["protocol=messages", "endpoint=https://api.anthropic.com", "key_env=ANTHROPIC_API_KEY"],
    "openai": ["protocol=chat", "endpoint=https://api.openai.com/v1", "key_env=OPENAI_API_KEY"],
    "expert": ["protocol=expert"],
}


def fill_slots(config: DictConfig) -> None:
    """Let the model of the low slot answer side calls. Raises ConfigError if a slot has no model."""
    high, low = config.models.high, config.models.low
    if config.policy and not (high or low):
        return  # the policy is both
    if unset := [name for name in ("high", "low") if not config.models[name]]:
        raise ConfigError(*(f"models.{name} is not set; name a model of the back end" for name in unset))
    if low == high:
        return
    if config.proxy.side_calls == "forward":
        raise ConfigError("models.low answers side calls; leave out proxy.side_calls=forward")
    chat, url = config.protocol != "messages", str(config.endpoint)
    config.proxy.side_calls = "forward"
    config.proxy.side_endpoint.protocol = "chat" if chat else "messages"
    config.proxy.side_endpoint.url = f"{url.rstrip('/')}/v1" if config.protocol == "tokens" else url
    config.proxy.side_endpoint.model, config.proxy.side_endpoint.key_env = low, config.key_env


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(program.plain(__doc__))
        return 0 if arguments else 2
    screen = Screen()

    def work() -> Awaitable[int]:
        backend, *overrides = arguments
        if backend not in BACKENDS:
            raise ConfigError(f"{backend}: the first argument is a back end: {', '.join(BACKENDS)}; see --help")
        config, weights = compose_evaluation([*BACKENDS[backend], *overrides], "collect")
        if backend == "expert":
            from rl.traces.collect.expert import ExpertCollection, playable

            tasks = playable(check_evaluation(config, "collect"), config.agent.tools, screen)
            return play_all(config, weights, tasks, screen, ExpertCollection(config))
        fill_slots(config)
        return play_all(config, weights, check_evaluation(config, "collect"), screen, Collection(config))

    return run(screen, work)
