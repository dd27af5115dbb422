"""Send the calls of episodes to two vLLM engines on this machine's CPU by verl's own balancer, and count their hits.

    python scripts/compare_routing.py [RUN...] [--room TOKENS] [--boxes N]

The episodes are those of ``python -m rl.plan.routing``, recorded or drawn (4 groups of 4). Each block of a prompt has
ids of its own; each reply is one token of a model with random weights, so the rest of the recorded reply is new in the
next prompt. An engine's cache has ``--room`` tokens in blocks of 32, and so many episodes are played at a time as there
are boxes. verl's balancer is asked with three names: the episode's, as our engine does, one for each call, and the
task's. Printed are the share of the prompts' tokens that vLLM found in its caches, that share in simulated time, and
the calls of the engine that got more of them. Takes a minute and 1.1 GB.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import Any

from rl.plan.routing import RoutingSetting, SimulatedEpisode, drawn, play, recorded
from rollout import program

_WORDS = 32_000
_NAMES = {  # what verl's balancer is asked with, and what that is in simulated time
    "the episode": "the episode's, at first fewest calls (verl)",
    "the call": "fewest calls",
    "the task": "the episode's, at first its group's",
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # both engines live in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


def engines(directory: Path, setting: RoutingSetting, longest: int) -> list[Any]:
    """Start vLLM engines with random weights: one layer, one head."""
    from vllm import LLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": _WORDS, "max_position_embeddings": longest}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, **shape}
    (directory / "config.json").write_text(json.dumps(config))
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    given |= {"max_model_len": longest, "block_size": setting.block, "max_num_seqs": setting.boxes}
    given |= {"num_gpu_blocks_override": setting.room // setting.block, "enable_prefix_caching": True}
    return [LLM(str(directory), **given).llm_engine for _ in range(setting.replicas)]


def counted(running: list[Any], episodes: list[SimulatedEpisode], name_of: Any, boxes: int) -> tuple[float, int]:
    """Play episodes. Return the share of prompt tokens that were cached, and the calls of the busier engine."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer
    from vllm import SamplingParams

    for engine in running:
        engine.reset_prefix_cache()
    balancer = GlobalRequestLoadBalancer({str(i): engine for i, engine in enumerate(running)})
    queue, asked, sent = deque(episodes), dict[str, tuple[SimulatedEpisode, int, str]](), Counter[str]()
    ready = [(queue.popleft(), 0) for _ in range(min(boxes, len(queue)))]
    hits = prompts = 0
    while ready or asked:
        for one, at in ready:
            call, name = one.calls[at], f"{id(one)}-{at}"
            where, engine = balancer.acquire_server(name_of(one, at))
            ids = [token for block in call.blocks for token in _ids(block, 32)]
            ids += _ids(name, call.prompt - len(ids))
            engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, detokenize=False))
            asked[name], sent[where] = (one, at, where), sent[where] + 1
        ready = []
        for done in [done for engine in running for done in engine.step() if done.finished]:
            one, at, where = asked.pop(done.request_id)
            balancer.release_server(where)
            hits, prompts = hits + (done.num_cached_tokens or 0), prompts + len(done.prompt_token_ids)
            if at + 1 < len(one.calls):
                ready.append((one, at + 1))
            elif queue:
                ready.append((queue.popleft(), 0))
    return hits / prompts, max(sent.values())


@functools.cache
def _ids(name: Any, count: int) -> list[int]:
    draw = random.Random(repr(name))
    return [draw.randrange(2, _WORDS) for _ in range(count)]


def main() -> None:
    """Print a row for each name."""
    parser = program.parser("python scripts/compare_routing.py", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directories of runs with records")
    parser.add_argument("--room", type=int, default=24_000, help="tokens of an engine's cache (default: 24000)")
    parser.add_argument("--boxes", type=int, default=16, help="episodes that are played at a time (default: 16)")
    options = parser.parse_args()
    setting = RoutingSetting(replicas=2, room=options.room, boxes=options.boxes, block=32)
    small = drawn(4, 4, setting, calls=8, head=1_200, task=200, read=120, sampled=40)
    episodes = [one for run in options.runs for one in recorded(run, setting)] or small
    for one in episodes:  # a reply is one token
        one.calls = [dataclasses.replace(call, blocks=call.blocks[: call.asked], sampled=1) for call in one.calls]
    calls = sum(len(one.calls) for one in episodes)
    print(f"{len(episodes)} episodes, {calls} calls; {setting}")
    os.environ |= _ENVIRONMENT
    names = {
        "the episode": lambda one, at: str(id(one)),
        "the call": lambda one, at: f"{id(one)}-{at}",
        "the task": lambda one, at: one.group,
    }
    with tempfile.TemporaryDirectory() as directory:
        longest = max(call.prompt for one in episodes for call in one.calls) + 1
        running = engines(Path(directory), setting, longest)
        print("| verl's balancer is asked with | cached by vLLM | in simulated time | calls of the busier engine |")
        print("| --- | --- | --- | --- |")
        for name, of in names.items():
            found, most = counted(running, episodes, of, setting.boxes)
            planned = play(episodes, _NAMES[name], setting).cached
            print(f"| {name} | {found:.1%} | {planned:.1%} | {most} of {calls} |", flush=True)


if __name__ == "__main__":
    program.end(main)
