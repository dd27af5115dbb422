"""Task images: pulled ahead, sealed once, kept within a disk budget.

A sealed image is the task's image with one commit in place of its history (`seal.sh`): no parents, later commits,
tags, remotes, reflogs or unreachable objects. Boxes are started from it, so nothing of this is done while an episode
waits. Its tag is derived from the image's id, the commit's name in the eval script and the sealing code; several
processes that seal the same image make the same thing, and one of them is kept.

What this project pulled or sealed is noted, with the time of its last use, as files in the user's cache directory; when
their sizes exceed the budget the least recently used go. Images that others brought, and images that any container
uses, are never removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from docker.errors import APIError, DockerException, NotFound

from rollout.files import write
from rollout.sandbox import SandboxError
from rollout.sandbox.docker import files as docker_files
from rollout.sandbox.docker.engine import PROJECT, ContainerEngine, cache_dir, checked, get_engine
from rollout.sandbox.sealing import HOME, SCRIPT, WORKDIR, Source, Wanted, ahead, check_commit, judged, tests_in

logger = logging.getLogger(__name__)

_REPOSITORY = f"{PROJECT}/sealed"
_LABEL = f"{PROJECT}.sealed"
_SEAL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sealed:
    """An image that boxes are started from. ref: its tag. uid, gid: of the user in it. residue: what was found in
    the task's image that could tell the answer, as "kind: what" lines; empty is good."""

    ref: str
    source: str
    uid: int
    gid: int
    residue: tuple[str, ...]


_known: dict[Source, Sealed] = {}


def sealed(engine: ContainerEngine, source: Source, budget_bytes: int | None = None) -> Sealed:
    """The sealed image of a source, made (and the image pulled) if it is not there; then what is over the budget
    goes. Remembered per process. Blocks.

    Raises SandboxError: missing_image, seal_failed, no_git, no_space.
    """
    known = _known.get(source)
    if known is None:
        with locked(source.name):
            known, fresh = _find_or_seal(engine, source)
        _known[source] = known
        if fresh and budget_bytes is not None:
            evict(engine, budget_bytes, keep=[source.image])
    return known


def plain(engine: ContainerEngine, image: str) -> Sealed:
    """An image without a work tree of its own, which nothing is done to. Remembered per process. Blocks.

    Raises SandboxError: missing_image, seal_failed (its user is a name).
    """
    known = _known.get(Source(image))
    if known is None:
        status = _inspect(engine, image)
        if status is None:
            raise SandboxError("missing_image", f"no image {image} for local snapshots")
        uid, _, gid = (status["Config"].get("User") or "0").partition(":")
        if not uid.isdigit() or not (gid or "0").isdigit():
            raise SandboxError("seal_failed", f"{image}: its user must be a number, not {uid!r}")
        known = _known[Source(image)] = Sealed(image, image, int(uid), int(gid or 0), ())
    return known


def forget(source: Source) -> None:
    """The sealed image is gone: look again at the next use."""
    _known.pop(source, None)


def missing(engine: ContainerEngine, images: Iterable[str]) -> list[str]:
    """Those that the engine does not have. Blocks."""
    return [image for image in sorted(set(images)) if _inspect(engine, image) is None]


def _find_or_seal(engine: ContainerEngine, source: Source) -> tuple[Sealed, bool]:
    """The sealed image, and whether it was made just now."""
    status = _inspect(engine, source.image)
    if status is None:
        pull(engine, source.image)
        status = checked("missing_image", engine.client.inspect_image, source.image)
    parts = (status["Id"], source.base_commit, source.setup_patch, *source.hide, SCRIPT)
    ref = f"{_REPOSITORY}:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"
    made = _inspect(engine, ref)
    fresh = made is None
    if made is None:
        checked("seal_failed", _seal, engine, source, status, ref)
        made = checked("seal_failed", engine.client.inspect_image, ref)
    facts = _read(made["Config"]["Labels"][_LABEL])
    result = Sealed(ref, source.image, facts["uid"], facts["gid"], tuple(facts["residue"]))
    used(result)
    return result, fresh


def pull(engine: ContainerEngine, image: str) -> None:
    """Pull an image and note that it was us. SandboxError missing_image when it cannot be had."""
    if image.startswith("dir:"):
        raise SandboxError("missing_image", f"{image} is a local snapshot; containers need an image's name")
    try:
        for line in engine.client.pull(image, tag=None if _tagged(image) else "latest", stream=True, decode=True):
            if "error" in line:
                raise SandboxError("missing_image", f"{image}: {line['error']}")
    except DockerException as error:
        raise SandboxError("missing_image", f"{image} is not here and cannot be pulled: {error}") from error
    _note("pulled", image)


def _tagged(image: str) -> bool:
    return "@" in image or ":" in image.rpartition("/")[2]


def _inspect(engine: ContainerEngine, image: str) -> Mapping | None:
    if image.startswith("dir:"):  # engines call that by different names
        return None
    try:
        return checked("docker_failed", engine.client.inspect_image, image)
    except SandboxError as error:
        if error.cause == "missing_image":
            return None
        raise


