"""The watch over a run's processes: the run ends with one clear line when one of them has died.

verl waits forever for the episodes of a worker that has died, and lets each episode find out by itself that no engine
answers. When Ray's own head dies, Ray kills the trainer without a word. So

- ``Watchdog``, a thread beside the trainer, asks every few seconds whether all actors of the run are alive and all
  engines answer, and interrupts the trainer with ``PartDied`` if not;
- ``Witness``, a process forked before anything else, notices when the trainer itself disappears without a farewell
  (kill -9, out of memory, a fatal error inside Ray), says so on the user's screen and removes the run's sockets.
"""

import contextlib
import http.client
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.run import stop
from rollout.sandbox import directory

PERIOD_S = 5
END_S = 60  # for the trainer to end after PartDied was raised, Ray's shutdown included; then the process just exits
ANSWER_S = 10  # for an engine to answer
RAY_S = 2  # for Ray to learn that a process has ended
DISMISSED = b"\0"


class PartDied(stop.RunEnded):
    """A part of the run has died; the message says which."""


class Watchdog(threading.Thread):
    """A watchdog interrupts the trainer when a part of the run has died.

    Use it as a context manager in the main thread, with Ray up. ``engines`` holds host:port of the inference servers;
    set it when they are up. ``last_words`` is called with the cause before the trainer is interrupted. If the process
    has not ended ``END_S`` seconds later, it exits with status 1.
    """

    def __init__(self, last_words: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.engines: list[str] = []
        self.last_words = last_words
        self.cause = ""
        self._done = threading.Event()

    def __enter__(self) -> "Watchdog":
        signal.signal(signal.SIGUSR2, self._interrupt)
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop watching. If the trainer raised because an actor or engine died, raise that death instead."""
        if self.cause:
            return  # the thread goes on: it gives the end of the process, Ray's included, END_S seconds
        self._done.set()
        self.join()
        if isinstance(error, Exception) and (cause := self.look()):
            self.last_words(cause)
            stop.end(PartDied(cause))

    def look(self) -> str:
        """Return which part of the run has died; "" if none has."""
        try:
            if (cause := dead_actor()) or not (cause := dead_engine(self.engines)):
                return cause
            time.sleep(RAY_S)  # Ray may be about to learn which process that was, and why it ended
            return dead_actor() or cause
        except Exception as error:
            return f"Ray's head does not answer: {error}"

    def run(self) -> None:
        """Look every ``PERIOD_S`` seconds until the context ends or something has died."""
        while not self.cause:
            if self._done.wait(PERIOD_S):
                return
            self.cause = self.look()
        self.last_words(self.cause)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)  # this also interrupts a sleep and a ray.get
        time.sleep(END_S)
        os._exit(1)

    def _interrupt(self, *_: object) -> None:
        stop.end(PartDied(self.cause))


def dead_actor() -> str:
    """Return which actor of this Ray job has died unexpectedly; "" if none has. Blocks while Ray's head is silent."""
    import ray

    # Ray's public list of actors needs its dashboard, one more process; a ping would queue behind the actor's work.
    # These private names are in docs/architecture.md, "Patches at run time".
    from ray._private.state import actors
    from ray.core.generated import common_pb2

    Context: Any = vars(common_pb2)["ActorDiedErrorContext"]  # protobuf makes it at run time
    job = ray.get_runtime_context().get_job_id()
    expected = {Context.RAY_KILL, Context.OUT_OF_SCOPE, Context.REF_DELETED}
    for actor in actors(actor_state_name="DEAD").values():
        death = actor["DeathCause"]
        cause = death.actor_died_error_context
        if actor["JobID"] != job or cause.reason in expected or "INTENDED" in cause.error_message:
            continue
        if death.HasField("oom_context"):
            why = "Ray killed it, its node is short of memory"
        elif death.HasField("actor_died_error_context"):
            why = "its node is gone" if cause.reason == Context.NODE_DIED else "its process ended"
        else:
            continue  # it never started, and whoever asked for it is told so
        return f"{actor['ActorClassName']} (pid {actor['Pid']} on {actor['Address']['IPAddress']}) died: {why}"
    return ""


def dead_engine(addresses: list[str]) -> str:
    """Return which inference server has died; "" if none has. A busy one may take its time to answer."""
    for address in addresses:
        if _health(address) and (problem := _health(address)):  # asked twice: a single connection may break
            return f"the inference server at {address} died: {problem}"
    return ""


def _health(address: str) -> str:
    """Return why the server at ``address`` is dead; "" if it answers or is busy."""
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except TimeoutError:
        return ""
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "its engine process ended" if status == 503 else ""  # vLLM answers 503 then


class Witness:
    """A witness is a process that outlives this one for a moment. Make it before there are threads.

    Args:
        line: makes the line that is printed if this process ends without ``dismiss``, from the cause given to ``tell``,
            "" if there was none.
        out: file descriptor of the user's screen.
        scratch: directories to remove in that case. Sandboxes of killed workers are removed too.
    """

    def __init__(self, line: Callable[[str], str], out: int, scratch: Sequence[Path]) -> None:
        parent = os.pidfd_open(os.getpid())
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read)
            os.close(parent)
            return
        try:
            os.close(self._write)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            select.select([parent], [], [])
            if not (told := os.read(read, 4096)).endswith(DISMISSED):
                with contextlib.suppress(OSError):  # the user's screen may be gone too
                    os.write(out, f"{line(told.decode(errors='replace'))}\n".encode())
                _remove(scratch)
                directory.sweep()
        finally:
            os._exit(0)

    def tell(self, cause: str) -> None:
        """Say why this process is about to end."""
        os.write(self._write, cause.encode()[:1000])

    def dismiss(self) -> None:
        """Tell the witness that this process ends in an orderly way."""
        os.write(self._write, DISMISSED)


def _remove(directories: Sequence[Path]) -> None:
    for _ in range(60):  # what Ray has started there ends a little later
        for path in directories:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.5)
        if not any(path.exists() for path in directories):
            return
