"""This module tests how tests are made wrong, and what is concluded from the run in which they must fail."""

from __future__ import annotations

import ast
import contextlib
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewards import falsify
from rewards.falsify import edited, edits
from rewards.grade import IN_THE_AGENTS_BOX, grade
from rewards.rules import Rules
from rewards.second import NONE, PARTIAL, Rewriting
from rewards.task import Task
from rewards.verdict import HOW_GRADED, Reason, Verdict
from rollout.episode import _Booting
from rollout.sandbox import SandboxError
from tests.unit.rewards.test_grade import CODE, END, PATCH, START, ScriptedBox, task

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


# Nothing in these is certain to make them fail.
NOTHING_SURE = {
    "no assertion", "only a docstring", "a return at its end", "a compound statement at its end",
    "a semicolon and a comment", "after if", "what swallows failures", "a try", "a loop over nothing",
    "a loop that is left",
}  # fmt: skip


def module(body: str) -> bytes:
    return ("# ä\ndef test():\n" + textwrap.indent(body, "    ") + "\n").encode()


def run(source: bytes) -> None:
    space: dict[str, Any] = {}
    exec(compile(source, "test", "exec"), space)
    space["test"]()


def made_wrong(source: bytes, names: list[str], sure: bool = True, seed: int | None = None) -> tuple[bytes, set[str]]:
    tree = ast.parse(source)
    nodes = [(node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    changes, done = edits(source, nodes, sure, random.Random(seed))
    return edited(source, [edit for some in changes.values() for edit in some]), done


@pytest.mark.parametrize("shape", SHAPES)
def test_a_function_that_was_made_wrong_fails(shape: str) -> None:
    source = module(SHAPES[shape])
    run(source)
    for _ in range(20):  # what is changed is drawn
        wrong, done = made_wrong(source, ["test"])
        assert (done == {"test"}) is (shape not in NOTHING_SURE) and (wrong != source) is bool(done)
        if done:
            with pytest.raises((AssertionError, NameError)):
                run(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    yield 1\n    assert 1 + 1 == 2\n",
        "@mark.xfail\ndef test():\n    assert 1 + 1 == 2\n",
        "@unittest.expectedFailure\ndef test():\n    assert 1 + 1 == 2\n",
        "def other():\n    assert 1 + 1 == 2\n",
    ],
)
def test_what_may_not_fail_stays_as_it_is(source: str) -> None:
    assert made_wrong(source.encode(), ["test"], sure=False) == (source.encode(), set())


def test_all_functions_of_a_name_or_none() -> None:
    good, bad = "    def test(self):\n        assert len('a') == 1\n", "    def test(self):\n        pass\n"
    assert made_wrong(f"class A:\n{good}class B:\n{good}".encode(), ["test"])[1] == {"test"}
    assert made_wrong(f"class A:\n{good}class B:\n{bad}".encode(), ["test"])[1] == set()


def test_one_comparison_is_drawn_of_all() -> None:
    source = b"def test():\n    assert len('a') == 1\n    assert len('ab') == 2\n"
    assert len({made_wrong(source, ["test"])[0].split(b"==")[1].startswith(b" 1\n") for _ in range(60)}) == 2


@pytest.mark.parametrize(
    ("right", "form"),
    [
        ("1", r"[0-9]"), ("42", r"[1-9][0-9]"), ("0.25", r"0\.[0-9]{2}"), ("-3", r"-[0-9]"), ("0x1f", r"0x[0-9]f"),
        ("'abc'", r"'[a-z]{3}'"), ("'the other end'", r"'[a-z]{3} [a-z]{3,7} [a-z]{3}'"), ("b'ab'", r"b'[a-z]{2}'"),
        ("[1, 'abc']", r"\[[0-9], '[a-z]{3}'\]"), ("'a\\n1'", r"'[a-z]\\n[0-9]'"), ("[]", r"\[[0-9]\]|\['[a-z ]+'\]"),
    ],
)  # fmt: skip
def test_a_wrong_value_has_the_form_of_the_right_one(right: str, form: str) -> None:
    source = f"def test():\n    assert f('xyz', 'uvw') == {right}, 'message'\n"
    found = set()
    for seed in range(30):
        wrong, _ = made_wrong(source.encode(), ["test"], seed=seed)
        match = re.fullmatch(rf"def test\(\):\n    assert f\('xyz', 'uvw'\) == ({form}), 'message'\n", wrong.decode())
        assert match and ast.literal_eval(match[1]) != ast.literal_eval(right), wrong
        found.add(wrong)
    assert len(found) > 1  # it differs from grading to grading


def test_what_decides_is_changed_before_anything_else() -> None:
    """A test's own values, if it has any, and not its operators; the inputs only if nothing else can be changed."""
    for body, places in {
        "assert f(1) == 2": ["f(1) =="],
        "expected = [1]\n    assert f() == expected": ["assert f() == expected"],
        "assert f(1) is True": ["is True", "is False", "is not True"],
        "with raises(ValueError):\n        f(1)": ["f(1)"],
        "self.assertEqual(f(1), 'abc')": ["self.assertEqual(f(1), '"],
        "with warns(A, match='abc'):\n        f(1)": ["f(1)"],
    }.items():
        for seed in range(20):
            wrong, done = made_wrong(f"def test():\n    {body}\n".encode(), ["test"], sure=False, seed=seed)
            assert done and any(place in wrong.decode() for place in places), (body, wrong)
    assert b"f(1)" not in made_wrong(b"def test():\n    f(1)\n", ["test"], sure=False)[0]
    assert not made_wrong(b"def test():\n    f(1)\n", ["test"], sure=True)[1]


def test_all_rows_of_a_parametrized_test_become_wrong() -> None:
    source = (
        b"@pytest.mark.parametrize(('a', 'want'), [(1, 'one'), param(2, 'two', id='x')])\n"
        b"def test(a, want):\n    assert f(a) == want\n"
    )
    wrong, done = made_wrong(source, ["test"], sure=False)
    assert done == {"test"} and b"(1, 'one')" not in wrong and b"(2, 'two'" not in wrong and b"(1, '" in wrong


FILES = {
    "tests/a/tests.py": "class B:\n    def test_base(self):\n        self.assertEqual(f(), 3)\nclass T(B):\n"
    '    def test_x(self):\n        """It works."""\n        self.assertEqual(f(1), "abc")\n',
    "pkg/core/tests/test_y.py": "def test_new():\n    assert f(x) == 12\n\ndef test_old():\n    assert f(y) == 3\n",
    "test_z.py": "class A:\n    def test(self):\n        assert f() == 1\nclass B:\n    def test(self):\n        f()\n",
}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("test_x (a.tests.T)", "tests/a/tests.py"), ("test_x (tests.a.tests.T.test_x)", "tests/a/tests.py"),
        ("test_base (a.tests.T)", "tests/a/tests.py"), ("It works.", "tests/a/tests.py"),
        ("test_new", "pkg/core/tests/test_y.py"), ("test_old (core.tests.test_y.T)", ""),
        ("pkg/core/tests/test_y.py::test_old[a-b]", "pkg/core/tests/test_y.py"), ("test_z.py::A::test", "test_z.py"),
        ("test_z.py::B::test", ""), ("TestGo", ""), ("test_z.py::C::test", ""), ("It does not.", ""),
    ],
)  # fmt: skip
def test_every_runners_names_are_functions(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    said = f"w0rd{'' if path else '='} {name.partition('[')[0]}\n"
    falsify.main("w0rd", 0, True, "seed", [name], [], [*FILES])
    assert {file: Path(file).read_text() for file in FILES} == FILES and capsys.readouterr().out == said
    falsify.main("w0rd", 1, True, "seed", [name], [], [*FILES])
    assert [file for file, text in FILES.items() if Path(file).read_text() != text] == ([path] if path else [])
    assert capsys.readouterr().out == said


def test_a_sample_of_the_other_tests_becomes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("".join(f"def test_{n}():\n    assert f() == {n}\n" for n in range(40)))
    names = [f"t.py::test_{n}" for n in range(40)]
    said = []
    for seed in range(40):
        falsify.main("w", 1, True, str(seed), names[:1], names[1:], [])
        said.append(capsys.readouterr().out)
    assert all("w t.py::test_0\n" in one for one in said) and len(set(said)) > 5
    # The agent may know these tests, and could tell by them that the others are wrong.
    assert {one.count("\n") for one in said} == {1, 21} and 20 < sum(one.count("\n") == 1 for one in said) < 38


@pytest.mark.parametrize("patched", [True, False])
def test_a_module_that_a_patch_adds_hides_no_test(
    patched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named like the test's, in a directory that is searched first."""
    monkeypatch.chdir(tmp_path)
    text = "class T:\n    def test_x(self):\n        self.assertEqual(f(), 3)\n"
    for path in ("a/__init__.py", "tests/a.py"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    falsify.main("w", 1, True, "seed", ["test_x (a.T)"], [], ["tests/a.py"] if patched else [])
    assert capsys.readouterr().out == "w test_x (a.T)\n" and Path("tests/a.py").read_text() != text


def test_some_of_several_tests_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test that shares its function with a wrong one is neither."""
    monkeypatch.chdir(tmp_path)
    shared = "class Base:\n    def test_x(self):\n        assert f() == 7\nclass A(Base): pass\nclass B(Base): pass\n"
    text = "".join(f"def test_{n}():\n    assert f() == {n}\n" for n in range(4)) + shared
    names = [*(f"t.py::test_{n}" for n in range(4)), "t.py::A::test_x", "t.py::B::test_x"]
    sizes = set()
    for seed in range(40):
        Path("t.py").write_text(text)
        falsify.main("w", 1, True, str(seed), names, [], [])
        lines = capsys.readouterr().out.splitlines()
        wrong, part = ({line.partition(" ")[2] for line in lines if line.startswith(start)} for start in ("w ", "w- "))
        sizes.add(len(wrong))
        assert 1 <= len(wrong) < len(names) and not wrong & part
        assert len(part) == (len({"t.py::A::test_x", "t.py::B::test_x"} & wrong) == 1)
        for n in range(4):
            kept = f"def test_{n}():\n    assert f() == {n}\n" in Path("t.py").read_text()
            assert kept == (f"t.py::test_{n}" not in wrong)
    assert len(sizes) > 3


def test_answers_that_are_right_in_part_are_found_in_most_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that equals each of its length passes most wrong tests; where one has another length, it is not found."""

    class Text(str):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, str) and len(self) == len(other)

    monkeypatch.chdir(tmp_path)
    text = (
        "def test_a():\n    assert f('ab') == 'ba'\n    assert f('') == ''\n\ndef test_b():\n    assert f('c') == 'c'\n"
    )
    found = 0
    for seed in range(200):
        Path("t.py").write_text(text)
        falsify.main("w", 1, True, str(seed), ["t.py::test_a", "t.py::test_b"], [], [])
        (wrong,) = re.findall(r"^w t\.py::(\w+)$", capsys.readouterr().out, re.MULTILINE)
        space: dict[str, Any] = {"f": Text}
        exec(Path("t.py").read_text(), space)
        with contextlib.suppress(AssertionError):
            space[wrong]()
            found += 1
    assert 140 < found < 190


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "ValueError", "KeyError", "UserWarning"])
def test_a_wrong_test_is_never_what_it_was(kind: str) -> None:
    source = f"def test_x():\n    with pytest.raises({kind}):\n        f()\n".encode()
    for seed in range(100):
        new, done = made_wrong(source, ["test_x"], seed=seed)
        assert bool(done) == (new != source)


