"""What grading one patch came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    INFRA_FAILURE = "infra_failure"


class Reason(StrEnum):
    """Why a task was not resolved. The first group is the policy's doing, the second ours."""

    EMPTY_PATCH = "empty_patch"
    PATCH_TOO_LARGE = "patch_too_large"
    PATCH_APPLY_FAILED = "patch_apply_failed"
    TESTS_FAILED = "tests_failed"
    TEST_TIMEOUT = "test_timeout"
    LOG_UNPARSABLE = "log_unparsable"  # no results, or ones that contradict the exit status
    LOG_FORGED = "log_forged"  # marker lines that the eval script did not print

    BOOT_FAILED = "boot_failed"
    SANDBOX_FAILED = "sandbox_failed"  # the box broke after it had started
    TASK_INVALID = "task_invalid"  # the row cannot be graded at all
    GRADER_CRASHED = "grader_crashed"

    @property
    def infrastructure(self) -> bool:
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {Reason.BOOT_FAILED, Reason.SANDBOX_FAILED, Reason.TASK_INVALID, Reason.GRADER_CRASHED}
)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one grading; the reason decides it.

    reason: None exactly when resolved. detail: one line for people, may be empty.
    tests: {"FAIL_TO_PASS" | "PASS_TO_PASS": {"success" | "failure": test names}}, empty when no test
    results were read. seconds: wall time of the grading, boot included. log_tail: the end of the test
    log; it names hidden tests, so it must never reach an agent.
    """

    reason: Reason | None
    detail: str = ""
    tests: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    seconds: float = 0.0
    log_tail: str = field(default="", repr=False)

    @property
    def outcome(self) -> Outcome:
        if self.reason is None:
            return Outcome.RESOLVED
        return Outcome.INFRA_FAILURE if self.reason.infrastructure else Outcome.UNRESOLVED

    @property
    def reward(self) -> float | None:
        """1.0 or 0.0; None for an infrastructure failure, which is no evidence about the policy."""
        if self.outcome is Outcome.INFRA_FAILURE:
            return None
        return 1.0 if self.outcome is Outcome.RESOLVED else 0.0
