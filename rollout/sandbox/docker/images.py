"""Task images in a container engine: pulled ahead, sealed once, within a disk budget.

Boxes are started from sealed images (see `rollout.sandbox.sealing`), so none of this is done while an episode waits.
The tag of a sealed image is derived from the image's id, the commit's name in the eval script and the sealing code;
several processes that seal the same image make the same thing, and one of the results is kept.

Each image that this project pulled or sealed is noted in a file in the user's cache directory, whose time is that of
the last use. When their sizes exceed the budget the least recently used are removed, but never images that others
brought or that a container uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from docker.errors import APIError, DockerException, NotFound

from rollout.files import write
from rollout.sandbox import HOME, WORKDIR, SandboxError
from rollout.sandbox.docker import files as docker_files
from rollout.sandbox.docker.engine import PROJECT, UNOWNED, ContainerEngine, cache_dir, checked, get_engine
from rollout.sandbox.pulls import Pulls, refused_for_now, with_tag
from rollout.sandbox.sealing import SCRIPT, Source, Wanted, ahead, check_source, digest, evict_oldest, judged, tests_in

_REPOSITORY = f"{PROJECT}/sealed"
_LABEL = f"{PROJECT}.sealed"
TREE = f"{PROJECT}.tree"
"""The label of an image whose work tree is not in /testbed, or has no repository: JSON, as `written` writes it."""
_SEAL_TIMEOUT_S = 600.0
_AT_ONCE = Pulls()

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SealedImage:
    """A SealedImage is an image that boxes are started from.

    ref: its tag. source: the image that it was made from. uid, gid: of the user in it. residue: what was found in the
    task's image that could give away the answer, as "kind: what" lines; empty is good. workdir: its work tree.
    """

    ref: str
    source: str
    uid: int
    gid: int
    residue: tuple[str, ...]
    workdir: str = WORKDIR


_known: dict[tuple[str, Source], SealedImage] = {}  # by the engine's name, too


def sealed(
    engine: ContainerEngine, source: Source, budget_bytes: int | None = None, pulls: Pulls = _AT_ONCE
) -> SealedImage:
    """Return the sealed image of a source; if it is not there, pull and seal it, then evict what is over the budget.

    pulls: where images come from. The result is remembered per process. Blocks.
    Raises SandboxError: missing_image, seal_failed, no_git, no_space.
    """
    known = _known.get((engine.name, source))
    if known is None:
        check_source(source)
        with locked(f"{engine.name} {source!r}"):
            known, fresh = _find_or_seal(engine, source, pulls)
        _known[engine.name, source] = known
        if fresh and budget_bytes is not None:
            evict(engine, budget_bytes, keep=[source.image])
    return known


def plain(engine: ContainerEngine, image: str) -> SealedImage:
    """Return an image for local snapshots, as it is: it has no work tree that would have to be sealed.

    The result is remembered per process. Blocks. Raises SandboxError missing_image, or seal_failed if its user is not a
    number.
    """
    known = _known.get((engine.name, Source(image)))
    if known is None:
        with locked(f"{engine.name} {image}"):
            status = _inspect(engine, image)
            if status is None and engine.fetch(image):
                status = _inspect(engine, image)
        if status is None:
            raise SandboxError("missing_image", f"no image {image} for local snapshots")
        uid, _, gid = (status["Config"].get("User") or "0").partition(":")
        if not uid.isdigit() or not (gid or "0").isdigit():
            raise SandboxError("seal_failed", f"{image}: its user must be a number, not {uid!r}")
        known = _known[engine.name, Source(image)] = SealedImage(image, image, int(uid), int(gid or 0), ())
    return known


def forget(engine: ContainerEngine, source: Source) -> None:
    """Look for the sealed image of a source again at its next use, because it has been removed."""
    _known.pop((engine.name, source), None)


def missing(engine: ContainerEngine, images: Iterable[str]) -> list[str]:
    """Return those of the images that the engine does not have. Blocks."""
    return [image for image in sorted(set(images)) if _inspect(engine, image) is None]


def _find_or_seal(engine: ContainerEngine, source: Source, pulls: Pulls) -> tuple[SealedImage, bool]:
    """Return the sealed image, and whether it was made just now."""
    status = _inspect(engine, source.image)
    if status is None:
        pull(engine, source.image, pulls)
        status = checked("missing_image", engine.client.inspect_image, source.image)
    tree = _tree(status)
    if not tree.get("git", True):  # there is no history that would have to be sealed
        return SealedImage(source.image, source.image, tree["uid"], tree["gid"], (), tree["workdir"]), False
    where = {source.workdir} - {WORKDIR}
    parts = (status["Id"], source.base_commit, source.setup_patch, *source.hide, SCRIPT, *where)
    ref = f"{_REPOSITORY}:{digest(json.dumps(parts))}"
    made = _inspect(engine, ref)
    fresh = made is None
    if made is None:
        checked("seal_failed", _seal, engine, source, status, ref)
        made = checked("seal_failed", engine.client.inspect_image, ref)
    facts = _read(made["Config"]["Labels"][_LABEL])
    workdir = tree.get("workdir", source.workdir)
    result = SealedImage(ref, source.image, facts["uid"], facts["gid"], tuple(facts["residue"]), workdir)
    used(engine, result)
    return result, fresh


def pull(engine: ContainerEngine, image: str, pulls: Pulls = _AT_ONCE) -> None:
    """Pull an image and note that this project did. Blocks, also while a registry refuses for now (`Pulls.waits`).

    Raises SandboxError missing_image if it cannot be had.
    """
    address, waits = pulls.address(image), pulls.waits()
    if engine.fetch(image):
        _note(engine, "pulled", image)
        return
    while True:
        try:
            _pull(engine, address)
            break
        except SandboxError as error:
            wait = next(waits, None) if refused_for_now(str(error)) else None
            if wait is None:
                raise
            logger.warning("%s; waiting %.0f s", error, wait)
            time.sleep(wait)
    if address != image:
        checked("missing_image", engine.client.tag, address, *with_tag(image))
        checked("docker_failed", engine.client.remove_image, address)  # the mirror's name only
    _note(engine, "pulled", image)


def _pull(engine: ContainerEngine, address: str) -> None:
    name, tag = (address, None) if "@" in address else with_tag(address)
    try:
        for line in engine.client.pull(name, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise SandboxError("missing_image", f"{address}: {line['error']}")
    except DockerException as error:
        raise SandboxError("missing_image", f"{address} is not here and cannot be pulled: {error}") from error


def _inspect(engine: ContainerEngine, image: str) -> Mapping | None:
    try:
        return checked("docker_failed", engine.client.inspect_image, image)
    except SandboxError as error:
        if error.cause == "missing_image":
            return None
        raise


def _seal(engine: ContainerEngine, source: Source, status: Mapping, ref: str) -> None:
    client, image = engine.client, source.image
    user, workdir = status["Config"].get("User") or "", _tree(status).get("workdir", source.workdir)
    volumes = status["Config"].get("Volumes") or {}
    if any(PurePosixPath(workdir).is_relative_to(volume) for volume in volumes):
        raise SandboxError("seal_failed", f"{image} keeps {workdir} in a volume")
    # Files may belong to the image's user.
    caps = {"cap_drop": ["ALL"], "cap_add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"], "security_opt": engine.security_opt}
    with engine.helper(
        status["Id"],
        caps,
        command=[workdir, HOME, user, source.base_commit, *source.hide],
        entrypoint=["bash", "-c", SCRIPT, "seal"],
        user="0:0",
        working_dir="/",
        healthcheck={"test": ["NONE"]},
    ) as container:
        docker_files.write(engine, container, "/", PurePosixPath("setup.diff"), source.setup_patch.encode(), (0, 0))
        client.start(container)
        code = client.wait(container, timeout=_SEAL_TIMEOUT_S)["StatusCode"]
        out = client.logs(container, stdout=True, stderr=False).decode(errors="replace")
        said = client.logs(container, stdout=False, stderr=True).decode(errors="replace")
        label = {"source": status["Id"], "image": image, **judged(source, code, out, said)}
        # Given as instructions, because podman ignores them in a configuration.
        changes = [f"USER {user or '0:0'}", f"LABEL {_LABEL}={written(label)}", *UNOWNED]
        made = client.commit(container, changes=changes, message="sealed")["Id"]
    if _inspect(engine, ref) is None:
        client.tag(made, *ref.split(":"))
    else:  # a process on another machine was faster
        client.remove_image(made)


def _tree(status: Mapping) -> Mapping:
    """Return what an image's label says of its work tree: workdir, and uid, gid and git, whether it is a repository."""
    label = (status["Config"].get("Labels") or {}).get(TREE)
    return _read(label) if label else {}


