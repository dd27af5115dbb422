"""A verdict is the result of grading one patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

HOW_GRADED = frozenset({"no_second_opinion", "partial_second_opinion", "graded_in_agents_box"})
"""Flags that say how well a grader can tell, and nothing of a patch: honest ones of such tasks have them, too."""


class Outcome(StrEnum):
    """An Outcome is what a verdict counts as."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    INFRA_FAILURE = "infra_failure"


class Reason(StrEnum):
    """A Reason says why a task was not resolved. The first group are the policy's failures, the others are ours."""

    # the policy's
    EMPTY_PATCH = "empty_patch"
    PATCH_TOO_LARGE = "patch_too_large"
    PATCH_APPLY_FAILED = "patch_apply_failed"
    FORBIDDEN_PATH_ONLY = "forbidden_path_only"  # the rules drop every file of the patch
    TESTS_FAILED = "tests_failed"
    TEST_TIMEOUT = "test_timeout"
    LOG_UNPARSABLE = "log_unparsable"  # no results, or ones that contradict the exit status
    LOG_FORGED = "log_forged"  # it has marker lines that the eval script did not print
    RESULTS_DISAGREE = "results_disagree"  # a test failed and passed, or passes although it was made wrong
    NO_SECOND_OPINION = "no_second_opinion"  # resolved, but no test could be made wrong, and grading needs that
    NOT_GRADED = "not_graded"  # nobody asked: it has no reward

    # ours, which are no reward of 0
    AGENT_CRASHED = "agent_crashed"
    ENGINE_FAILED = "engine_failed"
    PROXY_FAILED = "proxy_failed"  # it stopped while the agent worked, or the episode got no socket
    TASK_INVALID = "task_invalid"  # the row cannot be graded at all
    GRADER_CRASHED = "grader_crashed"
    GRADER_HUNG = "grader_hung"  # it took longer than all its limits together
    REWARD_FAILED = "reward_failed"  # the config's reward function raised or returned no finite number
    # The causes of SandboxError; all other causes are SANDBOX_FAILED.
    MISSING_SNAPSHOT = "missing_snapshot"
    MISSING_BIND = "missing_bind"
    NO_BWRAP = "no_bwrap"
    NO_GIT = "no_git"
    NO_SPACE = "no_space"
    BOOT_FAILED = "boot_failed"
    EXEC_FAILED = "exec_failed"
    NO_ENGINE = "no_engine"  # nothing that runs containers
    DOCKER_FAILED = "docker_failed"
    MISSING_IMAGE = "missing_image"
    SEAL_FAILED = "seal_failed"
    BOX_KILLED = "box_killed"  # from outside the box
    SANDBOX_FAILED = "sandbox_failed"

    @property
    def is_infra(self) -> bool:
        """Tell whether this is an infrastructure failure."""
        return self not in _POLICY


_REASONS = tuple(Reason)
_POLICY = frozenset(_REASONS[: _REASONS.index(Reason.AGENT_CRASHED)])


@dataclass(frozen=True)
class Verdict:
    """A Verdict is the result of one grading; its reason decides the outcome.

    reason: None if and only if the task was resolved. detail: one line for people, may be empty. tests:
    {"FAIL_TO_PASS" | "PASS_TO_PASS": {"success" | "failure": names of tests}}, empty if no results were read. seconds:
    wall time of the grading, boot included. log_tail: the end of the test log, which names hidden tests and must never
    reach an agent. dropped: paths of the patch that were not graded. flags: names of what is suspicious in the patch
    (`rewards.rules`), and of `HOW_GRADED`. shaped: the reward, if it is not that of the outcome (`rewards.shape`).
    not_passing: tests that neither failed nor passed: skipped ones, and those that failed as expected. grader: the name
    of what came to the verdict, "" if nothing did.
    """

    reason: Reason | None
    detail: str = ""
    tests: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    seconds: float = 0.0
    log_tail: str = field(default="", repr=False)
    dropped: Sequence[str] = ()
    flags: Sequence[str] = ()
    shaped: float | None = None
    not_passing: Sequence[str] = field(default=(), repr=False)
    grader: str = ""

    @property
    def outcome(self) -> Outcome:
        """Return the outcome that follows from the reason."""
        if self.reason is None:
            return Outcome.RESOLVED
        return Outcome.INFRA_FAILURE if self.reason.is_infra else Outcome.UNRESOLVED

    @property
    def is_infra(self) -> bool:
        """Tell whether this is an infrastructure failure, which is never the policy's fault."""
        return self.outcome is Outcome.INFRA_FAILURE

    @property
    def reward(self) -> float | None:
        """Return 1.0 or 0.0, or the shaped reward; None for an infrastructure failure, and if nothing was graded."""
        if self.is_infra or self.reason is Reason.NOT_GRADED:
            return None
        if self.shaped is not None:
            return self.shaped
        return 1.0 if self.outcome is Outcome.RESOLVED else 0.0

    @classmethod
    def infra(cls, cause: str, detail: str = "") -> Verdict:
        """Make a verdict on an infrastructure failure.

        A cause that is not the value of such a Reason becomes SANDBOX_FAILED, with the cause in the detail, because
        this is called while errors are handled and must not raise another one.
        """
        known = {reason.value: reason for reason in Reason if reason.is_infra}
        if cause in known:
            return cls(known[cause], detail)
        return cls(Reason.SANDBOX_FAILED, detail if cause in detail else f"{cause}: {detail}")

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values that JSON can hold, for records."""
        return {
            "outcome": self.outcome.value,
            "reason": self.reason.value if self.reason else None,
            "reward": self.reward,
            "shaped": self.shaped is not None,
            "detail": self.detail,
            "tests": {kind: {k: list(v) for k, v in results.items()} for kind, results in self.tests.items()},
            "seconds": self.seconds,
            "log_tail": self.log_tail,
            "dropped": list(self.dropped),
            "flags": list(self.flags),
            "grader": self.grader,
        }
