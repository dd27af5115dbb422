"""See what the policy does: a local, read-only web page over runs' records, while they are written or after.

    python -m rollout.view RUN [RUN...] [--port N] [--host ADDRESS] [--model DIRECTORY] [--labels NAME]
    python -m rollout.view RUN [RUN...] --bundle OUT      write the pages as files, to show or send without this program

RUN is a directory with records (of a training run, an evaluation, a collection, a selection) or one record file. The
server listens on this machine only. With another --host it needs a token, which it makes and prints. docs/records.md
says what the pages show.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from rl.view import bundle
from rl.view.index import caches
from rl.view.library import Library
from rl.view.server import application, is_loopback
from rollout import program

_PORT = 8300


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the pages until a signal comes; return the exit status, 2 if a run does not exist or the port is taken."""
    parser = program.parser("python -m rollout.view", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, or record files")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default: {_PORT}; 0 for any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--model", type=Path, help="directory of the policy's tokenizer (default: the recorded one)")
    text = "let NAME say something of episodes and turns: it goes to RUN/labels, for rl.data.select and rl.export"
    parser.add_argument("--labels", metavar="NAME", default="", help=text)
    text = "write the pages as files that any web server shows, and end: into a new directory, or a file OUT.zip"
    parser.add_argument("--bundle", type=Path, metavar="OUT", help=text)
    args = parser.parse_args(arguments)
    if args.labels and not re.fullmatch(r"[\w-]{1,40}", args.labels):
        parser.error("--labels: a name has 1 to 40 letters, digits, - and _")

    token = "" if is_loopback(args.host) else secrets.token_urlsafe(24)
    try:
        library = Library(args.runs, caches(), args.model, args.labels)
    except FileNotFoundError as error:
        return program.failed(f"view: {error}", 2)

    if args.bundle:
        library.static, library.who = True, ""
        library.refresh()
        try:
            print(f"{args.bundle}: {bundle.write(library, args.bundle)} pages; begin with index.html")
        except OSError as error:
            return program.failed(f"view: --bundle: {error}; nothing was written", 2)
        return 0
    try:
        asyncio.run(_serve(application(library, token), args.host, args.port, token))
    except OSError as error:
        return program.failed(f"view: {args.host}:{args.port}: {error.strerror or error}; choose another --port", 2)
    return 0


async def _serve(app: web.Application, host: str, port: int, token: str) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        place = f"[{host}]" if ":" in host else host
        print(f"http://{place}:{runner.addresses[0][1]}/{f'?token={token}' if token else ''}", flush=True)
        print("Ctrl-C ends it. Nothing in the runs is changed, labels excepted.", flush=True)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()