def written(label: Mapping) -> str:
    """Return a label without characters that mean something in an instruction; engines do not agree on quotes."""
    return quote(json.dumps(label), safe=":/")


def _read(label: str) -> Any:
    return json.loads(unquote(label))


def hidden_tests(engine: ContainerEngine, made: SealedImage, tests: Iterable[str]) -> list[str]:
    """Return those of the tests that the work tree of an image already has; see `tests_in`. Blocks."""
    if not (tests := list(tests)):
        return []
    with engine.helper(made.ref) as container:
        return tests_in(lambda file: docker_files.read(engine, container, made.workdir, file), tests)


async def prepare(
    wanted: Sequence[Wanted],
    *,
    engine_for: Callable[[str], ContainerEngine] = lambda image: get_engine(),
    budget_bytes: int | None = None,
    pulls: Pulls = _AT_ONCE,
    **how: Any,
) -> dict[str, dict]:
    """Pull and seal what is not there until the budget is full; see `sealing.ahead`, also for `how`.

    engine_for: returns the engine that is to have an image; it may block. Images that are made later take the place of
    the least recently used ones.
    """

    async def make(task: Wanted) -> tuple[str, Sequence[str], Sequence[str]] | None:
        engine = await asyncio.to_thread(engine_for, task.source.image)
        if budget_bytes is not None and await engine.call(_size, engine) >= budget_bytes:
            return None
        made = await engine.call(sealed, engine, task.source, pulls=pulls)
        return made.ref, made.residue, await engine.call(hidden_tests, engine, made, task.tests)

    return await ahead(wanted, make, **how)


