"""Hidden tests leave an agent's tree and come back in grading; statements tell what was seen and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.data.make.runs import Failure
from rl.data.make.snippet import Snippet, snippets
from rl.data.make.statement import LEVELS, ShownFailure, leaks, show, statements
from rl.data.make.tasks import CannotHideError, HiddenTests, eval_script, hide, logged, without

TESTS = '''\
import pytest
from shop import Basket, total   # the package

RATE = 3


@pytest.mark.parametrize("amount", [1, 2])
def test_total(amount):
    assert total(amount) == amount * RATE


class TestBasket:
    """Baskets."""

    def test_add(self):
        basket = Basket()
        basket.add(2)
        other = Basket()
        assert basket.sum() == 2

    def test_refuse(self):
        with pytest.raises(ValueError):
            Basket().add(-1)


class TestAlone:
    def test_one(self, thing):
        assert thing.works()
'''


def failure(test: str, line: int, **more) -> Failure:
    path = test.partition("::")[0]
    return Failure(test=test, when="call", type="AssertionError", message="", frames=((path, line, "f"),), **more)


def test_hidden_tests_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS)
    names = ["test_shop.py::test_total[1]", "test_shop.py::TestBasket::test_add", "test_shop.py::TestAlone::test_one"]
    hidden = hide(tmp_path, names)
    left = hidden.kept["test_shop.py"]
    assert "test_total" not in left and "test_add" not in left and "TestAlone" not in left
    assert "test_refuse" in left and "# the package" in left
    compile(left, "left", "exec")
    (tmp_path / "test_shop.py").write_text(left)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    commit = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "1"]
    subprocess.run(commit, cwd=tmp_path, check=True)
    script = eval_script(hidden, ["test_shop.py"]).partition(": '")[0]
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True, env={"HOME": str(tmp_path)})
    assert (tmp_path / "test_shop.py").read_text() == TESTS


def test_a_file_whose_tests_cannot_be_found_is_hidden_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text("globals()['test_made'] = lambda: None\n")
    hidden = hide(tmp_path, ["test_made.py::test_made"])
    assert hidden == HiddenTests({}, {"test_made.py": "globals()['test_made'] = lambda: None\n"})
    assert "new file mode" in eval_script(hidden, ["test_made.py"])
    (tmp_path / "test_dos.py").write_bytes(b"def test():\r\n    pass\r\n")
    with pytest.raises(CannotHideError, match="line ends"):
        hide(tmp_path, ["test_dos.py::test"])
    assert without("def f(: x", [("f",)]) is None


def test_names_with_blanks_are_those_that_the_log_has() -> None:
    tests = ["t.py::a", "t.py::b[x y z]", "t.py::c[x y]", "t.py::c[x_y]", "t.py::d[x] y"]
    names = logged(tests)
    assert names == {"t.py::a": "t.py::a", "t.py::b[x y z]": "t.py::b[x_y_z]"}
    log = "PASSED t.py::b[x y z]\nFAILED t.py::b[x y z] - assert [1, 2] == [a b]\nother [a b] line\n"
    join = eval_script(HiddenTests({}, {}), ["t.py"]).partition("sed -uE '")[2].partition("'")[0]
    done = subprocess.run(["sed", "-uE", join], input=log, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [
        "PASSED t.py::b[x_y_z]",
        "FAILED t.py::b[x_y_z] - assert [1, 2] == [a b]",
    ]


def test_a_snippet_is_the_call_that_failed_and_what_it_needs() -> None:
    found = snippets(TESTS, failure("test_shop.py::test_total[1]", 9, values={"amount": "1"}))
    assert found == [Snippet("from shop import total\namount = 1", "total(amount)")]
    found = snippets(TESTS, failure("test_shop.py::TestBasket::test_add", 19))
    assert found == [Snippet("from shop import Basket\nbasket = Basket()\nbasket.add(2)", "basket.sum()")]
    found = snippets(TESTS, failure("test_shop.py::TestBasket::test_refuse", 22))
    assert found == [Snippet("from shop import Basket", "Basket().add(-1)")]
    assert not snippets(TESTS, failure("test_shop.py::TestAlone::test_one", 28))  # a fixture is out of reach
    assert not snippets("def f(: x", failure("test_shop.py::f", 1))


CASES = """\
import unittest
import pytest
from shop import Basket

@pytest.fixture
def full():
    basket = Basket()
    basket.add(2)
    return basket

class TestCase(unittest.TestCase):
    amount = 3

    def setUp(self):
        self.basket = Basket()
        self.basket.add(self.amount)

    def double(self, number):
        return 2 * number

    def test_sum(self):
        def less(n): return n - 1
        self.assertEqual(self.basket.sum(), self.double(less(2)))
        with self.assertRaises(ValueError):
            self.basket.add(-1)
        self.assertTrue(self.basket.items)

