"""Serve the model of a vLLM server to any number of Claude Codes. docs/proxy.md

    python -m vllm.entrypoints.openai.api_server --model DIR --host 127.0.0.1 --port 8000
    python -m rollout.proxy --engine http://127.0.0.1:8000 --model DIR --tool-parser qwen3_coder --port 8080
    ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_AUTH_TOKEN=any CLAUDE_CODE_ATTRIBUTION_HEADER=0 claude

It runs until SIGTERM or SIGINT. Exit status: 0 it was asked to end, 1 it could not start, 2 the options are wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from rollout import program
from rollout.proxy.parsers import FORMATS
from rollout.proxy.standalone import EngineRefused, ProxyOptions, StandAlone

if TYPE_CHECKING:
    from rollout.recording import Recording

log = logging.getLogger("rollout.proxy")


def main(argv: list[str] | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT; the process ends here, with status 0 or 1."""
    parser = program.parser("python -m rollout.proxy", __doc__)
    parser.add_argument(
        "--engine",
        required=True,
        type=lambda url: url.rstrip("/"),
        help="URL of the vLLM server, e.g. http://127.0.0.1:8000",
    )
    parser.add_argument("--model", required=True, help="directory or hub name with its tokenizer and chat template")
    parser.add_argument("--tool-parser", required=True, help="vLLM's name for the tool-call format, e.g. qwen3_coder")
    parser.add_argument("--reasoning-parser", help="vLLM's name for the thinking format, e.g. qwen3")
    parser.add_argument("--any-family", action="store_true", help="play it although its chat template does not fit")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one, which is printed")
    parser.add_argument(
        "--token",
        default=os.environ.get("ROLLOUT_PROXY_TOKEN"),
        help="accept only this token (default: $ROLLOUT_PROXY_TOKEN, which no process list shows)",
    )
    parser.epilog = "ROLLOUT_ENGINE_KEY in the environment is the vLLM server's --api-key, if it has one."
    parser.add_argument(
        "--idle", dest="idle_s", type=float, default=3600.0, help="seconds after which an unused session is closed"
    )
    parser.add_argument("--max-sessions", type=int, default=256, help="beyond this, the least recently used is closed")
    parser.add_argument(
        "--grace", dest="grace_s", type=float, default=30.0, help="seconds that calls have to end at shutdown"
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="write each session to DIR when it is closed (docs/records.md)"
    )
    options = vars(parser.parse_args(argv))
    options["engine_key"] = os.environ.get("ROLLOUT_ENGINE_KEY")
    if options["tool_parser"] not in FORMATS:
        parser.error(f"--tool-parser {options['tool_parser']}: must be one of {', '.join(FORMATS)}")
    if (path := Path(options["model"])).is_dir() and not (path / "config.json").is_file():
        parser.error(f"--model {path}: no config.json there; give the directory of a model, or a hub name")
    host, port, directory = options.pop("host"), options.pop("port"), options.pop("record")
    recording = None
    if directory is not None:
        from rollout.recording import Recording  # and with it boxes and grading, which nobody else needs here

        try:
            recording = Recording(directory, options["model"])
        except OSError as error:
            parser.error(f"--record {directory}: {error.strerror}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    status = uvloop.run(_serve(ProxyOptions(**options), host, port, recording))
    if recording is not None:
        recording.close()
    sys.stdout.flush()
    logging.shutdown()
    # A thread may still be importing, and vLLM's exit hooks take seconds. Nothing of ours is open any more.
    os._exit(status)


async def _serve(options: ProxyOptions, host: str, port: int, recording: Recording | None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = StandAlone(options, keep=recording.keep if recording is not None else None)
    try:
        await server.start(host, port)
    except OSError as error:
        log.error("%s:%d: %s", host, port, error)
        await server.stop()
        return 1
    if options.token is None and host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("everyone who can reach %s can use the engine; set --token", host)
    print(f"listening on http://{host}:{server.port}", flush=True)
    loading = asyncio.create_task(server.load())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if loading.done() and (error := loading.exception()) is not None:
        what = "" if isinstance(error, EngineRefused) else f"{options.model}: "
        log.error("%s%s", what, " ".join(str(error).split()))
        status = 1
    else:
        if loading.done():
            log.info("ready: %s, context of %d tokens", server.model.id, server.model.max_model_len)
        await stopping
        loading.cancel()
    await server.stop(options.grace_s)
    return status


if __name__ == "__main__":
    program.end(main)
