"""This module tests what is read of Harbor's rewards, and the grader with a scripted box; tests/boxes has real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.grade import IN_THE_AGENTS_BOX, grade
from rewards.harbor import READ, Harbor, digest, nothing_passed, read_tree, reward_in
from rewards.rules import Rules
from rewards.second import NONE
from rewards.task import Task, TaskError
from rewards.verdict import Outcome, Reason, Verdict
from rollout.sandbox import ExecResult, SandboxError

PATCH = b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n"


@pytest.mark.parametrize(
    ("name", "data", "reward"),
    [
        ("reward.txt", b"1\n", 1.0),
        ("reward.txt", b" 0.25 ", 0.25),
        ("reward.json", b'{"reward": 0, "style": 3}', 0.0),
        ("reward.json", b'{"reward": true}', 1.0),
        ("reward.txt", b"", "reward.txt cannot be read"),
        ("reward.txt", b"nan", "reward.txt cannot be read: not all values are numbers"),
        ("reward.txt", b"1e9", "reward.txt: 1e+09 is not between 0 and 1"),
        ("reward.txt", b"-0.1", "reward.txt: -0.1 is not between 0 and 1"),
        ("reward.txt", b"0" * 2**20, "reward.txt is too large"),
        ("reward.json", b"[1]", "reward.json cannot be read: no object"),
        ("reward.json", b'{"style": 1}', "reward.json has no 'reward'"),
        ("reward.json", b'{"reward": 1, "style": "NaN"}', "reward.json cannot be read"),
        ("reward.json", b'{"reward": 1e309}', "reward.json cannot be read"),
        ("reward.json", b'{"reward": 1' + b"0" * 400 + b"}", "reward.json cannot be read"),
        ("reward.json", b"[" * 100_000, "reward.json cannot be read"),
    ],
)
def test_what_is_a_reward(name: str, data: bytes, reward: float | str) -> None:
    if isinstance(reward, float):
        assert reward_in(name, data, "reward") == reward
        return
    with pytest.raises(ValueError) as caught:
        reward_in(name, data, "reward")
    assert str(caught.value).startswith(reward)


@given(st.sampled_from(["reward.txt", "reward.json"]), st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_file_is_a_reward_or_none(name: str, data: bytes) -> None:
    try:
        assert 0 <= reward_in(name, data, "reward") <= 1
    except ValueError as error:
        assert str(error).startswith(name)


@pytest.mark.parametrize(
    ("log", "nothing"),
    [
        ("== 3 skipped in 0.01s ==\n", True),
        ("3 skipped in 0.01s\n", True),
        ("== no tests ran in 0.00s ==\n", True),
        ("2 deselected in 0.10s\n", True),
        ("== 1 passed, 3 skipped in 0.01s ==\n", False),
        ("3 skipped in 0.01s\n1 passed in 0.01s\n", False),
        ("Ran 2 tests in 0.1s\n\nOK (skipped=2)\n", True),
        ("Ran 2 tests in 0.1s\n\nOK (skipped=1)\n", False),
        ("Ran 2 tests in 0.1s\n\nOK\n", False),
        ("nobody knows this runner\n", False),
    ],
)
def test_a_run_in_which_nothing_passed(log: str, nothing: bool) -> None:
    assert nothing_passed(log) is nothing


def test_a_report_tells_that_nothing_passed() -> None:
    def report(passed: object) -> bytes:
        return json.dumps({"results": {"summary": {"tests": 2, "passed": passed, "skipped": 2}}}).encode()

    assert nothing_passed("", report(0)) and not nothing_passed("", report(1))
    assert not nothing_passed("", b"[]") and not nothing_passed("", b"{") and not nothing_passed("", None)


class ScriptedBox:
    """A box in which test.sh leaves these files, or whose programs fail; ``fails`` is used up first."""

    workdir, home, tmpdir = "/app", "/home/agent", "/tmp"

    def __init__(self, left: Mapping[str, bytes], fails: Sequence[Exception] = (), returncode: int | None = 0) -> None:
        self.left, self.fails, self.returncode = left, [*fails], returncode
        self.ran: list[Sequence[str]] = []
        self.made: dict[str, Mapping[str, bytes]] = {}
        self.closed = 0

    async def exec(self, argv: Sequence[str], **how: Any) -> ExecResult:
        if self.fails:
            raise self.fails.pop(0)
        self.ran.append(argv)
        return ExecResult(self.returncode, b"", b"", self.returncode is None, False, 0.1)

    async def put(self, path: str, data: bytes) -> None:
        pass

    async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
        self.made[path] = files

    async def get(self, path: str) -> bytes:
        if path not in self.left:
            raise FileNotFoundError(path)
        return self.left[path]

    async def diff(self) -> bytes:
        return b""

    async def close(self) -> None:
        self.closed += 1


def made(place: Path, **changes: Any) -> Task:
    """Return a task with a test.sh on the disk; changes: of what its grader reads."""
    (place / "one" / "tests").mkdir(parents=True, exist_ok=True)
    (place / "one" / "tests" / "test.sh").write_text("true\n")
    asked = {
        "directory": "one",
        "sha256": digest({name: read_tree(place / "one" / name) for name in READ}),
        "mode": "shared",
        "reward": "reward",
        "threshold": 1.0,
        "timeout_s": 7.0,
        **changes,
    }
    row = {"instance_id": "one", "image": "i:1", "repo": "one", "problem_statement": "Do it.", "grader": "harbor"}
    return Task.from_row({**row, "grading": asked}, place)


async def graded(task: Task, own: ScriptedBox, fresh: ScriptedBox | None = None, **options: Any) -> Verdict:
    async def boot() -> ScriptedBox:
        assert fresh is not None
        return fresh

    return await grade(task, b"", boot, own, timeout_s=1, **options)


def reward(text: str) -> dict[str, bytes]:
    return {"/logs/verifier/reward.txt": text.encode()}


async def test_rewards_between_0_and_1_are_kept(tmp_path: Path) -> None:
    verdict = await graded(made(tmp_path), box := ScriptedBox(reward("1")))
    assert (verdict.reason, verdict.shaped, verdict.reward) == (None, None, 1.0)
    assert verdict.flags == (IN_THE_AGENTS_BOX,) and verdict.grader == "harbor"
    assert box.made["/tests"] == {"test.sh": b"true\n"} and set(box.made) == {"/tests", "/logs"}
    assert box.closed == 0  # its episode closes it
    verdict = await graded(made(tmp_path), ScriptedBox(reward("0.5")))
    assert (verdict.reason, verdict.reward) == (Reason.TESTS_FAILED, 0.5)
    verdict = await graded(made(tmp_path, threshold=0.5), ScriptedBox(reward("0.5")))
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 0.5)
    verdict = await graded(made(tmp_path), ScriptedBox(reward("0")))
    assert (verdict.reason, verdict.shaped, verdict.reward) == (Reason.TESTS_FAILED, None, 0.0)


STEPS = [{"name": "a", "statement": "A", "min_reward": 0.4}, {"name": "b", "statement": "B"}]


@pytest.mark.parametrize(
    ("verdicts", "strategy", "outcome"),
    [
        ([Verdict(None), Verdict(None)], "mean", (None, 1.0)),
        ([Verdict(None), Verdict(Reason.TESTS_FAILED, shaped=0.5)], "mean", (Reason.TESTS_FAILED, 0.75)),
        ([Verdict(None), Verdict(Reason.TEST_TIMEOUT)], "mean", (Reason.TEST_TIMEOUT, 0.5)),
        ([Verdict(None), Verdict(Reason.EMPTY_PATCH)], "final", (Reason.EMPTY_PATCH, 0.0)),
        ([Verdict(Reason.TESTS_FAILED, shaped=0.5), Verdict(None)], "final", (None, 1.0)),
        ([Verdict(Reason.TESTS_FAILED, shaped=0.25)], "mean", (Reason.TESTS_FAILED, 0.25)),
        ([Verdict(None)], "final", (Reason.TESTS_FAILED, 1.0)),
        ([Verdict(Reason.NOT_GRADED)] * 2, "mean", (Reason.NOT_GRADED, None)),
    ],
)
def test_the_reward_of_steps(
    tmp_path: Path, verdicts: list[Verdict], strategy: str, outcome: tuple[Reason | None, float | None]
) -> None:
    task = made(tmp_path, mode="separate", steps=STEPS, strategy=strategy)
    verdict = Harbor().together(task, verdicts)
    assert (verdict.reason, verdict.reward) == outcome
    assert Harbor().together(made(tmp_path), verdicts) is verdicts[-1]


@pytest.mark.parametrize(
    ("verdict", "first", "second"),
    [
        (Verdict(None), True, True),
        (Verdict(Reason.NOT_GRADED), True, True),
        (Verdict(Reason.TESTS_FAILED, shaped=0.4), True, True),
        (Verdict(Reason.TESTS_FAILED, shaped=0.3), False, True),
        (Verdict(Reason.EMPTY_PATCH), False, True),
        (Verdict(Reason.TEST_TIMEOUT), False, False),
        (Verdict(Reason.LOG_UNPARSABLE), False, False),
    ],
)
def test_which_steps_are_followed_by_another(tmp_path: Path, verdict: Verdict, first: bool, second: bool) -> None:
    one, two = Harbor().steps(made(tmp_path, mode="separate", steps=STEPS))
    assert (Harbor().goes_on(one, verdict), Harbor().goes_on(two, verdict)) == (first, second)


async def test_a_task_without_a_second_opinion_that_needs_one_is_worth_nothing(tmp_path: Path) -> None:
    task, box = made(tmp_path, threshold=0.5), ScriptedBox(reward("0.7"))
    verdict = await graded(task, box, second_opinion=True)
    assert (verdict.reward, verdict.flags) == (0.7, (IN_THE_AGENTS_BOX, NONE))
    verdict = await graded(task, box, second_opinion=True, rules=Rules(needs_second_opinion=True))
    assert (verdict.reason, verdict.reward) == (Reason.NO_SECOND_OPINION, 0.0)


@pytest.mark.parametrize(
    ("left", "returncode", "reason"),
    [
        ({}, 0, Reason.LOG_UNPARSABLE),
        ({}, 1, Reason.LOG_UNPARSABLE),
        (reward("2"), 0, Reason.LOG_UNPARSABLE),
        (reward("1"), 137, Reason.LOG_UNPARSABLE),
        (reward("1"), None, Reason.TEST_TIMEOUT),
        (reward("0") | {"/logs/verifier/reward.json": b'{"reward": 1}'}, 0, Reason.RESULTS_DISAGREE),
        (reward("1") | {"/logs/verifier/reward.json": b'{"reward": 1}'}, 0, None),
        (
            reward("1") | {"/logs/verifier/ctrf.json": b'{"results": {"summary": {"passed": 0}}}'},
            0,
            Reason.TESTS_FAILED,
        ),
    ],
)
async def test_what_the_policy_could_have_done_is_its_doing(
    tmp_path: Path, left: dict[str, bytes], returncode: int | None, reason: Reason | None
) -> None:
    verdict = await graded(made(tmp_path), ScriptedBox(left, returncode=returncode))
    assert verdict.reason is reason and not verdict.is_infra


async def test_a_box_that_runs_nothing_is_the_policys_doing_if_a_fresh_one_works(tmp_path: Path) -> None:
    task = made(tmp_path)
    error = SandboxError("box_killed", "the container was ended from outside")
    verdict = await graded(task, ScriptedBox(reward("1"), [error]))
    assert verdict.reason is None  # it ran when it was tried again
    fresh = ScriptedBox({})
    verdict = await graded(task, ScriptedBox(reward("1"), [error, error]), fresh)
    assert verdict.reason is Reason.LOG_UNPARSABLE and "ended from outside" in verdict.detail
    assert fresh.closed == 1 and "/tests" not in fresh.made
    full = ScriptedBox({}, [SandboxError("no_space", "the disk is full")])
    verdict = await graded(task, ScriptedBox(reward("1"), [error, error]), full)
    assert verdict.reason is Reason.NO_SPACE and full.closed == 1


async def test_a_box_that_is_gone_is_an_infrastructure_failure(tmp_path: Path) -> None:
    class Gone(ScriptedBox):
        async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
            raise SandboxError("box_killed", "the container was removed from outside")

    assert (await graded(made(tmp_path), Gone({}))).reason is Reason.BOX_KILLED


async def test_tests_that_have_changed_are_not_run(tmp_path: Path) -> None:
    task = made(tmp_path)
    (tmp_path / "one" / "tests" / "test.sh").write_text("echo 1 >/logs/verifier/reward.txt\n")
    verdict = await graded(task, box := ScriptedBox(reward("1")))
    assert verdict.reason is Reason.TASK_INVALID and not box.ran
    with pytest.raises(TaskError, match=r"one: grading: the tests in .*one have changed since the task was converted"):
        Task.from_row(task.to_row(), tmp_path)
    with pytest.raises(TaskError, match="are not there"):
        Task.from_row(task.to_row(), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "both"}, "mode is 'both'; it must be one of shared, separate"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"threshold": True}, "threshold is True"),
        ({"reward": None}, "reward is None"),
        ({"steps": STEPS}, "its steps cannot be graded in the agent's own box"),
        ({"mode": "separate", "steps": [{"name": "../a", "statement": ""}]}, "its steps are no list"),
        ({"mode": "separate", "steps": [STEPS[0] | {"min_reward": "1"}]}, "min_reward is '1'"),
        ({"mode": "separate", "steps": [STEPS[0] | {"timeout_s": -1}]}, "timeout_s is -1"),
        ({"drop": ["a", "[b"]}, "drop is ['a', '[b']"),
        ({"sha256": "0"}, "the tests in"),
    ],
)
def test_what_is_wrong_is_said_of_the_row(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        made(tmp_path, **changes)
    assert str(caught.value).startswith(f"one: grading: {said}")