def test_both_runs_have_the_same_script() -> None:
    row = task(FAIL_TO_PASS='["t.py::A::new[x::y]"]')
    rewriting = Rewriting(row)
    script = rewriting.script(row.eval_script)
    assert script.startswith("#!/bin/bash\nset -uxo pipefail\n( for python") and ": '>>>>> Start" in script
    right, wrong = rewriting.program(wrong=False), rewriting.program(wrong=True)
    assert [(a, b) for a, b in zip(right.split(), wrong.split(), strict=True) if a != b] == [("0,", "1,")]
    compile(right, "program", "exec")
    assert rewriting.possible and not Rewriting(task(FAIL_TO_PASS='["TestNew"]')).possible


# --- what is concluded

RIGHT = START + "PASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(0)
FAILED = START + "FAILED t.py::new - x\nPASSED t.py::old\n" + END + CODE.format(1)


async def opinion(
    second: Callable[[str], Any], gold: str = "", of: Task | None = None, rules: Rules | None = None, **options: Any
) -> tuple[Verdict, list[ScriptedBox]]:
    """Grade a patch that resolves; `second` is given the line with the secret and returns the other box, or its log.

    gold: the log of the wrong tests with the gold patch.
    """
    boxes: list[ScriptedBox] = []

    class Second(ScriptedBox):
        async def exec(self, argv: Any, **options: Any) -> Any:
            said = re.search(rb"^main\('(\w+)', 1,", options["stdin"], re.MULTILINE)
            assert said is not None
            line = said[1].decode() + " t.py::new\n"
            self.log = line + gold if len(boxes) == 3 else second(line)
            return await super().exec(argv, **options)

    async def boot() -> ScriptedBox:
        boxes.append(Second(**options) if boxes else ScriptedBox(RIGHT))
        return boxes[-1]

    verdict = await grade(
        of or task(), PATCH, boot, timeout_s=9, second_opinion=True, rules=rules or Rules()
    )  # fmt: skip
    return verdict, boxes


