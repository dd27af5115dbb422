"""Read and write single files of a container through the engine's archive calls.

The engine follows links in all but the last part of a path (never out of the container). The agent may have put a link
anywhere, so every part is looked at first.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from docker.errors import NotFound

from rollout.sandbox import HOME, WORKDIR, SandboxError
from rollout.sandbox.docker.engine import ContainerEngine

# Bits of Go's FileMode, which the engine speaks.
_GO_DIRECTORY, _GO_TYPE = 1 << 31, 0x8F280000


def write(
    engine: ContainerEngine, container: str, base: str, relative: PurePosixPath, data: bytes, owner: tuple[int, int]
) -> None:
    """Write base/relative with mode 0644; missing directories are made.

    Raises SandboxError put_failed if a part of the path is not a directory.
    """
    place, missing = PurePosixPath(base), list(relative.parts[:-1])
    status = engine.stat(container, base)
    while True:
        if not is_directory(status):
            raise SandboxError("put_failed", f"{place} is no directory")
        if not missing or (status := engine.stat(container, str(place / missing[0]))) is None:
            break
        place /= missing.pop(0)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for depth in range(1, len(missing) + 1):
            tar.addfile(_member("/".join(missing[:depth]), owner, tarfile.DIRTYPE, 0o755))
        name = "/".join([*missing, relative.name])
        tar.addfile(_member(name, owner, tarfile.REGTYPE, 0o644, len(data)), io.BytesIO(data))
    engine.client.put_archive(container, str(place), buffer.getvalue())


def renew(
    engine: ContainerEngine, container: str, path: str, files: Mapping[str, bytes], owner: tuple[int, int]
) -> None:
    """Make a directory at the root anew, with files of mode 0755; see `Sandbox.renew`."""
    name, made = path.strip("/"), set()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        # A file takes the place of whatever is there, with all that is in it, and a directory that of the file.
        tar.addfile(_member(name, owner, tarfile.REGTYPE, 0o644))
        for relative, data in {"": b"", **files}.items():
            full = PurePosixPath(name, relative)
            directory = not relative or relative.endswith("/")
            for place in reversed([*([full] if directory else []), *full.parents]):
                if place.name and place not in made:
                    tar.addfile(_member(str(place), owner, tarfile.DIRTYPE, 0o755))
                    made.add(place)
            if not directory:
                tar.addfile(_member(str(full), owner, tarfile.REGTYPE, 0o755, len(data)), io.BytesIO(data))
    engine.client.put_archive(container, "/", buffer.getvalue())


def read(engine: ContainerEngine, container: str, base: str, relative: PurePosixPath, most: int | None = None) -> bytes:
    """Read the regular file base/relative, or its first `most` bytes. Raises FileNotFoundError if there is none."""
    place = PurePosixPath(base)
    for part in ("", *relative.parts[:-1]):
        place /= part
        if not is_directory(engine.stat(container, str(place))):
            raise FileNotFoundError(f"no regular file at {place}/...")
    path = str(place / relative.name)
    status = engine.stat(container, path)
    if status is None or status["mode"] & _GO_TYPE:
        raise FileNotFoundError(f"no regular file at {path}")
    with archive(engine, container, path) as members:
        for tar, member in members:
            source = tar.extractfile(member)
            if source is not None:
                return source.read(-1 if most is None else most)
    raise FileNotFoundError(f"no regular file at {path}")


def packed(snapshot: Path, owner: tuple[int, int]) -> bytes:
    """Return an archive for the root of a container: a copy of a directory as the work tree, and an empty HOME."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid = owner
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        tar.add(snapshot, WORKDIR.lstrip("/"), filter=owned)
        tar.addfile(_member(HOME.lstrip("/"), owner, tarfile.DIRTYPE, 0o755))
    return buffer.getvalue()


@contextmanager
def archive(
    engine: ContainerEngine, container: str, path: str
) -> Generator[Iterable[tuple[tarfile.TarFile, tarfile.TarInfo]]]:
    """Yield the archive members of a path and of everything below it, as they come from the engine.

    Raises FileNotFoundError if nothing is there.
    """
    try:
        answer = engine.archive(container, path)
    except NotFound as error:
        raise FileNotFoundError(path) from error
    body = _Body(answer.iter_content(1 << 18))
    try:
        with tarfile.open(fileobj=cast(io.BufferedIOBase, body), mode="r|", errors="surrogateescape") as tar:
            yield ((tar, member) for member in tar)
    except tarfile.TarError as error:
        raise SandboxError("docker_failed", f"the archive of {path} is broken: {error}") from error
    finally:
        answer.close()  # ends the request if the rest is not wanted


class _Body:
    """This is a file, made of chunks, that tarfile can read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        parts, wanted = [self._rest], size - len(self._rest)
        while wanted > 0:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            wanted -= len(chunk)
        whole = b"".join(parts)
        self._rest = whole[size:]
        return whole[:size]


def is_directory(status: Mapping[str, Any] | None) -> bool:
    """Return whether `ContainerEngine.stat` found a directory, and not a link to one."""
    return status is not None and bool(status["mode"] & _GO_DIRECTORY)


def _member(name: str, owner: tuple[int, int], kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.mtime = kind, mode, size, int(time.time())
    member.uid, member.gid = owner
    return member
