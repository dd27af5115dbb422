"""Task images for `apptainer`, pulled and sealed once, in a directory that machines may share.

An entry of the cache is a directory. For an image as it was pulled, it holds `image.sif`; for a sealed one, `image.sif`
with an empty /testbed, and `tree.tar`, the sealed work tree. A box gets a copy of the tree, bound over /testbed:
nothing is hidden below it, and shared disks are good at few large files. `facts.json` says what was found; its time is
that of the last use.

An entry is made under a lease and renamed into place, so others see all of it or nothing. When the entries exceed the
budget the least recently used are removed, but none that was used in the last half hour; boxes renew this time while
they live. An image that was pulled stays as it is until it is removed, even if its tag means another image by now.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from apptainer_boxes import cli as apptainer_cli
from apptainer_boxes.cli import Program, exec_command, said
from rollout.sandbox import HOME, WORKDIR, SandboxError, failed, files, sealing
from rollout.sandbox.directory import built, make_root
from rollout.sandbox.lease import lease
from rollout.sandbox.pulls import Pulls, refused_for_now
from rollout.sandbox.sealing import SCRIPT, Source, Wanted
from rollout.sandbox.tartree import TarTree
from rollout.sandbox.treediff import LINK

logger = logging.getLogger(__name__)

IN_USE_S = 1800.0
"""An entry is not removed for so many seconds after its last use."""

_FACTS = "facts.json"
_PULL_TIMEOUT_S = 3600.0
_SEAL_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Cache:
    """A Cache holds the images. directory: made if missing. budget_bytes: of all entries together, None: no limit.

    pulls: where missing images come from.
    """

    directory: Path
    budget_bytes: int | None = None
    pulls: Pulls = field(default_factory=Pulls)


@dataclass(frozen=True)
class Sif:
    """A Sif is an image that boxes are started from.

    image: a .sif file. entry: its directory in the cache, None for a file of the user's. residue: what was found in the
    task's image that could give away the answer, as "kind: what" lines; empty is good.
    """

    image: Path
    entry: Path | None = None
    residue: tuple[str, ...] = ()

    @property
    def tree(self) -> Path:
        """Return the archive of the sealed work tree."""
        return self.image.with_name("tree.tar")

    def used(self) -> None:
        """Note a use of the image, which may have been removed."""
        if self.entry is not None:
            try:
                os.utime(self.entry / _FACTS)
            except OSError as error:
                logger.warning("noting the use of an image: %s", error)


async def plain(cache: Cache, program: Program, image: str) -> Sif:
    """Return an image as it is, pulled if it is not there.

    image: its name in a registry, any address that `apptainer pull` takes, or a .sif file.
    Raises SandboxError: missing_image, no_space.
    """
    if image.endswith(".sif") and "://" not in image:
        if not Path(image).is_file():
            raise SandboxError("missing_image", f"no file {image}")
        return Sif(Path(image).absolute())

    async def make(new: Path, scratch: Path) -> dict:
        address = image if "://" in image else f"docker://{cache.pulls.address(image)}"
        pull = [program.path, "--quiet", "pull", "--disable-cache", str(new / "image.sif"), address]
        waits = cache.pulls.waits()
        while True:
            try:
                await _do(pull, scratch, "missing_image", f"{image} cannot be pulled", _PULL_TIMEOUT_S)
                return {"image": image}
            except SandboxError as error:
                wait = next(waits, None) if refused_for_now(str(error)) else None
                if wait is None:
                    raise
                logger.warning("%s; waiting %.0f s", error, wait)
                await asyncio.sleep(wait)

    return await _entry(cache, _key("pulled", image), make)


async def sealed(cache: Cache, program: Program, source: Source) -> Sif:
    """Return the sealed image of a source, made (and the image pulled) if it is not there.

    Raises SandboxError: missing_image, seal_failed, no_git, no_space.
    """

    if source.workdir != WORKDIR:
        raise SandboxError("seal_failed", f"{source.image} has its work tree in {source.workdir}; here it is {WORKDIR}")

    async def make(new: Path, scratch: Path) -> dict:
        sealing.check_source(source)
        base = await plain(cache, program, source.image)
        return {"image": source.image, **await _seal(program, source, base, new, scratch)}

    return await _entry(cache, _key("sealed", repr(source), SCRIPT), make)


def missing(cache: Cache, sources: Iterable[Source]) -> list[str]:
    """Return the images that must still be sealed for some source, but are not in the cache themselves. Blocks."""
    lost = {
        one.image for one in sources if not (cache.directory / _key("sealed", repr(one), SCRIPT) / _FACTS).is_file()
    }
    return sorted(image for image in lost if not (cache.directory / _key("pulled", image) / _FACTS).is_file())


def _key(kind: str, *parts: str) -> str:
    return f"{kind}-{sealing.digest(json.dumps(parts))}"


async def _entry(cache: Cache, key: str, make: Callable[[Path, Path], Awaitable[dict]]) -> Sif:
    """Return the entry of this name; `make` fills a new directory, given a scratch directory of this machine too."""
    place = cache.directory / key
    try:
        if not (place / _FACTS).is_file():
            cache.directory.mkdir(parents=True, exist_ok=True)
            async with lease(cache.directory / f"{key}.lease"):
                if not (place / _FACTS).is_file():
                    await _fill(place, make)
                    await evict(cache, keep=place)
        facts = json.loads((place / _FACTS).read_text())
    except OSError as error:
        raise failed("boot_failed", f"the image cache {cache.directory}: {error}") from error
    sif = Sif(place / "image.sif", place, tuple(facts.get("residue", ())))
    sif.used()
    return sif


async def _fill(place: Path, make: Callable[[Path, Path], Awaitable[dict]]) -> None:
    for left in place.parent.glob(f".new-{place.name}-*"):  # by a holder of the lease that died
        await asyncio.to_thread(files.remove_tree, left)
    new = Path(tempfile.mkdtemp(prefix=f".new-{place.name}-", dir=place.parent))
    scratch = None
    try:
        scratch = await built(lambda: make_root(lambda _: None))
        (new / _FACTS).write_text(json.dumps(await make(new, scratch)) + "\n")
        try:
            new.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another was faster
                raise
    finally:
        for directory in filter(None, (new, scratch)):
            await asyncio.shield(asyncio.to_thread(files.remove_tree, directory))


async def _seal(program: Program, source: Source, base: Sif, new: Path, scratch: Path) -> dict:
    """Unpack an image on this machine, run `seal.sh` in it, and pack it again, its work tree apart."""
    unpacked, name = scratch / "image", source.image
    build = [program.path, "--quiet", "build"]
    unpack = [*build, "--sandbox", "--fix-perms", str(unpacked), str(base.image)]
    await _do(unpack, scratch, "seal_failed", f"{name} cannot be unpacked", _SEAL_TIMEOUT_S)
    tree = unpacked / WORKDIR.lstrip("/")
    if tree.is_symlink() or not tree.is_dir():
        raise SandboxError("seal_failed", f"{name}: {WORKDIR} is no directory")
    await asyncio.to_thread(files.write_below, unpacked, PurePosixPath("setup.diff"), source.setup_patch.encode())
    # All unpacked files belong to this user, who also runs the script, so no owner is changed ("0").
    script = ["bash", "-c", SCRIPT, "seal", WORKDIR, HOME, "0", source.base_commit, *source.hide]
    argv = exec_command(program, unpacked, ["--writable", "--no-home", "--pwd", "/"], script)
    done = await apptainer_cli.call(argv, apptainer_cli.plain_environment(scratch / "home"), _SEAL_TIMEOUT_S)
    facts = sealing.judged(source, done.returncode, done.stdout.decode(errors="replace"), said(done))
    # Hard links are packed as files of their own: a reader may ask for one name only.
    pack = ["tar", "--create", "--hard-dereference", f"--file={new / 'tree.tar'}", f"--directory={tree}", "."]
    await _do(pack, scratch, "seal_failed", f"{name}: packing {WORKDIR}", _SEAL_TIMEOUT_S)
    await asyncio.to_thread(files.remove_tree, tree)
    tree.mkdir()
    repack = [*build, str(new / "image.sif"), str(unpacked)]
    await _do(repack, scratch, "seal_failed", f"{name} cannot be packed", _SEAL_TIMEOUT_S)
    return {"residue": facts["residue"]}


async def _do(argv: Sequence[str], scratch: Path, cause: str, what: str, timeout_s: float) -> None:
    # The user's own environment: it leads to credentials and proxies of registries.
    places = {f"{name}_TMPDIR": str(scratch / "tmp") for name in ("APPTAINER", "SINGULARITY")}
    done = await apptainer_cli.call(argv, {**os.environ, **places, "LC_ALL": "C"}, timeout_s)
    if done.returncode != 0:
        raise failed(cause, f"{what}: {said(done)}")


async def prepare(cache: Cache, wanted: Sequence[Wanted], **how: Any) -> dict[str, dict]:
    """Pull and seal what is not there until the budget is full; see `sealing.ahead`, also for `how`."""
    program = await asyncio.to_thread(apptainer_cli.program)

    async def make(task: Wanted) -> tuple[str, Sequence[str], Sequence[str]] | None:
        if cache.budget_bytes is not None and await asyncio.to_thread(_size, cache) >= cache.budget_bytes:
            return None
        made = await sealed(cache, program, task.source)
        return str(made.entry), made.residue, await asyncio.to_thread(_hidden_tests, made.tree, task.tests)

    return await sealing.ahead(wanted, make, **how)


def _hidden_tests(tree: Path, tests: Sequence[str]) -> list[str]:
    if not tests:
        return []
    tar = TarTree(tree)

    def read(file: PurePosixPath) -> bytes:
        path = os.fsencode(file)
        if path not in tar.files or tar.files[path][0] == LINK:
            raise FileNotFoundError(file)
        return tar.read(path)

    return sealing.tests_in(read, tests)


# --- the disk budget


async def evict(cache: Cache, keep: Path | None = None) -> list[str]:
    """Remove least recently used entries until the rest fits the budget; returns their names.

    `keep` stays, and so does what was used in the last `IN_USE_S` seconds. Raises OSError.
    """
    if cache.budget_bytes is None:
        return []
    async with lease(cache.directory / "evict.lease"):
        return await asyncio.to_thread(_evict, cache, cache.budget_bytes, keep)


def _evict(cache: Cache, budget_bytes: int, keep: Path | None) -> list[str]:
    with tempfile.NamedTemporaryFile(prefix=".now-", dir=cache.directory) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the clock that also sets the entries' times

    def remove(place: Path, last: float) -> bool:
        if last > now - IN_USE_S or place == keep:
            return False
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=cache.directory))
        place.rename(old / place.name)  # first, so that nobody sees half of it
        files.remove_tree(old)
        return True

    return [place.name for place in sealing.evict_oldest(_entries(cache), budget_bytes, remove)]


def _size(cache: Cache) -> int:
    return sum(size for _, size, _ in _entries(cache))


def _entries(cache: Cache) -> list[tuple[float, int, Path]]:
    """Return last use, bytes and place of each entry."""
    entries = []
    for facts in cache.directory.glob(f"[!.]*/{_FACTS}"):
        try:
            size = sum(file.stat().st_size for file in facts.parent.iterdir())
            entries.append((facts.stat().st_mtime, size, facts.parent))
        except FileNotFoundError:  # another process removes it
            continue
    return entries
