"""Sealing a task's image, as far as it does not depend on the engine that runs it.

A sealed image is the task's image with one commit in place of its history (`seal.sh`): no parents, later commits,
tags, remotes, reflogs or unreachable objects. This module says what is sealed, judges what `seal.sh` reports, and
makes many images ahead of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollout.sandbox import SandboxError

logger = logging.getLogger(__name__)

HOME = "/home/agent"


WORKDIR = "/testbed"


SCRIPT = Path(__file__).with_name("seal.sh").read_text()


# What `seal.sh` reports about a good image; all other keys are residue.
_FACTS = frozenset({"uid", "gid", "commits", "unreachable", "ref", "sealed", "missing", "remote", "alternates"})


@dataclass(frozen=True)
class Source:
    """What boxes are made from: a task's image, and what is done to its work tree when it is sealed.

    base_commit: the name by which the eval script asks for the commit. setup_patch: applied first. hide: files and
    directories that are removed, relative to the work tree or absolute.
    """

    image: str
    base_commit: str = ""
    setup_patch: str = ""
    hide: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]


def check_commit(source: Source) -> None:
    """SandboxError seal_failed when the eval script's name for the commit is none that git could replace."""
    if source.base_commit and not re.fullmatch(r"[0-9a-f]{40}", source.base_commit):
        raise SandboxError("seal_failed", f"{source.image}: base_commit {source.base_commit!r} is no full commit id")


def judged(source: Source, code: int | None, out: str, said: str) -> dict[str, Any]:
    """What `seal.sh` has to say, if all is well: {"uid", "gid", "residue": lines}. code, out, said: its exit status,
    output and errors. Raises SandboxError: no_git, seal_failed."""
    facts = [(key, value) for key, space, value in (line.partition(" ") for line in out.splitlines()) if space]
    problem = _problem(facts, source.base_commit)
    if code != 0 or problem:
        cause = "no_git" if ("missing", "git") in facts else "seal_failed"
        raise SandboxError(cause, f"{source.image}: {problem or f'exit status {code}'}: {said.strip()[-500:]}")
    values = dict(facts)
    residue = [f"{key}: {value}" for key, value in facts if key not in _FACTS]
    return {"uid": int(values["uid"]), "gid": int(values["gid"]), "residue": residue}


def _problem(facts: Sequence[tuple[str, str]], base_commit: str) -> str:
    """What is wrong with the history that sealing has left, "" if nothing."""
    found = {key: [value for name, value in facts if name == key] for key, _ in facts}
    refs = {"refs/heads/main", *([f"refs/replace/{base_commit}"] if base_commit else [])}
    if found.get("sealed") != ["yes"]:
        return f"no {' or '.join(found['missing'])} in the image" if "missing" in found else "did not finish"
    if found["commits"] != ["1"] or found["unreachable"] != ["0"]:
        return f"{found['commits'][0]} commits and {found['unreachable'][0]} unreachable objects are left"
    more = [*(set(found["ref"]) - refs), *found.get("remote", []), *found.get("alternates", [])]
    return f"{', '.join(more)} left" if more else ""


def tests_in(read: Callable[[PurePosixPath], bytes], tests: Iterable[str]) -> list[str]:
    """Those of the tests (pytest's names) that a work tree has already. read: a file of it, or FileNotFoundError."""
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


@dataclass(frozen=True)
class Wanted:
    """One task's image; tests: names of hidden tests, which should not be in it."""

    instance_id: str
    source: Source
    tests: tuple[str, ...] = ()


async def ahead(
    wanted: Sequence[Wanted],
    make: Callable[[Wanted], Awaitable[dict | None]],
    *,
    parallel: int,
    say: Callable[[str], None],
    count: Callable[[int, int], None] | None,
) -> dict[str, dict]:
    """The reports of `make` by instance id, `parallel` made at a time; without those that are None: no room now."""
    slots = asyncio.Semaphore(parallel)
    reports: dict[str, dict] = {}
    said = time.monotonic()

    async def one(task: Wanted) -> None:
        nonlocal said
        async with slots:
            report = await make(task)
        if report is None:
            return
        reports[task.instance_id] = report
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
    later = f"; {rest} more when they are needed, for the budget is full" if rest else ""
    say(f"images: {len(reports)} of {len(wanted)} ready{later}")
    return {task.instance_id: reports[task.instance_id] for task in wanted if task.instance_id in reports}
