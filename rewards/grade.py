"""Grade one patch: what the rules leave of it is tested in fresh boxes, by the grader that the task's row names.

The policy's failures (no patch, one that does not apply, failing or endless tests) are unresolved. Only what the policy
cannot cause is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rewards import graders, second
from rewards.grading import Grading, RefusedError
from rewards.patch import PatchError
from rewards.rules import DECIDES, Rules, ScreenedPatch
from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.sandbox import PatchTooLarge, Sandbox, SandboxError

# Seconds for what a grading does besides applying the patch and running the tests: booting a box, reading the log.
_SPARE_S = 300.0
_RUNS = 6  # of the tests in one grading with a second opinion, at most: two patches, each three times
_NO_RULES = Rules()

IN_THE_AGENTS_BOX = "graded_in_agents_box"
"""The flag of a verdict whose tests ran in the agent's own box, with whatever the agent has left there."""


async def grade(
    task: Task,
    patch: bytes | None,
    boot: Callable[[], Awaitable[Sandbox]],
    own: Sandbox | None = None,
    *,
    timeout_s: float,
    rules: Rules = _NO_RULES,
    second_opinion: bool = False,
    spare_s: float = _SPARE_S,
) -> Verdict:
    """Grade `patch` in a sandbox from `boot`, which must make a fresh one of the task's snapshot each time.

    An empty patch is unresolved at once. None runs the tests on the untouched snapshot, which shows whether they fail
    there. own: the agent's box, for a task whose tests run there (`Grader.shares`); the caller closes it. timeout_s:
    seconds for `git apply` and the tests, unless the task has its own. rules: what of the patch is graded, and what is
    flagged. second_opinion: a task that is resolved is graded once more, with tests that must fail. spare_s: seconds
    for everything else; a grading that takes longer than both together (for each run of the tests) is GRADER_HUNG. Of a
    task with steps, each is tested with this patch, as if an agent had made it in the first one and then nothing.
    Raises nothing except on cancellation, and always closes the sandbox.
    """
    started, deadline = time.monotonic(), asyncio.timeout(None)
    try:
        grader = graders.named(task.grader)
        if grader.steps(task)[0] is not task:
            how: dict[str, Any] = {"rules": rules, "second_opinion": second_opinion, "spare_s": spare_s}
            return await step_by_step(task, lambda step, _: grade(step, patch, boot, timeout_s=timeout_s, **how))
        timeout_s = grader.timeout_s(task, timeout_s)
        runs = _RUNS if second_opinion else 1 if own is None else 2
        async with asyncio.timeout((spare_s + timeout_s) * runs) as deadline:
            verdict = await _screened(Grading(task, boot, timeout_s, rules, second_opinion, own=own), patch)
    except SandboxError as error:
        verdict = Verdict.infra(error.cause, str(error))
    except Exception as error:  # a bug in the grader must not become a reward of 0
        if deadline.expired():
            verdict = Verdict(Reason.GRADER_HUNG, f"no verdict after {time.monotonic() - started:.0f} s")
        else:
            verdict = Verdict(Reason.GRADER_CRASHED, f"{type(error).__name__}: {error}")
    return replace(verdict, seconds=time.monotonic() - started, grader=task.grader)


async def step_by_step(task: Task, one: Callable[[Task, bool], Awaitable[Verdict]]) -> Verdict:
    """Play and grade the steps of a task one after the other, as long as its grader goes on; return the whole verdict.

    one: returns the verdict on a step, given that and whether it is the last one; it may raise PatchTooLarge. An
    infrastructure failure of a step is the task's.
    """
    grader, verdicts = graders.named(task.grader), list[Verdict]()
    steps = grader.steps(task)
    for step in steps:
        try:
            verdicts.append(await one(step, step is steps[-1]))
        except PatchTooLarge as error:
            verdicts.append(Verdict(Reason.PATCH_TOO_LARGE, str(error)))
        if verdicts[-1].is_infra:
            return verdicts[-1]
        if not grader.goes_on(step, verdicts[-1]):
            break
    return grader.together(task, verdicts)


async def grade_gold(task: Task, boot: Callable[[], Awaitable[Sandbox]], **how: Any) -> Verdict:
    """Grade the known solution of a task; see `grade`, also for `how`. Raises nothing except on cancellation."""
    if task.patch:
        return await grade(task, task.patch.encode(), boot, **how)
    box = None
    try:
        grader, box = graders.named(task.grader), await boot()
        shares = grader.shares(task)

        async def solved(step: Task, _: bool) -> Verdict:
            await grader.solve(step, box)
            return await grade(step, await changes(box, shares), boot, box if shares else None, **how)

        return await step_by_step(task, solved)
    except SandboxError as error:
        return Verdict.infra(error.cause, str(error))
    except Exception as error:
        return Verdict(Reason.GRADER_CRASHED, f"{type(error).__name__}: {error}")
    finally:
        if box is not None:
            await box.close()


async def changes(box: Sandbox, shares: bool) -> bytes:
    """Return an agent's patch, and end all of its processes. Raises PatchTooLarge, SandboxError.

    shares: the tests run in this box. Then nothing is made of the patch but flags, and one that is too large is b"".
    """
    try:
        return await box.diff()
    except PatchTooLarge:
        if not shares:
            raise
        return b""


async def _screened(grading: Grading, patch: bytes | None) -> Verdict:
    if grading.own is not None:
        flags: tuple[str, ...] = ()
        with contextlib.suppress(PatchError):
            flags = (await asyncio.to_thread(grading.rules.screen, grading.task, patch or b"")).flags
        verdict = await _verdict(grading, ScreenedPatch([], (), ()))
        return replace(verdict, flags=tuple(sorted({*flags, *verdict.flags, IN_THE_AGENTS_BOX})))
    if patch is None:
        return await _verdict(grading, ScreenedPatch([], (), ()))
    if not patch.strip():
        return Verdict(Reason.EMPTY_PATCH)
    try:
        found = await asyncio.to_thread(grading.rules.screen, grading.task, patch)
    except PatchError as error:
        return Verdict(Reason.PATCH_APPLY_FAILED, str(error))
    if found.files:
        verdict = await _verdict(grading, found)
        found = grading.left
    else:
        verdict = Verdict(Reason.FORBIDDEN_PATH_ONLY, "the rules drop every file of the patch")
    verdict = replace(verdict, dropped=found.dropped, flags=tuple(sorted({*found.flags, *verdict.flags})))
    open_ = verdict.reason in (Reason.TESTS_FAILED, Reason.FORBIDDEN_PATH_ONLY, Reason.LOG_UNPARSABLE)
    if grading.second_opinion and found.unsure and open_:
        # The files may be a part of a solution. Nothing but a second opinion tells them from an attack.
        whole = await _verdict(grading, replace(found, files=[*found.files, *found.unsure], modules={}))
        if whole.reason is None and not {second.NONE, second.PARTIAL}.intersection(whole.flags):
            kept = {path for file in found.unsure for path in file.paths}
            dropped = tuple(path for path in found.dropped if path not in kept)
            return replace(whole, dropped=dropped, flags=tuple(sorted({*found.flags, *whole.flags, DECIDES})))
    return verdict


async def _verdict(grading: Grading, found: ScreenedPatch) -> Verdict:
    """Return the grader's verdict on what the rules leave of a patch. Raises SandboxError."""
    grading.left = found
    grader = graders.named(grading.task.grader)
    try:
        verdict = await grader.judge(grading)
    except RefusedError as error:
        return error.verdict
    if grading.second_opinion and verdict.reason is None and not grader.second_opinion:
        return grading.alone(verdict, "the grader has none")
    return verdict
