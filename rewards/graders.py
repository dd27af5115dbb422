"""Graders: what judges a task's tests. A task's row names its grader, and a file may mix them.

Ours have short names; that of another package is ``module:Class``. A grader says what a task's row must have, and comes
to a verdict in fresh boxes that have the patch. Deadlines, the rules for patches, errors and flags are the same for all
(``rewards.grade``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rewards.verdict import Verdict
from rollout.dotted import attribute

if TYPE_CHECKING:  # both import this module
    from rewards.grading import Grading
    from rewards.task import Task
    from rollout.sandbox import Sandbox

SWE_BENCH = "swebench"
GRADERS = {SWE_BENCH: "rewards.swebench:SweBench", "harbor": "rewards.harbor:Harbor"}


class Grader:
    """A Grader judges the tests of tasks. One object grades all tasks of a process, several at the same time.

    second_opinion: whether ``judge`` tests a resolved task once more if ``grading.second_opinion`` asks for it. If not,
    the task counts as resolved without a second opinion, and is flagged. renews: whether ``judge`` needs boxes that can
    make directories at their root anew.
    """

    second_opinion = False
    renews = False

    def check(self, task: Task) -> None:
        """Raise TaskError if ``task`` cannot be graded: something is wrong with ``task.grading``."""

    def shares(self, task: Task) -> bool:
        """Return whether the tests of ``task`` run in the agent's own box, after all of the agent's processes."""
        return False

    def timeout_s(self, task: Task, given: float) -> float:
        """Return the seconds for one run of the tests of ``task``. given: what the config says."""
        return given

    def solvable(self, task: Task) -> bool:
        """Return whether a solution of ``task`` is known: by its gold patch, or by ``solve``."""
        return bool(task.patch)

    async def solve(self, task: Task, box: Sandbox) -> None:
        """Solve a task without a gold patch, in an agent's box that is graded afterwards. Raises SandboxError."""
        raise NotImplementedError

    async def judge(self, grading: Grading) -> Verdict:
        """Return the verdict on a patch, after running tests in boxes of ``grading.run`` or ``grading.patched``.

        A verdict without a reason is a resolved task; failed tests have TESTS_FAILED, others that the policy is to
        blame for likewise. What is not the policy's doing is raised: a SandboxError is an infrastructure failure with
        its cause, and any other exception is GRADER_CRASHED.
        """
        raise NotImplementedError


@functools.cache
def named(name: str) -> Grader:
    """Return the grader of a name. Raises ValueError, whose text says what it must be or why it cannot be had."""
    if name not in GRADERS and ":" not in name:
        raise ValueError(f"{name[:80]!r} is no grader; it must be one of {', '.join(GRADERS)}, or module:Class")
    try:
        made = attribute(GRADERS.get(name, name))()
    except ValueError as error:
        raise ValueError(f"{name[:80]!r} {error}") from error
    except Exception as error:  # another package's class may raise anything
        raise ValueError(f"{name[:80]!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Grader):
        raise ValueError(f"{name[:80]!r} is no subclass of rewards.graders.Grader")
    return made