def _seal(engine: ContainerEngine, source: Source, status: Mapping, ref: str) -> None:
    client, image, base_commit = engine.client, source.image, source.base_commit
    user = status["Config"].get("User") or ""
    volumes = status["Config"].get("Volumes") or {}
    if any(PurePosixPath(WORKDIR).is_relative_to(volume) for volume in volumes):
        raise SandboxError("seal_failed", f"{image} keeps {WORKDIR} in a volume")
    check_commit(source)
    container = client.create_container(
        status["Id"],
        [WORKDIR, HOME, user, base_commit, *source.hide],
        entrypoint=["bash", "-c", SCRIPT, "seal"],
        user="0:0",
        working_dir="/",
        healthcheck={"test": ["NONE"]},
        labels=engine.labels(),
        host_config=client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=["CHOWN", "DAC_OVERRIDE", "FOWNER"],  # files may belong to the image's user
            security_opt=engine.security_opt,
            ulimits=engine.ulimits(),
            log_config={"Type": "json-file"},  # what it says is read, whatever the engine does with others' output
        ),
        use_config_proxy=False,
    )["Id"]
    try:
        docker_files.write(engine, container, "/", PurePosixPath("setup.diff"), source.setup_patch.encode(), (0, 0))
        client.start(container)
        code = client.wait(container, timeout=_SEAL_TIMEOUT_S)["StatusCode"]
        out = client.logs(container, stdout=True, stderr=False).decode(errors="replace")
        said = client.logs(container, stdout=False, stderr=True).decode(errors="replace")
        label = {"source": status["Id"], "image": image, **judged(source, code, out, said)}
        # As instructions, not as a configuration, which podman ignores.
        changes = [f"USER {user or '0:0'}", f"LABEL {_LABEL}={_written(label)}"]
        made = client.commit(container, changes=changes, message="sealed")["Id"]
    finally:
        with contextlib.suppress(DockerException):
            client.remove_container(container, force=True, v=True)
    if _inspect(engine, ref) is None:
        client.tag(made, *ref.split(":"))
    else:  # another machine's process was faster
        client.remove_image(made)


def _written(label: Mapping) -> str:
    """Without characters that mean something in an instruction; engines do not agree on quotes."""
    return quote(json.dumps(label), safe=":/")


def _read(label: str) -> Any:
    return json.loads(unquote(label))


def hidden_tests(engine: ContainerEngine, ref: str, tests: Iterable[str]) -> list[str]:
    """`tests_in` the work tree of an image. Blocks."""
    if not (tests := list(tests)):
        return []
    client = engine.client
    container = client.create_container(
        ref, ["true"], entrypoint=[], labels=engine.labels(), network_disabled=True, use_config_proxy=False
    )["Id"]
    try:
        return tests_in(lambda file: docker_files.read(engine, container, WORKDIR, file), tests)
    finally:
        client.remove_container(container, force=True, v=True)


# --- ahead of a run


async def prepare(
    wanted: Sequence[Wanted],
    *,
    parallel: int = 4,
    budget_bytes: int | None = None,
    say: Callable[[str], None] = logger.info,
    count: Callable[[int, int], None] | None = None,
) -> dict[str, dict]:
    """Pull and seal what is not there, `parallel` at a time, until the budget is full: the rest is made when it is
    needed, in the place of what was not used for longest. `count` is told how many of how many are ready; without it
    `say` is, now and then.

    Returns per instance id {"image", "sealed", "residue": lines}. Raises the first SandboxError.
    """
    engine = await asyncio.to_thread(get_engine)

    async def make(task: Wanted) -> dict | None:
        if budget_bytes is not None and await engine.call(_size, engine) >= budget_bytes:
            return None
        made = await engine.call(sealed, engine, task.source)
        visible = await engine.call(hidden_tests, engine, made.ref, task.tests)
        residue = [*made.residue, *(f"test: {name}" for name in visible)]
        return {"image": task.source.image, "sealed": made.ref, "residue": residue}

    return await ahead(wanted, make, parallel=parallel, say=say, count=count)


# --- the disk budget


def used(image: Sealed) -> None:
    """Note a use, for the order in which images go."""
    _note("sealed", image.ref)
    note = _file("pulled", image.source)
    if note.exists():
        os.utime(note)


def evict(engine: ContainerEngine, budget_bytes: int, keep: Iterable[str] = ()) -> list[str]:
    """Remove least recently used images that this project pulled or sealed until they fit the budget; returns
    their names. `keep`, and what a container uses, stays. Blocks."""
    kept = {*keep, *(made.ref for made in _known.values() if made.source in set(keep))}
    images = _noted(engine)
    total = sum(size for _, _, size, _ in images)
    removed = []
    for _, name, size, file in sorted(images):
        if total <= budget_bytes:
            break
        if name in kept:
            continue
        try:
            engine.client.remove_image(name)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code == 409:  # a container uses it, or a sealed image is made of it
                continue
            raise
        file.unlink(missing_ok=True)
        total -= size
        removed.append(name)
    for key in [key for key, made in _known.items() if made.ref in removed]:
        del _known[key]
    return removed


def _size(engine: ContainerEngine) -> int:
    return sum(size for _, _, size, _ in _noted(engine))


def _noted(engine: ContainerEngine) -> list[tuple[float, str, int, Path]]:
    """What this project brought and is still there: last use, name, bytes, note."""
    images = []
    for file in cache_dir("images").glob("*.json"):
        try:
            name = json.loads(file.read_text())["name"]
            status = _inspect(engine, name)
            last = file.stat().st_mtime
        except (OSError, ValueError):  # another process removes it
            continue
        if status is None:
            file.unlink(missing_ok=True)
            continue
        # A sealed image shares all but its last layer with its source.
        label = (status["Config"].get("Labels") or {}).get(_LABEL)
        source = _inspect(engine, _read(label)["source"]) if label else None
        images.append((last, name, status["Size"] - (source["Size"] if source else 0), file))
    return images


def _note(kind: str, name: str) -> None:
    file = _file(kind, name)
    if file.exists():
        os.utime(file)
        return
    write(file, json.dumps({"kind": kind, "name": name}))


def _file(kind: str, name: str) -> Path:
    return cache_dir("images") / f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


@contextlib.contextmanager
def locked(name: str) -> Generator[None]:
    """Excludes other threads and processes of this user. A lock goes with its holder."""
    file = cache_dir("images") / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
