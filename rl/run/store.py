"""Send the episodes of a run to a store while the run goes on, by a program beside it.

The program is a process of its own (``rl.store``) that reads the records: whatever becomes of it or of the store, the
run does not wait, and what was not sent can be sent later.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from omegaconf import DictConfig

from rl.config.compose import ConfigError
from rl.run.programs import last_lines, tied

LOG = "store.log"
_END_S = 5.0  # for the program to end, after the time in which it may still send


def check_store(config: DictConfig) -> None:
    """Raise ConfigError if ``store.url`` is no URL. Whether a store answers there is not asked: it may come later."""
    url = config.store.url
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"store.url is {url!r}; it must be a URL, such as http://127.0.0.1:4747, or null")


@contextlib.contextmanager
def storing(directory: Path, store: DictConfig, say: Callable[[str], None]) -> Generator[None]:
    """Send the records in ``directory`` to ``store.url`` while the block runs, and say in the end if not all were sent.

    Call it in the main thread. It waits ``store.timeout_s`` and ``_END_S`` at most.
    """
    if store.url is None:
        yield
        return
    command = [sys.executable, "-m", "rl.store", str(directory), "--url", str(store.url), "--follow"]
    command, log = tied(*command, "--timeout", str(store.timeout_s)), directory / LOG
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        said = ""
        try:
            if process.wait(store.timeout_s + _END_S):
                said = last_lines(log.read_text(errors="replace")) or "no output"
        except subprocess.TimeoutExpired:
            said = "the program that sends did not end in time"
        finally:
            process.kill()
            process.wait()
        if said:
            say(f"store: {said[-300:]}; send the rest: {sys.orig_argv[0]} -m rl.store {directory} --url {store.url}")
