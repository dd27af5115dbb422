"""Send the episodes of runs to a LightningStore of agentlightning. docs/traces.md

    python -m rl.store RUN [RUN...] --url http://HOST:4747
    python -m rl.store RUN --url URL --follow        # also those that are still being played, until Ctrl-C

RUN is the directory of a training run, an evaluation or a collection, or one record file. Each attempt is sent once:
what the store has is left out, so the same command goes on after anything. Exit status: 0 the store has all of them, 1
not all, 2 a run does not exist or no store answers, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl.run.screen import Screen, this_command
from rl.traces.store.sending import Sender
from rl.traces.store.server import StoreServer
from rl.traces.store.stores import StoreError
from rollout import program
from rollout.records.reading import Reader

_TRIES_S = (1.0, 2.0, 4.0)  # between tries, when a store fails in the middle


async def send_once(sender: Sender, server: StoreServer, screen: Screen) -> int:
    """Send everything that is there now, and return the exit status. Raises StoreError if no store answers at first."""
    await sender.connect()
    total = sum(path.stat().st_size for path in sender.files)

    def looked(sender: Sender) -> None:
        note = f"{sender.sent} attempts sent, {sender.there} were there"
        screen.show("KB of records", sender.read >> 10, total >> 10, note)

    for wait in (*_TRIES_S, None):
        try:
            await sender.round(looked)
            break
        except StoreError as error:
            if wait is None:
                screen.clear()
                print(f"stopped: {error}; {sender.sent} attempts were sent", file=sys.stderr)
                screen.next(("continue", this_command()))
                return 1
            screen.say(f"{error}; trying again")
            await asyncio.sleep(wait)
    screen.clear()
    screen.say(f"{sender.sent} attempts sent ({server.sent / 1e6:.1f} MB), {sender.there} were there")
    for said in sender.left:
        print(f"store: {said}", file=sys.stderr)
    return 1 if sender.left else 0


async def follow(sender: Sender, timeout_s: float) -> int:
    """Send what is written until a signal, and then what is left, for at most ``timeout_s``; return the exit status."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    def say(text: str) -> None:
        print(f"{time.strftime('%F %T')} {text}", flush=True)

    following, ending = asyncio.create_task(sender.follow(ended, say)), asyncio.create_task(ended.wait())
    await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({following}, timeout=timeout_s)
    ending.cancel()
    whole = following.done() and following.result()
    following.cancel()
    for said in sender.left:
        say(said)
    say(f"{sender.sent} attempts sent{'' if whole else ', not all of them: the same command without --follow goes on'}")
    return 0 if whole else 1


def alone(runs: Sequence[Path], url: str) -> list[socket.socket]:
    """Return what keeps other processes of this machine from sending the same records. Raises StoreError."""
    held = []
    for one in runs:
        mark = hashlib.sha256(f"{one.resolve()} {url}".encode()).hexdigest()
        held.append(socket.socket(socket.AF_UNIX))
        try:
            held[-1].bind(f"\0rl.store-{mark[:32]}")  # an abstract name, which the kernel frees at the end
        except OSError:
            for made in held:
                made.close()
            raise StoreError(f"{one}: another process is sending its episodes to {url}; let it, or end it") from None
    return held


async def run(options: argparse.Namespace, screen: Screen) -> int:
    """Send the records of ``options.runs`` and return the exit status. Raises StoreError."""
    while True:
        try:
            held = alone(options.runs, options.url)
            break
        except StoreError:
            if not options.follow:
                raise
            await asyncio.sleep(1)  # the sender of a run that was killed is about to end
    server = StoreServer(options.url, options.timeout)
    sender = Sender(options.runs, server)
    try:
        if options.follow:
            os.nice(10)  # the run goes first
            return await follow(sender, options.timeout)
        return await send_once(sender, server, screen)
    finally:
        await server.close()
        for one in held:
            one.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.store", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories, or record files")
    add("--url", required=True, help="where agl store listens")
    add("--follow", action="store_true", help="go on until SIGINT or SIGTERM")
    add("--timeout", type=float, default=15.0, metavar="S", help="seconds for a request, and at the end")
    options = parser.parse_args(arguments)
    screen = Screen()
    try:
        if not options.url.startswith(("http://", "https://")):
            raise StoreError(f"--url {options.url}: it must be a URL, such as http://127.0.0.1:4747")
        for source in options.runs:
            Reader(source).files()
        return asyncio.run(run(options, screen))
    except (StoreError, FileNotFoundError) as error:
        screen.clear()
        return program.failed(f"store: {error}", 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 130


if __name__ == "__main__":
    program.end(main)
