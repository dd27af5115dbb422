"""This module tests how tests are made wrong, and what is concluded from the run in which they must fail."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from rewards.falsify import falsified
from rewards.grade import grade
from rewards.second import falsifying
from rewards.verdict import Reason, Verdict
from rollout.episode import _Booting
from rollout.sandbox import SandboxError
from tests.unit.test_grade import CODE, END, PATCH, START, ScriptedBox, task

# Each function passes as it is, and must fail when it was made wrong.
SHAPES = {
    "a literal": "assert 1 + 1 == 2",
    "a literal on the left": "assert 2 == 1 + 1, 'message'",
    "negative": "assert -1 * 5 == -5",
    "a large float": "assert 10.0 ** 300 == 1e300",
    "text": "assert 'a' + 'b' == 'ab'",
    "bytes": "assert bytes([97]) == b'a'",
    "text of several lines": 'assert "\\n    ".join("ab") == """a\nb"""',
    "true": "assert bool(1) == True",
    "none": "assert [None][0] == None",
    "a list and a tuple": "assert list((1,)) == [1]\nassert tuple([1]) == (1,)",
    "a set and a dict": "assert set([1]) == {1}\nassert dict(a=1) == {'a': 1}",
    "empty": "assert list(()) == []\nassert dict() == {}",
    "numbers as keys": f"assert dict([(n, n) for n in range(999)]) == { {n: n for n in range(999)} }",
    "names": "a = b = 3\nassert a == b",
    "what equals everything": "from unittest import mock\na = [1]\nassert a == mock.ANY\nassert mock.ANY == a",
    "an object that equals everything": "class _A:\n    def __eq__(self, other): return True\nassert len('a') == _A()",
    "several lines": "assert (sum([1,\n  2]) ==\n    max(3,\n 2)), 'message'",
    "unicode": "assert 'ä€' + 'ö' == 'ä€ö', 'é'",
    "both are literals": "assert 1 == 1",
    "no comparison": "x = 1\nassert x",
    "no assertion": "int('1')",
    "only a docstring": '"""Nothing."""',
    "a return at its end": "x = 1\nreturn x",
    "a compound statement at its end": "for x in [1]:\n    pass",
    "a semicolon and a comment": "x = 1; y = 2;  # comment",
    "after if": "if True: x = 1",
    "with": "import contextlib\nwith contextlib.nullcontext(2) as x:\n    assert x == 2",
    "what swallows failures": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert len('a') == 1",
    "a try": "try:\n    assert len('a') == 1\nexcept AssertionError:\n    pass",
    "a loop": "for x, y in [(1, 2), (2, 3)]:\n    assert x + 1 == y",
    "a loop over nothing": "for x in range(0):\n    assert x == 5",
    "a loop that is left": "for x in (1, 2):\n    break\n    assert x == 1",
    "a method": "import unittest\nunittest.TestCase().assertEqual(1 + 1, 2, 'message')",
    "arguments that are unpacked": "import unittest\nunittest.TestCase().assertEqual(*(1, 1))",
    "a function in it": "def inner():\n    return 1\nassert inner() == 1",
    "a class in it": "class A:\n    def f(self):\n        yield 1\nassert list(A().f()) == [1]",
}


def module(body: str) -> bytes:
    return ("# ä\ndef test():\n" + textwrap.indent(body, "    ") + "\n").encode()


def run(source: bytes) -> None:
    space: dict[str, Any] = {}
    exec(compile(source, "test", "exec"), space)
    space["test"]()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_function_that_was_made_wrong_fails(shape: str) -> None:
    source = module(SHAPES[shape])
    run(source)
    for _ in range(20):  # what is changed is drawn
        wrong, done = falsified(source, ["test"])
        assert done == {"test"} and wrong != source
        with pytest.raises((AssertionError, NameError)):
            run(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    if 1:\n        return\n    assert 1 + 1 == 2\n",
        "def test():\n    yield 1\n    assert 1 + 1 == 2\n",
        "@mark.xfail\ndef test():\n    assert 1 + 1 == 2\n",
        "@unittest.expectedFailure\ndef test():\n    assert 1 + 1 == 2\n",
        "def other():\n    assert 1 + 1 == 2\n",
    ],
)
def test_what_may_not_fail_stays_as_it_is(source: str) -> None:
    assert falsified(source.encode(), ["test"]) == (source.encode(), set())


def test_all_functions_of_a_name_or_none() -> None:
    good, bad = (
        "    def test(self):\n        assert len('a') == 1\n",
        "    def test(self):\n        return\n        len('a')\n",
    )
    assert falsified(f"class A:\n{good}class B:\n{good}".encode(), ["test"])[1] == {"test"}
    assert falsified(f"class A:\n{good}class B:\n{bad}".encode(), ["test"])[1] == set()


def test_one_comparison_is_drawn_of_all() -> None:
    source = b"def test():\n    assert len('a') == 1\n    assert len('ab') == 2\n"
    assert len({falsified(source, ["test"])[0].split(b"==")[1].startswith(b" 1\n") for _ in range(60)}) == 2


def test_a_wrong_value_is_as_plausible_as_the_right_one() -> None:
    """Nothing but the value tells a wrong test from another one."""
    for _ in range(20):
        wrong, _ = falsified(b"def test():\n    assert f('x') == 'abc', 'message'\n", ["test"])
        assert re.fullmatch(rb"def test\(\):\n    assert f\('x'\) == 'abc[a-h]', 'message'\n", wrong)


def test_the_script_is_changed_before_its_tests_run() -> None:
    script = task().eval_script
    changed = falsifying(script, ["t.py::A::new[x::y]", "t.py::old", "a test"], "w0rd")
    assert "{'t.py': ['new', 'old']}" in changed
    head, tail = changed.split("\nw0rd\n")[0], changed.split("\nw0rd\n")[1]
    assert head.startswith("#!/bin/bash\nset -uxo pipefail\n") and tail == script[script.index(": '>>>>> Start") :]
    assert falsifying(script, ["a test", "t.js::new", "t.py", "t.py::a test"], "w0rd") == ""


# --- what is concluded

RIGHT = START + "PASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(0)
FAILED = START + "FAILED t.py::new - x\nPASSED t.py::old\n" + END + CODE.format(1)


async def opinion(second: Callable[[str], Any], **options: Any) -> tuple[Verdict, list[ScriptedBox]]:
    """Grade a patch that resolves; `second` is given the line with the secret and returns the other box, or its log."""
    boxes: list[ScriptedBox] = []

    class Second(ScriptedBox):
        async def exec(self, argv: Any, **options: Any) -> Any:
            said = re.search(rb"^main\('(\w+)'", options["stdin"], re.MULTILINE)
            assert said is not None
            self.log = second(said[1].decode() + " t.py::new\n")
            return await super().exec(argv, **options)

    async def boot() -> ScriptedBox:
        boxes.append(Second(**options) if boxes else ScriptedBox(RIGHT))
        return boxes[-1]

    return await grade(task(), PATCH, boot, timeout_s=9, second_opinion=True), boxes


@pytest.mark.parametrize(
    ("log", "reason", "detail"),
    [
        (FAILED, None, ""),
        (START + "FAILED t.py::old\n" + END + CODE.format(1), None, ""),  # e.g. after --maxfail=1
        (RIGHT, Reason.RESULTS_DISAGREE, "resolved"),
        (FAILED.replace("FAILED t.py::new - x", "FAILED t.py::more\nPASSED t.py::new"), Reason.RESULTS_DISAGREE, ""),
        (
            START + "FAILED t.py::old\nPASSED t.py::new\n" + END + CODE.format(1),
            Reason.RESULTS_DISAGREE,
            "t.py::new passes although",
        ),
        (START, Reason.RESULTS_DISAGREE, "log_unparsable"),
        (START + START + END, Reason.RESULTS_DISAGREE, "log_forged"),
    ],
)
async def test_conclusions(log: str, reason: Reason | None, detail: str) -> None:
    verdict, boxes = await opinion(lambda line: line + log)
    assert verdict.reason is reason and detail in verdict.detail, verdict
    assert [box.closed for box in boxes] == [1, 1] and bool(verdict.tests) == (reason is None)
    assert boxes[0].patch == boxes[1].patch == PATCH


async def test_without_a_test_that_could_be_made_wrong_there_is_no_opinion() -> None:
    for log in (RIGHT, FAILED):  # the tests as they are, which may be flaky
        verdict, _ = await opinion(lambda line, log=log: log)
        assert verdict.reason is None and verdict.detail.startswith("no second opinion")
    verdict, _ = await opinion(lambda line: START)  # something ended the run before the tests
    assert verdict.reason is Reason.RESULTS_DISAGREE


async def test_time_is_the_policys_and_a_broken_box_is_not() -> None:
    verdict, _ = await opinion(lambda line: line + START, timed_out=True)
    assert (verdict.reason, verdict.reward) == (Reason.TEST_TIMEOUT, 0.0)
    for error, reason in (
        (SandboxError("box_killed", "x"), Reason.BOX_KILLED),
        (RuntimeError("bug"), Reason.GRADER_CRASHED),
    ):
        verdict, boxes = await opinion(lambda line, error=error: error)
        assert (verdict.reason, verdict.reward, boxes[1].closed) == (reason, None, 1)


async def test_an_unresolved_task_is_graded_once() -> None:
    box = ScriptedBox(FAILED)

    async def boot() -> ScriptedBox:
        return box

    assert (await grade(task(), PATCH, boot, timeout_s=9, second_opinion=True)).reason is Reason.TESTS_FAILED
    assert box.runs == 1


async def test_an_episode_boots_another_box_for_the_second_opinion() -> None:
    boxes: list[ScriptedBox] = []

    async def boot() -> ScriptedBox:
        boxes.append(ScriptedBox())
        return boxes[-1]

    booting = _Booting(boot)
    assert [await booting.take(), await booting.take()] == boxes and len(boxes) == 2
    await booting.close()
    assert [box.closed for box in boxes] == [0, 0]  # whoever took them closes them
