"""vLLM's own API server, whose engine is a script: it samples at once, and writes down what it sampled.

    python scripts/exactness/engine.py MODEL PORT LOG

Chat template, parsers, token ids and every API are vLLM's; only the sampling is not. Each line of LOG is a prompt, the
ids sampled for it, and their log-probabilities, which tell every sampled token from every other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from scenes import Script
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from rollout import POLICY_MODEL, SIDE_MODEL

TASKS = ("generate",)


class Scripted:
    """A Scripted stands for an engine before vLLM's server."""

    is_running, is_stopped, errored = True, False, False
    dead_error = RuntimeError("never dead")

    def __init__(self, config: Any, log: Path) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.log, self.script, self.tokens = log.open("w"), Script(), itertools.count(1)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield the script's reply in one piece."""
        ids, tokenizer = list(prompt["prompt_token_ids"]), self.renderer.get_tokenizer()
        pieces = [*self.script.reply(tokenizer.decode(ids)), "<|im_end|>"]
        said = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        logprobs = [-next(self.tokens) / 1024 for _ in said]
        print(json.dumps([ids, said, logprobs]), file=self.log, flush=True)
        known = [{t: Logprob(p, 1, tokenizer.decode([t]))} for t, p in zip(said, logprobs, strict=True)]
        text = tokenizer.decode(said[:-1], skip_special_tokens=sampling_params.skip_special_tokens)
        output = CompletionOutput(0, text, said, sum(logprobs), known, finish_reason="stop")
        yield RequestOutput(request_id, None, ids, None, [output], True, num_cached_tokens=0)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return that it generates."""
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        """Return that it traces nothing."""
        return False


async def main(model: str, port: str, log: str) -> None:
    """Serve until the process is ended."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [
            *("--model", model, "--served-model-name", POLICY_MODEL, SIDE_MODEL, "--enable-auto-tool-choice"),
            *("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--logprobs-mode", "processed_logprobs"),
        ]
    )
    engine: Any = Scripted(AsyncEngineArgs.from_cli_args(args).create_engine_config(), Path(log))
    app = build_app(args, TASKS, engine.model_config)
    await init_app_state(engine, app.state, args, TASKS)
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning"))
    print('@"ready"', flush=True)
    await server.serve()


asyncio.run(main(*sys.argv[1:]))