def test_full(full):
    assert full.sum() == 2
"""


def test_a_snippet_has_what_a_class_and_fixtures_do_before_a_test_and_later_checks_follow() -> None:
    """A test case's own attributes become plain names."""
    made = "from shop import Basket\namount = 3\nbasket = Basket()\nbasket.add(amount)"
    found = snippets(CASES, failure("t.py::TestCase::test_sum", 23))
    assert [one.expression for one in found] == ["basket.sum()", "basket.add(-1)", "basket.items"]
    assert {one.before for one in found} == {made}
    asked = CASES.replace("self.basket.sum(), self.double(less(2))", "self.double(less(2)), 2")
    found = snippets(asked, failure("t.py::TestCase::test_sum", 23))
    helpers = "def double(number):\n    return 2 * number\ndef less(n):\n    return n - 1"
    assert found[0] == Snippet(helpers, "double(less(2))")
    own = asked.replace("def less(n): return n - 1", "class less(int):\n            def f(self): return self.real")
    assert "self.real" in snippets(own.replace("(2)", "(2).f()"), failure("t.py::TestCase::test_sum", 24))[0].text
    (found,) = snippets(CASES, failure("t.py::test_full", 29))
    before = "from shop import Basket\nbasket = Basket()\nbasket.add(2)\nfull = basket"
    assert found == Snippet(before, "full.sum()")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 + 1", "returns 2"),
        ("__import__('pickle').dumps(kind) and kind.__module__", "returns '__main__'"),
        ("int('x')", "raises ValueError: "),
        ("'a\\nb'", "returns 'a\\nb'"),
    ],
)
def test_the_program_of_a_snippet_says_what_its_expression_gives(expression: str, said: str) -> None:
    before = "text = '''a\nb'''\nprint('noise', end='')\nclass kind: ..."
    program = Snippet(before, expression).program()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2].startswith(said)


GOLD = "--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-    return amount * (RATE + 1)\n+    return amount * RATE_OF_ALL\n"
NAMES = ["tests/test_shop.py::TestBasket::test_total[1]"]


def shown(
    call: str, observed: str = "returns 4", expected: str = "returns 3", bug: int = 0, test: str = ""
) -> ShownFailure:
    return ShownFailure(Snippet("from shop import total", call), observed, expected, bug, test)


def test_statements_of_three_levels_tell_more_and_more() -> None:
    some = [shown(f"total({n})", f"returns {4 * n}", f"returns {3 * n}") for n in (1, 2)]
    texts = statements(some, 1, [failure(NAMES[0], 9)] * 2, ["shop.py"], NAMES, GOLD)
    assert set(texts) == set(LEVELS)
    assert all(text.startswith("`total()` gives a wrong result.\n\n```python\n") for text in texts.values())
    assert "Expected: returns `3`" in texts[1] and "returns `4`" not in texts[1] and "total(2)" not in texts[1]
    assert "Observed: returns `4`" in texts[2] and "total(2)" not in texts[2]
    assert texts[3].startswith(texts[2]) and "total(2)" in texts[3] and "2 checks" in texts[3]
    raised = Failure(NAMES[0], "call", "KeyError", "'x'", frames=(("shop.py", 3, "total"),))
    assert "ends in `total` (`shop.py`)" in statements(some, 1, [raised], ["shop.py"], NAMES, GOLD)[3]
    for call in ("f(1)", "abs(1) > 1", "abs(1)()"):
        local = ShownFailure(Snippet("from m import abs\nf = abs", call), "returns 2", "returns 1")
        assert statements([local], 1, [], [], NAMES, "")[1].startswith("This program gives")
    assert statements([local, shown("list(total(1))")], 1, [], [], NAMES, "")[3].count("```python") == 2
    for wanted, said in (("A", "raises `A` with a wrong message."), ("B", "raises `A` where it should raise `B`.")):
        told = statements([shown("total(1)", "raises A: 1", f"raises {wanted}: 2")], 1, [], [], NAMES, "")
        assert told[1].startswith(f"`total()` {said}")
    nothing = shown("total(9)", expected="returns None")
    assert "total(1)" in statements([nothing, shown("total(1)")], 1, [], [], NAMES, "")[1]


def test_a_long_patch_needs_several_programs() -> None:
    gold = GOLD + "+    pass\n" * 12
    names = [f"tests/test_shop.py::test_{n}" for n in range(5)]
    some = [shown(f"total({n})", test=names[max(0, n - 2)]) for n in range(5)]  # of the first test, three
    assert not statements(some[:4], 1, [], [], names, gold)
    assert statements(some[:1], 1, [], [], names[:1], gold)
    text = statements(some, 1, [], [], names, gold)[1]
    assert [f"\ntotal({n})\n" in text for n in range(5)] == [True, False, False, True, True]
    assert not statements(some, 1, [], [], names, gold + "+    pass\n" * 18)


