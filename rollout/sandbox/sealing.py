"""Sealing, preparation ahead and eviction of task images: what all boxes that start from an image have in common.

A sealed image is the task's image with one commit in place of its history (`seal.sh`): no parents, later commits, tags,
remotes, reflogs or unreachable objects. How an image is run, stored and removed is the business of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rollout.sandbox import WORKDIR, SandboxError

SCRIPT = Path(__file__).with_name("seal.sh").read_text()

# What `seal.sh` reports about a good image; all other keys are residue. Caches and stale compiled files, which most
# images have, were removed.
_FACTS = frozenset(
    {"uid", "gid", "commits", "unreachable", "ref", "sealed", "missing", "remote", "alternates", "cache", "stale"}
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Boxes are made from this: a task's image, and what is done to its work tree when it is sealed.

    base_commit: the name by which the eval script asks for the commit. setup_patch: applied first. hide: files and
    directories that are removed, relative to the work tree or absolute. workdir: the work tree, unless the image says
    where it is.
    """

    image: str
    base_commit: str = ""
    setup_patch: str = ""
    hide: tuple[str, ...] = ()
    workdir: str = field(default=WORKDIR, repr=False)  # by the others, kinds of boxes find what they have sealed


@dataclass(frozen=True)
class Wanted:
    """This sealed image is needed for a task; tests: names of hidden tests, which should not be in it."""

    instance_id: str
    source: Source
    tests: tuple[str, ...] = ()


def digest(text: str) -> str:
    """Return 32 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_source(source: Source) -> None:
    """Raise SandboxError if a source cannot be sealed.

    missing_image: it is a local snapshot, not an image. seal_failed: the eval script's name for the commit is not a
    full commit id, and git can replace nothing else.
    """
    if source.image.startswith("dir:"):
        raise SandboxError("missing_image", f"{source.image} is a local snapshot; boxes need an image's name")
    if source.base_commit and not re.fullmatch(r"[0-9a-f]{40}", source.base_commit):
        raise SandboxError("seal_failed", f"{source.image}: base_commit {source.base_commit!r} is no full commit id")


def judged(source: Source, code: int | None, out: str, said: str) -> dict[str, Any]:
    """Return what `seal.sh` found out about an image: {"uid", "gid", "residue": lines}.

    code, out, said: the exit status, stdout and stderr of the script. Raises SandboxError no_git or seal_failed unless
    exactly one commit is left.
    """
    facts = [(key, value) for key, space, value in (line.partition(" ") for line in out.splitlines()) if space]
    problem = _problem(facts, source.base_commit)
    if code != 0 or problem:
        cause = "no_git" if ("missing", "git") in facts else "seal_failed"
        raise SandboxError(cause, f"{source.image}: {problem or f'exit status {code}'}: {said.strip()[-500:]}")
    values = dict(facts)
    residue = [f"{key}: {value}" for key, value in facts if key not in _FACTS]
    return {"uid": int(values["uid"]), "gid": int(values["gid"]), "residue": residue}


def _problem(facts: Sequence[tuple[str, str]], base_commit: str) -> str:
    """Return what is wrong with the history that sealing has left, "" if nothing is."""
    found = {key: [value for name, value in facts if name == key] for key, _ in facts}
    refs = {"refs/heads/main", *([f"refs/replace/{base_commit}"] if base_commit else [])}
    if found.get("sealed") != ["yes"]:
        return f"no {' or '.join(found['missing'])} in the image" if "missing" in found else "did not finish"
    if found["commits"] != ["1"] or found["unreachable"] != ["0"]:
        return f"{found['commits'][0]} commits and {found['unreachable'][0]} unreachable objects are left"
    more = [*(set(found["ref"]) - refs), *found.get("remote", []), *found.get("alternates", [])]
    return f"{', '.join(more)} left" if more else ""


def tests_in(read: Callable[[PurePosixPath], bytes], tests: Iterable[str]) -> list[str]:
    """Return those of the tests (pytest's names) that a work tree already has.

    read: returns the contents of a file of the work tree, or raises FileNotFoundError.
    """
    by_file: dict[PurePosixPath, set[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        if name and not PurePosixPath(file).is_absolute() and ".." not in PurePosixPath(file).parts:
            by_file.setdefault(PurePosixPath(file), set()).add(name)
    seen = []
    for file, names in by_file.items():
        with contextlib.suppress(FileNotFoundError):
            text = read(file).decode(errors="replace")
            for name in names:
                function = name.rpartition("::")[2].partition("[")[0]
                if re.search(rf"\bdef {re.escape(function)}\b", text):
                    seen.append(f"{file}::{name}")
    return sorted(seen)


_CONFIGURING = [f":(glob)**/{name}" for name in (".claude/**", ".mcp.json", "CLAUDE*.md", "AGENTS.md")]


def configuring(tree: Path) -> tuple[str, ...]:
    """Return the first files in a local work tree's commit that would configure an agent, as `seal.sh` reports them of
    an image. There are none where there is no repository."""
    command = ["git", "--git-dir=.git", "-c", "core.fsmonitor=", "ls-files", "-z", "--", *_CONFIGURING]
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True)
    return tuple(os.fsdecode(path) for path in done.stdout.split(b"\0")[:20] if path)


async def ahead(
    wanted: Sequence[Wanted],
    make: Callable[[Wanted], Awaitable[tuple[str, Sequence[str], Sequence[str]] | None]],
    *,
    parallel: int = 4,
    say: Callable[[str], None] = logger.info,
    count: Callable[[int, int], None] | None = None,
) -> dict[str, dict]:
    """Make images ahead of a run, `parallel` at a time; returns {"image", "sealed", "residue": lines} by instance id.

    make: returns the name of the sealed image, what its sealing found and which hidden tests it has; None if there is
    no room for it now. Such an image is left out, and made when it is needed.
    say: is called with lines for the user. count: is called with the numbers of images that are ready and that are
    wanted, in place of the lines on the way.
    Raises the first SandboxError of `make`.
    """
    slots = asyncio.Semaphore(parallel)
    reports: dict[str, dict] = {}
    said = time.monotonic()

    async def one(task: Wanted) -> None:
        nonlocal said
        async with slots:
            made = await make(task)
        if made is None:
            return
        name, residue, tests = made
        lines = [*residue, *(f"test: {test}" for test in tests)]
        reports[task.instance_id] = {"image": task.source.image, "sealed": name, "residue": lines}
        if count is not None:
            count(len(reports), len(wanted))
        elif len(reports) < len(wanted) and time.monotonic() - said > 5:  # the last line is said in any case
            said = time.monotonic()
            say(f"images: {len(reports)} of {len(wanted)} ready")

    running = [asyncio.ensure_future(one(task)) for task in wanted]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    rest = len(wanted) - len(reports)
    later = f"; the budget is full, {rest} more are made when they are needed" if rest else ""
    say(f"images: {len(reports)} of {len(wanted)} ready{later}")
    return {task.instance_id: reports[task.instance_id] for task in wanted if task.instance_id in reports}


def evict_oldest(
    entries: Iterable[tuple[float, int, T]], budget_bytes: int, remove: Callable[[T, float], bool]
) -> list[T]:
    """Remove the least recently used entries until the rest fits the budget; returns what was removed.

    entries: time of last use, bytes, entry. remove: is given the entry and its time, and returns False for one that
    stays.
    """
    entries = sorted(entries, key=lambda entry: entry[0])
    total = sum(size for _, size, _ in entries)
    removed = []
    for last, size, entry in entries:
        if total <= budget_bytes:
            break
        if remove(entry, last):
            total -= size
            removed.append(entry)
    return removed