DISAGREEING = [
    (RIGHT, "resolved"),
    (FAILED.replace("FAILED t.py::new - x", "FAILED t.py::more\nPASSED t.py::new"), ""),
    (START + "FAILED t.py::old\nPASSED t.py::new\n" + END + CODE.format(1), "t.py::new passes although"),
    (START, "log_unparsable"),
    (START + START + END, "log_forged"),
]


@pytest.mark.parametrize(("log", "detail"), DISAGREEING)
async def test_what_honest_code_does_not_do_is_no_reward(log: str, detail: str) -> None:
    verdict, boxes = await opinion(lambda line: line + log)
    assert verdict.reason is Reason.RESULTS_DISAGREE and detail in verdict.detail, verdict
    assert [box.closed for box in boxes] == [1, 1] and not verdict.tests
    assert boxes[0].patch == boxes[1].patch == PATCH and boxes[0].script == boxes[1].script


async def test_what_honest_code_does_keeps_the_reward() -> None:
    for log in (FAILED, START + "FAILED t.py::old\n" + END + CODE.format(1)):  # e.g. after --maxfail=1
        verdict, boxes = await opinion(lambda line, log=log: line + log)
        assert (verdict.reason, verdict.detail, verdict.flags) == (None, "", ()) and verdict.tests
        assert [box.closed for box in boxes] == [1, 1]
    # Only other tests can be made wrong.
    verdict, _ = await opinion(
        lambda line: line.replace("new", "old") + START + "FAILED t.py::old\n" + END + CODE.format(1)
    )
    assert (verdict.reward, verdict.flags) == (1.0, (NONE,)) and "of FAIL_TO_PASS" in verdict.detail
    # Another test cannot be made wrong, and may be forged alone.
    verdict, _ = await opinion(lambda line: line + line.replace(" ", "= ") + FAILED)
    assert (verdict.reward, verdict.flags) == (1.0, (PARTIAL,))
    assert {NONE, PARTIAL, IN_THE_AGENTS_BOX} == HOW_GRADED


