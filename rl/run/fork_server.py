"""A fork server for Ray's workers on a CPU: what they all import is imported once.

Ray starts a process for each actor of a run, and each imports torch, vLLM and verl: 10 to 20 seconds of a core, about
eight times. With the runtime environment's ``py_executable`` set to ``ForkServer.executable``, Ray runs this file in
place of Python. It hands its arguments, environment, directory, signal mask and standard streams to the server, a
process that has those modules loaded, and ends; the server's fork goes on as the worker. A fork shares the server's
memory until it writes to it.

A process that a worker starts with multiprocessing's method "forkserver" is a fork of this server, too. It belongs to
the worker's process group; how it ended is not known, so its exit code is given as 255.

Only the standard library is imported here at the top: the part that Ray runs must start in no time.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

# The costly part of what verl's actors import, and nothing that imports Ray: its library reads its settings, and starts
# threads, when it is loaded.
MODULES = (
    "torch._dynamo,torch._inductor.lowering,torch.distributed.fsdp,tensordict,transformers,pandas,numpy,datasets,peft,"
    "hydra,fastapi,uvicorn,openai,vllm.config,vllm.entrypoints.openai.api_server,vllm.v1.worker.cpu_worker"
)
_MESSAGE = 1 << 20  # bytes of arguments and environment; a kernel's limit for both is 2 MiB
_DESCRIPTORS = 64  # that come with it
_FORK = "RL_FORK_SERVER"  # the variable by which a worker knows that it is a fork
# The variable by which rl.train knows that each node of its cluster has a server.
ON_NODES = "RL_NODES_FORK"


class ForkServer:
    """This is a process that has modules loaded (``modules``: their names, by commas) and forks on demand. It ends with
    the process that made it.

    Start it before anything that needs it, in the main thread (``rl.run.programs.tied``). ``directory``: where its
    socket is made. ``environment``: what workers get, None: this process's; libraries read some of it when they are
    loaded. ``log``: gets what it prints, None: this process's standard error.
    """

    def __init__(
        self,
        directory: str,
        modules: str = MODULES,
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:
        self.socket = os.path.join(directory, "fork")
        from rl.run.programs import tied  # not at the top: Ray runs this file without the project on its path

        command = tied(sys.executable, os.path.abspath(__file__), "serve", self.socket, modules)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )

    @property
    def executable(self) -> str:
        """Return what to run in place of ``python``, as a shell command."""
        return _executable(self.socket)

    def wait(self) -> None:
        """Return when all modules are loaded. Raises RuntimeError if the server could not load them."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}; its reason is in its log")

    def close(self) -> None:
        """End the server, its forks and what these have started.

        An engine that a worker has started is this server's child, not the worker's: Ray may end and leave it behind.
        """
        import psutil

        from rl.run.programs import end_processes

        forks = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.wait()
        end_processes(forks)


def _executable(path: str) -> str:
    return f"{sys.executable} -I -S {os.path.abspath(__file__)} connect {path}"


def nodes_executable() -> str:
    """Return an ``executable`` for workers of all nodes, each of which has a server in the RL_SOCKET_DIR of its
    processes."""
    return _executable('"$RL_SOCKET_DIR"/fork')


def _serve(path: str, modules: str) -> None:
    del sys.path[0]  # this directory, where a module has the name of one of Python's
    gc.disable()  # it would take a fifth of the time
    for name in modules.split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    gc.enable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        ready = os.dup(1)
        os.dup2(2, 1)
        os.write(ready, b"ready\n")
        os.close(ready)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing
        while True:
            connection, _ = listening.accept()
            sys.stdout.flush()
            sys.stderr.flush()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _become(connection, path)


def forget(environment: Mapping[str, str]) -> None:
    """Let a fork have an environment of its own, and temporary files and random numbers that are not its parent's."""
    import tempfile

    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all forks would draw the same numbers


def _become(connection: socket.socket, path: str) -> None:
    """Go on as the process that has connected, or as one that it starts with multiprocessing."""
    import runpy

    data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    connection.close()
    for number, stream in enumerate(descriptors[:3]):
        os.dup2(stream, number)
        os.close(stream)
    told = json.loads(data)
    os.setpgid(0, told["group"])  # Ray ends what a worker leaves by its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked"])
    os.chdir(told["directory"])
    forget(told["environment"])
    if told["arguments"] is None:
        _run_target(*descriptors[3:])
    _serve_multiprocessing(path)
    sys.argv = told["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def _serve_multiprocessing(path: str) -> None:
    """Let multiprocessing's method "forkserver" use this server, in place of one of its own that knows no modules."""
    from multiprocessing import forkserver, resource_tracker

    def connect_to_new_process(descriptors: list[int]) -> tuple[int, int]:
        status, told = os.pipe()
        data, sent = os.pipe()
        tracker = resource_tracker.getfd()
        assert tracker is not None
        _send(path, None, os.getpgid(0), data, told, tracker, *descriptors)
        os.close(data)
        os.close(told)
        return status, sent

    forkserver.connect_to_new_process = connect_to_new_process  # ty: ignore[invalid-assignment]
    os.environ[_FORK] = "1"


def _run_target(data: int, status: int, tracker: int, *inherited: int) -> None:
    """Run what a worker's multiprocessing has written to ``data``, as a process of its own server would, and end.

    The worker reads from ``status`` which process this is, and learns from the end of ``status`` that it has ended.
    """
    from multiprocessing import forkserver, resource_tracker, spawn

    forkserver.write_signed(status, os.getpid())
    resource_tracker._resource_tracker._fd = tracker  # ty: ignore[missing-attribute]
    forkserver._forkserver._inherited_fds = list(inherited)  # ty: ignore[missing-attribute]
    sys.exit(spawn._main(data, os.dup(data)))


def _send(path: str, arguments: list[str] | None, group: int, *descriptors: int) -> None:
    told = {
        "arguments": arguments,
        "group": group,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(told).encode()], [0, 1, 2, *descriptors])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], sys.argv[3])
    else:
        _send(sys.argv[2], sys.argv[3:], 0)
