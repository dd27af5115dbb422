"""Hidden tests leave an agent's tree and come back in grading; statements tell what was seen and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.make.runs import Failure
from rl.make.snippet import Snippet, snippet
from rl.make.statement import LEVELS, Shown, leaks, statements
from rl.make.tasks import CannotHideError, Hidden, eval_script, hide, logged, without

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
    assert hidden == Hidden({}, {"test_made.py": "globals()['test_made'] = lambda: None\n"})
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
    join = eval_script(Hidden({}, {}), ["t.py"]).partition("sed -uE '")[2].partition("'")[0]
    done = subprocess.run(["sed", "-uE", join], input=log, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [
        "PASSED t.py::b[x_y_z]",
        "FAILED t.py::b[x_y_z] - assert [1, 2] == [a b]",
    ]


def test_a_snippet_is_the_call_that_failed_and_what_it_needs() -> None:
    found = snippet(TESTS, failure("test_shop.py::test_total[1]", 9, values={"amount": "1"}))
    assert found == Snippet("from shop import total\namount = 1", "total(amount)")
    found = snippet(TESTS, failure("test_shop.py::TestBasket::test_add", 19))
    assert found == Snippet("from shop import Basket\nbasket = Basket()\nbasket.add(2)", "basket.sum()")
    found = snippet(TESTS, failure("test_shop.py::TestBasket::test_refuse", 22))
    assert found == Snippet("from shop import Basket", "Basket().add(-1)")
    assert snippet(TESTS, failure("test_shop.py::TestAlone::test_one", 28)) is None  # a fixture is out of reach
    assert snippet("def f(: x", failure("test_shop.py::f", 1)) is None


@pytest.mark.parametrize(
    ("expression", "said"),
    [("1 + 1", "returns 2"), ("int('x')", "raises ValueError: "), ("'a\\nb'", "returns 'a\\nb'")],
)
def test_the_program_of_a_snippet_says_what_its_expression_gives(expression: str, said: str) -> None:
    program = Snippet("text = '''a\nb'''\nprint('noise', end='')", expression).program()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2].startswith(said)


GOLD = "--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-    return amount * (RATE + 1)\n+    return amount * RATE_OF_ALL\n"
NAMES = ["tests/test_shop.py::TestBasket::test_total[1]"]


def test_statements_of_three_levels_tell_more_and_more() -> None:
    shown = [
        Shown(Snippet("from shop import total", f"total({n})"), f"returns {4 * n}", f"returns {3 * n}") for n in (1, 2)
    ]
    texts = statements(shown, [failure(NAMES[0], 9)] * 2, ["shop.py"], NAMES, GOLD)
    assert set(texts) == set(LEVELS)
    assert texts[1] == "`total()` gives a wrong result."
    assert "total(1)" in texts[2] and "total(2)" not in texts[2]
    assert "returns `4`" in texts[2] and "returns `3`" in texts[2]
    assert texts[3].startswith(texts[2]) and "total(2)" in texts[3]


def test_what_would_tell_the_answer_is_left_out() -> None:
    telling = Shown(Snippet("", "f(lambda amount: amount * RATE_OF_ALL)"), "returns 'return amount * RATE_OF_ALL'", "x")
    said = Failure(NAMES[0], "call", "AssertionError", "assert 4 == 3 in test_total")
    for text in statements([telling], [said], ["shop.py"], NAMES, GOLD).values():
        assert text
        assert not leaks(text, NAMES, GOLD)
        assert "RATE_OF_ALL" not in text and "test_total" not in text
    assert leaks("see test_shop", NAMES, GOLD) == ["test_shop"]
    assert leaks("it should `return amount  * RATE_OF_ALL`", NAMES, GOLD) == ["return amount * RATE_OF_ALL"]
    assert not leaks("return amount * (RATE + 1) is what the code says", NAMES, GOLD)


def test_without_a_program_the_assertion_speaks() -> None:
    said = Failure(NAMES[0], "call", "AssertionError", "assert 4 == 3\n +  where 4 = total(1)")
    texts = statements([], [said], ["shop.py"], NAMES, GOLD)
    assert texts[1] == "This package gives a wrong result."
    assert "where 4 = total(1)" in texts[2]
    raised = Failure(NAMES[0], "call", "KeyError", "'x'", frames=(("shop.py", 3, "total"),))
    texts = statements([], [raised], ["shop.py"], NAMES, GOLD)
    assert "KeyError" in texts[1]
    assert "ends in `total` (`shop.py`)" in texts[3] and "shop.py" not in texts[2]


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
    shown = [Shown(Snippet("from shop import total", statement), *outcomes)]
    failures = [Failure(NAMES[0], "call", kind, message, frames=(where,))] * 2
    for some in (shown, []):
        for text in statements(some, failures, ["shop.py"], NAMES, GOLD).values():
            assert text.strip()
            assert "RATE_OF_ALL" not in text or "amount * RATE_OF_ALL" not in text
            assert not any(name in text for name in ("test_total", "TestBasket", "test_shop"))
            assert not leaks(text, NAMES, GOLD)
