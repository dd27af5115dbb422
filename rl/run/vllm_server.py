"""vLLM's HTTP server as a program of its own: start it, wait until it answers, and end it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path

from rl.config.compose import CPU_ENVIRONMENT
from rl.run.forks import Fork, Forks
from rl.run.programs import end_of_log, free_port, tied

SERVED_AS = "policy"
CPU_SERVER = "rl.cpu.api_server"
_END_S = 30.0


class ServeError(Exception):
    """The policy cannot be served; the message is one line that says what failed and where to read more."""


class VllmServer:
    """This vLLM server serves one model as ``SERVED_AS`` on a free port, until ``close`` or the end of this process.

    Args:
        model: a model directory or a hub name.
        log: the file to which the server's output is appended.
        arguments: more arguments of vLLM's api_server.
        environment: variables that override this process's own, which override the defaults for a CPU.
        forks: what starts it on a CPU, faster than as a new Python process.
    """

    def __init__(
        self,
        model: str,
        log: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        forks: Forks | None = None,
    ) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._scratch = tempfile.mkdtemp(prefix="rl-")  # vLLM leaves its sockets behind
        defaults = {name: value for name, value in CPU_ENVIRONMENT.items() if not name.startswith("VERL")}
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_RPC_BASE_PATH": self._scratch}
        own = ["--model", model, "--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--port", str(port)]
        own += arguments
        variables = {**defaults, **os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | Fork
        if forks is not None:
            self.process = forks.start(CPU_SERVER, own, variables, log)
            return
        command = tied(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own)
        with open(log, "ab") as out:
            self.process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)

    def wait(self, timeout_s: float) -> None:
        """Block until the server answers. Raises ServeError."""
        end = time.monotonic() + timeout_s
        while not answers(f"{self.url}/health"):
            self.check()
            if time.monotonic() > end:
                raise ServeError(f"the vLLM server does not answer after {timeout_s:g} s; its log: {self.log}")
            time.sleep(0.5)

    def check(self) -> None:
        """Raise ServeError if the server has ended."""
        if self.process.poll() is not None:
            raise ServeError(f"the vLLM server has ended: {end_of_log(self.log)}; the whole log: {self.log}")

    def close(self) -> None:
        """End the server and all that it started."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(_END_S)
            end = time.monotonic() + 5
            while time.monotonic() < end:  # the engine, and the process that removes its shared memory
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_S)
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def vllm_server(
    model: str, log: Path, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 600
) -> Generator[VllmServer]:
    """Yield a ``VllmServer`` that answers and close it at the end. Raises ServeError if it does not come up."""
    server = VllmServer(model, log, *arguments, environment=environment)
    try:
        server.wait(timeout_s)
        yield server
    finally:
        server.close()


def answers(url: str) -> bool:
    """Tell whether an HTTP server answers ``url`` with status 200 within 2 s."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
