"""A stand-in for Modal's service: each sandbox is a container. Every call is bound to the SDK's own signature."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import modal
import pytest
from modal.container_process import ContainerProcess
from modal.io_streams import StreamWriter


def bound(real: Any, does: Callable[..., Awaitable[Any]], *this: object) -> SimpleNamespace:
    """A method of the SDK, which takes what the real one takes. this: None for what a method calls self."""

    async def aio(*args: Any, **options: Any) -> Any:
        inspect.signature(real).bind(*this, *args, **options)
        return await does(*args, **options)

    return SimpleNamespace(aio=aio)


class Image:
    def __init__(self, name: str, files: tuple[tuple[Any, str], ...] = ()) -> None:
        self.name, self.files = name, files

    def add_local_file(self, *args: Any, **options: Any) -> Image:
        inspect.signature(modal.Image.add_local_file).bind(None, *args, **options)
        return Image(self.name, (*self.files, args))


class Process:
    def __init__(self, program: asyncio.subprocess.Process) -> None:
        assert program.stdin is not None
        assert all(hasattr(StreamWriter, name) for name in ("write", "write_eof"))
        self.stdout, self.stderr = self._chunks(program.stdout), self._chunks(program.stderr)
        drain = bound(StreamWriter.drain, program.stdin.drain, None)
        self.stdin = SimpleNamespace(write=program.stdin.write, write_eof=program.stdin.write_eof, drain=drain)
        self.wait = bound(ContainerProcess.wait, program.wait, None)

    async def _chunks(self, stream: Any) -> Any:
        while data := await stream.read(1 << 16):
            yield data


class Sandbox:
    """A container without a network, in which commands are root's unless they say otherwise."""

    def __init__(self, container: str) -> None:
        self.container = container
        self.exec = bound(modal.Sandbox.exec, self._exec, None)
        self.terminate = bound(modal.Sandbox.terminate, self._terminate, None)

    @classmethod
    async def made(cls, *argv: str, image: Image, block_network: bool, **options: Any) -> Sandbox:
        assert block_network
        run = ("run", "--detach", "--rm", "--init", "--network=none", image.name, *argv)
        container = await cls._docker(*run)
        for path, inside in image.files:
            await cls._docker("exec", container, "mkdir", "-p", inside.rpartition("/")[0])
            await cls._docker("cp", str(path), f"{container}:{inside}")
        return cls(container)

    @staticmethod
    async def _docker(*argv: str) -> str:
        done = await asyncio.to_thread(subprocess.run, ["docker", *argv], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    async def _exec(self, *argv: str, env: dict[str, str] | None = None, workdir: str | None = None, text: bool) -> Any:
        assert not text
        where = [f"--workdir={workdir}"] if workdir else []
        told = [f"--env={key}={value}" for key, value in (env or {}).items()]
        command = ["docker", "exec", "--interactive", *where, *told, self.container, *argv]
        pipe = asyncio.subprocess.PIPE
        return Process(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe))

    async def _terminate(self) -> None:
        await self._docker("rm", "--force", self.container)


def replace_service(patch: pytest.MonkeyPatch) -> None:
    """Let the SDK lead to containers of this machine."""

    async def found(*args: Any, **options: Any) -> object:
        return object()

    app, create, registry = modal.App.lookup, modal.Sandbox.create, modal.Image.from_registry
    patch.setattr(modal.App, "lookup", bound(app, found))
    patch.setattr(modal.Sandbox, "create", bound(create, Sandbox.made))
    patch.setattr(modal.Image, "from_registry", lambda name: inspect.signature(registry).bind(name) and Image(name))