@pytest.mark.parametrize(("log", "detail"), DISAGREEING)
async def test_the_gold_patch_tells_which_changes_decide_nothing(log: str, detail: str) -> None:
    """An outcome that wrong tests have with the gold patch, too, is no sign of anything."""
    known = task(patch=PATCH.decode())
    verdict, boxes = await opinion(lambda line: line + log, gold=log, of=known)
    assert verdict.reason is None and verdict.flags == (NONE,) and verdict.detail.startswith("no second opinion: ")
    assert [box.closed for box in boxes] == [1, 1, 1] and boxes[2].program == boxes[1].program
    verdict, _ = await opinion(lambda line: line + log, gold=FAILED, of=known)
    assert verdict.reason is Reason.RESULTS_DISAGREE and detail in verdict.detail


async def test_a_wrong_test_that_passes_with_the_gold_patch_may_be_forged_alone() -> None:
    log = START + "FAILED t.py::old - x\nPASSED t.py::new\n" + END + CODE.format(1)
    for names, flag in (('["t.py::new", "t.py::old"]', PARTIAL), ('["t.py::new"]', NONE)):
        known = task(patch=PATCH.decode(), FAIL_TO_PASS=names, PASS_TO_PASS='["t.py::old"]')
        verdict, _ = await opinion(lambda line: line + line.replace("new", "old") + log, gold=log, of=known)
        assert (verdict.reward, verdict.flags) == (1.0, (flag,)), verdict


async def test_a_reward_without_a_second_opinion_can_be_worth_nothing() -> None:
    for log in (RIGHT, FAILED):  # the tests as they are, which may be flaky
        verdict, _ = await opinion(lambda line, log=log: log)
        assert verdict.reward == 1.0 and verdict.flags == (NONE,)
        assert verdict.detail == "no second opinion: no test could be made wrong"
        verdict, _ = await opinion(lambda line, log=log: log, rules=Rules(needs_second_opinion=True))
        assert (verdict.reason, verdict.reward) == (Reason.NO_SECOND_OPINION, 0.0) and verdict.flags == (NONE,)
    verdict, _ = await opinion(lambda line: START)  # something ended the run before the tests
    assert verdict.reason is Reason.RESULTS_DISAGREE
    gotest = task(FAIL_TO_PASS='["TestNew"]', PASS_TO_PASS="[]", log_parser="parse_log_gotest")
    box = ScriptedBox(START + "--- PASS: TestNew (0.0s)\n" + END + CODE.format(0))

    async def boot() -> ScriptedBox:
        return box

    verdict = await grade(gotest, PATCH, boot, timeout_s=9, second_opinion=True)
    assert verdict.reward == 1.0 and verdict.flags == (NONE,) and "no functions of Python" in verdict.detail
    assert box.runs == 1 and b"rewriting" not in box.script


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
