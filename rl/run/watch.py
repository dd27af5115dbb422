"""What ends a run when a part of it has died, with one line that says so.

verl waits for ever for the episodes of a worker that is gone, and lets each episode find out by itself that no engine
answers. Ray ends the trainer where it is when its own head dies. So

- ``Watch``, a thread beside the trainer, asks every few seconds whether all actors of the run live and all engines
  answer, and interrupts the trainer with ``Died`` if not;
- ``Witness``, a process forked before anything else, notices that the trainer itself has gone without a farewell (kill
  -9, out of memory, a fatal error inside Ray), says so on the user's screen and removes the run's sockets.
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

from rl.run import stop

PERIOD_S = 5
# What an end by an exception may take, Ray's included, before the process just ends.
END_S = 60
ANSWER_S = 10
# What Ray may take to learn that a process has ended.
RAY_S = 2
DISMISSED = b"\0"


class Died(stop.Ended):
    """A part of the run has died; the message says which."""


class Watch(threading.Thread):
    """Use as a context manager in the main thread, with Ray up. ``engines``: host:port of the inference servers, to be
    set when they run. ``last_words``: called with the cause before the trainer is interrupted. If that does not end it
    in ``END_S`` seconds, the process just ends, with 1."""

    def __init__(self, last_words: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.engines: list[str] = []
        self.last_words = last_words
        self.cause = ""
        self._done = threading.Event()

    def __enter__(self) -> "Watch":
        signal.signal(signal.SIGUSR2, self._interrupt)
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What a death has made fail is told as the death."""
        if self.cause:
            return  # what follows, Ray's end too, is given END_S seconds
        self._done.set()
        self.join()
        if isinstance(error, Exception) and (cause := self.look()):
            self.last_words(cause)
            stop.end(Died(cause))

    def look(self) -> str:
        try:
            if (cause := dead_actor()) or not (cause := dead_engine(self.engines)):
                return cause
            time.sleep(RAY_S)  # nobody answers: Ray may be about to learn which process that was, and why it ended
            return dead_actor() or cause
        except Exception as error:
            return f"Ray's head does not answer: {error}"

    def run(self) -> None:
        while not self.cause:
            if self._done.wait(PERIOD_S):
                return
            self.cause = self.look()
        self.last_words(self.cause)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)  # also out of a sleep and a ray.get
        time.sleep(END_S)
        os._exit(1)

    def _interrupt(self, *_: object) -> None:
        stop.end(Died(self.cause))


def dead_actor() -> str:
    """Which actor of this Ray job died and was not meant to; "" if none. Blocks while Ray's head does not answer."""
    import ray

    # Ray's public list of actors needs its dashboard, a process more; pings of each would queue behind their work.
    # ray 2.58; "for debugging only" there, and tests/integration/test_run_faults.py fails if it is gone.
    from ray._private.state import actors
    from ray.core.generated.common_pb2 import ActorDiedErrorContext as Context

    job = ray.get_runtime_context().get_job_id()
    meant = {Context.RAY_KILL, Context.OUT_OF_SCOPE, Context.REF_DELETED}
    for actor in actors(actor_state_name="DEAD").values():
        death = actor["DeathCause"]
        cause = death.actor_died_error_context
        if actor["JobID"] != job or cause.reason in meant or "INTENDED" in cause.error_message:
            continue
        if death.HasField("oom_context"):
            why = "Ray killed it, its node is short of memory"
        elif death.HasField("actor_died_error_context"):
            why = "its node is gone" if cause.reason == Context.NODE_DIED else "its process ended"
        else:
            continue  # it was never there, which whoever wanted it is told
        return f"{actor['ActorClassName']} (pid {actor['Pid']} on {actor['Address']['IPAddress']}) died: {why}"
    return ""


def dead_engine(addresses: list[str]) -> str:
    """Which inference server does not live any more; "" if all do. One that is busy may take its time."""
    for address in addresses:
        if _health(address) and (problem := _health(address)):  # twice: a connection may break for once
            return f"the inference server at {address} died: {problem}"
    return ""


def _health(address: str) -> str:
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
    return "its engine process ended" if status == 503 else ""  # vLLM's word for it


class Witness:
    """A process that outlives this one by a moment. To be made before there are threads.

    Args:
        line: makes what is said if this process ends without ``dismiss``, from the cause if it could ``tell`` one.
        out: the file descriptor of the user's screen.
        scratch: directories that are removed then. What killed workers have left of their boxes goes, too.
        lock: a file descriptor that is not to be kept open.
    """

    def __init__(self, line: Callable[[str], str], out: int, scratch: Sequence[Path], lock: int) -> None:
        parent = os.pidfd_open(os.getpid())
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read)
            os.close(parent)
            return
        try:
            os.close(lock)
            os.close(self._write)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            select.select([parent], [], [])
            if not (told := os.read(read, 4096)).endswith(DISMISSED):
                with contextlib.suppress(OSError):  # the user's screen may be gone too
                    os.write(out, f"{line(told.decode(errors='replace'))}\n".encode())
                for _ in range(60):  # what Ray has started there ends a little later
                    for directory in scratch:
                        shutil.rmtree(directory, ignore_errors=True)
                    time.sleep(0.5)
                    if not any(directory.exists() for directory in scratch):
                        break
                directory.sweep()
        finally:
            os._exit(0)

    def tell(self, cause: str) -> None:
        """Why this process is about to end."""
        os.write(self._write, cause.encode()[:1000])

    def dismiss(self) -> None:
        """This process ends in its own way."""
        os.write(self._write, DISMISSED)
