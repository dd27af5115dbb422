"""Tests that need a container engine share a small image and the tasks of scripts/task_images.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import http.server
import importlib.util
import inspect
import io
import json
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import DockerSandbox
from rollout.sandbox.docker.engine import OWNER, PROJECT, ContainerEngine, get_engine
from rollout.sandbox.owner import me
from tests.lacks import lacks
from tests.sandboxes import REPOSITORY, history, make_snapshot


@functools.cache
def task_images() -> ModuleType:
    """Import scripts/task_images.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("task_images", REPOSITORY / "scripts" / "task_images.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["task_images"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(function: Any, *arguments: Any) -> Any:
    """Return what an image builder makes; where it cannot work, skip, or fail in continuous integration."""
    try:
        return function(*arguments)
    except SystemExit as error:
        lacks(str(error))


@functools.cache
def base_image() -> str:
    """Return the name of the base image; the first test that ever asks for it makes it, which takes minutes."""
    return made(task_images().base_image, get_engine())


@functools.cache
def small_image() -> str:
    """Return the name of an image with the repository of `history`, made once and kept."""
    kit, base = task_images(), base_image()
    tag = f"{PROJECT}/test:{kit._key(base, inspect.getsource(make_snapshot), inspect.getsource(history))}"
    with images.locked(tag), tempfile.TemporaryDirectory() as name:
        if images.missing(get_engine(), [tag]):
            kit.build_image(get_engine(), history(Path(name, "repo")), tag)
    return tag


async def ready(box: DockerSandbox) -> None:
    """Wait until the spares of a box's engine are there."""
    waiting = [asyncio.wrap_future(made) for made, _ in box._engine.spares._all.values()]
    await asyncio.gather(*waiting, return_exceptions=True)


def left(engine: ContainerEngine) -> list[str]:
    """Return the ids of this process's containers, without those that wait for a boot, which are removed."""
    for sort in [*engine.spares._all]:
        engine.spares._drop(sort)
    return [c["Id"] for c in engine.client.containers(all=True, filters={"label": f"{OWNER}={me()}"})]


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _tiny() -> tuple[bytes, list[bytes]]:
    """Return the config and the layer of an image with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        file = tarfile.TarInfo("file")
        file.size = 1000
        tar.addfile(file, io.BytesIO(bytes(1000)))
    rootfs = {"type": "layers", "diff_ids": [_digest(buffer.getvalue())]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs})
    return config.encode(), [buffer.getvalue()]


def _saved(image: str) -> tuple[bytes, list[bytes]]:
    """Return the config and the layers of an image of the engine."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(get_engine().client.get_image(image)))) as tar:
        files = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
    (manifest,) = json.loads(files["manifest.json"])
    return files[manifest["Config"]], [files[name] for name in manifest["Layers"]]


@contextlib.contextmanager
def registry(repository: str, refusals: int = 0, image: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A registry on this machine with one image: its name, and the paths that were asked for.

    It answers for any repository. image: one of the engine's; without it, the image has one small layer.
    refusals: so many questions for a manifest it refuses first, as a registry with a rate limit does.
    """
    config, layers = _saved(image) if image else _tiny()
    kind = "application/vnd.docker"
    named = [("container.image.v1+json", config), *(("image.rootfs.diff.tar", layer) for layer in layers)]
    parts = [{"mediaType": f"{kind}.{name}", "size": len(data), "digest": _digest(data)} for name, data in named]
    content = {"schemaVersion": 2, "mediaType": f"{kind}.distribution.manifest.v2+json"}
    manifest = json.dumps(content | {"config": parts[0], "layers": parts[1:]}).encode()
    blobs = {_digest(data): data for data in (config, *layers, manifest)} | {"latest": manifest, "": b""}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = blobs.get(self.path.rpartition("/")[2])
            manifests = sum("/manifests/" in path for path in asked)
            if "/manifests/" in self.path and manifests <= refusals:
                data = b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}'
                self.send_response(429)
                self.send_header("Content-Type", "application/json")
            else:
                self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            if data == manifest:
                self.send_header("Content-Type", content["mediaType"])
                self.send_header("Docker-Content-Digest", _digest(manifest))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}/{repository}", asked
        finally:
            server.shutdown()