def test_what_would_tell_the_answer_is_in_no_statement() -> None:
    telling = ShownFailure(
        Snippet("", "f(lambda amount: amount * RATE_OF_ALL)"), "returns 'return amount * RATE_OF_ALL'", "x"
    )
    assert not statements([telling], 1, [], ["shop.py"], NAMES, GOLD)
    (first, *_) = statements([telling, shown("total(1)")], 1, [], ["shop.py"], NAMES, GOLD).values()
    assert "RATE_OF_ALL" not in first and "total(1)" in first
    assert leaks("see test_shop", NAMES, GOLD) == ["test_shop"]
    assert leaks("it should `return amount  * RATE_OF_ALL`", NAMES, GOLD) == ["return amount * RATE_OF_ALL"]
    assert not leaks("return amount * (RATE + 1) is what the code says", NAMES, GOLD)


class Bench:
    """This stands in for boxes: a tree's answers to a program are those of a table. Trees are named by one file."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers, self.runs = answers, 0

    async def scripts(self, changed: dict[str, str], programs: list[str], *, timeout_s: float) -> list[str]:
        self.runs += 1
        found = self.answers[changed.get("tree", "right")]
        said = [found[int(one.partition("eval('ask(")[2].partition(")")[0])] for one in programs]
        return [
            "" if text == "hangs" else f"\nreturns {f'{self.runs}.5' if text == 'any' else text}\n" for text in said
        ]


ANSWER = st.sampled_from(["1", "1", "2", "3", "any", "hangs", "<x at 0x1f>"])


@given(st.data(), st.integers(1, 3), st.integers(0, 6))
def test_a_combination_has_a_program_for_each_bug_or_no_statement(data: Any, bugs: int, programs: int) -> None:
    """A bug's program is right only where this bug is mended; it answers the same each time."""
    trees = ["broken", "right", *(f"without {bug}" for bug in range(bugs))]
    answers = {tree: data.draw(st.lists(ANSWER, min_size=programs, max_size=programs)) for tree in trees}
    if bugs == 1:
        answers["without 0"] = answers["right"]
    tests = "\n".join(f"def test_{n}():\n    assert ask({n})\n" for n in range(programs)).replace("\n\n", "\n")
    mended = [{"tree": f"without {bug}"} for bug in range(bugs)]
    source = f"ask = print\n{tests}"
    failures = [failure(f"t.py::test_{n}", 2 * n + 3) for n in range(programs)]
    found = asyncio.run(show(Bench(answers), {"tree": "broken"}, mended, failures, {"t.py": source}))  # ty: ignore
    right = {
        (n, bug)
        for n in range(programs)
        for bug in range(bugs)
        if {answers["broken"][n], answers["right"][n]} <= {"1", "2", "3"}
        and answers["broken"][n] != answers["right"][n]
        and [other for other in range(bugs) if answers[f"without {other}"][n] == answers["right"][n]] == [bug]
    }
    told = {(int(one.snippet.expression[4:-1]), one.bug) for one in found}
    assert told <= right and {bug for _, bug in told} == {bug for _, bug in right}
    texts = statements(found, bugs, failures, [], [], "")
    assert set(texts) == (set(LEVELS) if {bug for _, bug in right} == set(range(bugs)) else set())
    for text in texts.values():
        assert {bug for n, bug in told if f"\nask({n})\n" in text} == set(range(bugs))


TELLING = ["returns 3", "raises ValueError: no", f"returns {GOLD!r}", "returns 'TestBasket'"]
MESSAGES = ["assert 4 == 3", "in tests/test_shop.py:9", f"assert 'x' in {GOLD!r}", "see TestBasket", ""]
CALLS = ["total(3)", "Basket().add(RATE_OF_ALL)", "f('return amount * RATE_OF_ALL')", "test_total(1)"]


@given(
    statement=st.sampled_from(CALLS),
    outcomes=st.tuples(st.sampled_from(TELLING), st.sampled_from(TELLING)),
    message=st.sampled_from(MESSAGES),
    kind=st.sampled_from(["AssertionError", "KeyError", "Failed"]),
    where=st.sampled_from([("shop.py", 3, "total"), ("shop.py", 3, "test_total"), ("tests/test_shop.py", 1, "x")]),
)
def test_no_statement_tells_a_hidden_test_or_the_patch(statement, outcomes, message, kind, where) -> None:
    failures = [Failure(NAMES[0], "call", kind, message, frames=(where,))] * 2
    for text in statements([shown(statement, *outcomes)], 1, failures, ["shop.py"], NAMES, GOLD).values():
        assert "```python" in text
        assert "RATE_OF_ALL" not in text or "amount * RATE_OF_ALL" not in text
        assert not any(name in text for name in ("test_total", "TestBasket", "test_shop"))
        assert not leaks(text, NAMES, GOLD)