# --- the disk budget


def used(engine: ContainerEngine, image: SealedImage) -> None:
    """Note a use of an image, which decides the order of eviction."""
    if image.ref != image.source:
        _note(engine, "sealed", image.ref)
    note = _file(engine, "pulled", image.source)
    if note.exists():
        os.utime(note)


def evict(engine: ContainerEngine, budget_bytes: int, keep: Iterable[str] = ()) -> list[str]:
    """Remove least recently used images of this project until they fit the budget; returns their names. Blocks.

    Images that a container uses stay, as do those in `keep` and what was sealed from them.
    """
    kept = {*keep, *(made.ref for key, made in _known.items() if key[0] == engine.name and made.source in set(keep))}

    def remove(image: tuple[str, Path], last: float) -> bool:
        name, note = image
        if name in kept:
            return False
        try:
            with contextlib.suppress(NotFound):
                engine.client.remove_image(name)
        except APIError as error:
            if error.status_code == 409:  # a container uses it, or a sealed image is made of it
                return False
            raise
        note.unlink(missing_ok=True)
        return True

    removed = [name for name, _ in evict_oldest(_noted(engine), budget_bytes, remove)]
    for key in [key for key, made in _known.items() if key[0] == engine.name and made.ref in removed]:
        del _known[key]
    return removed


def _size(engine: ContainerEngine) -> int:
    return sum(size for _, size, _ in _noted(engine))


def _noted(engine: ContainerEngine) -> list[tuple[float, int, tuple[str, Path]]]:
    """Return (last use, bytes, (name, note)) of each image of this project that is still there."""
    images = []
    for note in engine.cache("images").glob("*.json"):
        try:
            name = json.loads(note.read_text())["name"]
            status = _inspect(engine, name)
            last = note.stat().st_mtime
        except (OSError, ValueError):  # another process removes it
            continue
        if status is None:
            note.unlink(missing_ok=True)
            continue
        # A sealed image shares all but its last layer with its source.
        label = (status["Config"].get("Labels") or {}).get(_LABEL)
        source = _inspect(engine, _read(label)["source"]) if label else None
        images.append((last, status["Size"] - (source["Size"] if source else 0), (name, note)))
    return images


def _note(engine: ContainerEngine, kind: str, name: str) -> None:
    note = _file(engine, kind, name)
    if note.exists():
        os.utime(note)
    else:
        write(note, json.dumps({"kind": kind, "name": name}))


def _file(engine: ContainerEngine, kind: str, name: str) -> Path:
    return engine.cache("images") / f"{kind}-{digest(name)}.json"


@contextlib.contextmanager
def locked(name: str) -> Generator[None]:
    """Keep other threads and processes of this user out of the block. The lock ends with its holder."""
    with open(cache_dir("images") / f"{digest(name)}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
