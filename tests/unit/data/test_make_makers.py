"""Every maker plants what its docstring says, at lines that tests run, and leaves all else as it was written."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.data.make import candidates, edits
from rl.data.make.candidates import MAKERS, parsed, singles
from rl.data.make.sites import File

# For each maker: a source, and all that may become of one line or block of it.
PLANTS = {
    "remove_bases": (
        "class A(B, C):\n    def f(self): return 1\n",
        {"class A(B,", "class A(B):", "class A( C):", "class A(C):"},
    ),
    "remove_function": ("class A:\n    x = 1\n    def f(self):\n        return 1\n", {"class A:\n    x = 1\n"}),
    "invert_if": ("def f(a):\n    if a:\n        b()\n    return 1\n", {"if not a:"}),
    "remove_assignment": ("def f(a):\n    a = 2\n    return a\n", {"def f(a):\n    return a\n"}),
    "remove_conditional": (
        "def f(a):\n    if a:\n        b()\n    return 1\n",
        {"def f(a):\n    b()\n", "def f(a):\n    return 1"},
    ),
    "remove_loop": ("def f(a):\n    for x in a:\n        b(x)\n    return 1\n", {"def f(a):\n    return 1"}),
    "remove_wrapper": ("def f(a):\n    try:\n        b()\n    except E:\n        c()\n", {"def f(a):\n    b()\n"}),
    "break_chains": ("def f(a, b, c):\n    return a + b + c\n", {"return a + b\n"}),
    "change_constants": ("def f():\n    return True\n", {"return False"}),
    "change_operator": ("def f(a, b):\n    return a+b\n", {"return a-b"}),
    "swap_operands": ("def f(a, b):\n    return a - b\n", {"return b - a"}),
    "shuffle_lines": ("def f(a):\n    a += 1\n    a *= 2\n    return a\n", {"    a *= 2\n    a += 1\n"}),
    "boundary": ("def f(a, b):\n    return a <b\n", {"return a <=b"}),
    "off_by_one": ("def f(a):\n    return a[1:]\n", {"a[0:]", "a[2:]"}),
    "swap_arguments": ("def f(a):\n    return g(a, 1)\n", {"g(1, a)"}),
    "lose_argument": ("def f(a):\n    return g(a, key=1)\n", {"g(a, )", "g(a)"}),
    "lose_exception": (
        "def f(a):\n    if a:\n        raise E('no')\n    return 1\n",
        {"        pass\n", "        return\n"},
    ),
    "stale_cache": (
        "class A:\n    def f(self):\n        return self.x + 1\n",
        {'if "_f" not in self.__dict__:\n            self._f = self.x + 1\n        return self._f\n'},
    ),
    "wrong_default": ("def f(a, b=True):\n    return b\n", {"b=False"}),
    "broken_invariant": ("def f(a):\n    return a, 1\n", {"return 1, a"}),
    "lose_condition": ("def f(a, b):\n    return a and b\n", {"return a\n", "return b\n"}),
    "wrong_variable": ("def f(a, b):\n    return g(a)\n", {"g(b)"}),
    "lose_negation": ("def f(a):\n    if not a:\n        return 1\n", {"if a:"}),
    "drop_function": (
        'def f(a):\n    """Do."""\n    return a\n',
        {'    """Do."""\n    raise NotImplementedError\n'},
    ),
}

MESSY = textwrap.dedent('''
    import os,sys
    LIMIT = {  "first" : 1 ,"second":2}   # odd on purpose


    class Shape( Base , Other ):
        """A shape."""
        sides=4
        def area (self, w , h=2, *, flat = False ):   # blanks as people write them
            """Return it."""
            if  w<h and not flat :
                total = w*h   # first
                total += LIMIT["first"]
            elif h>=3:
                raise ValueError( "no" )
            else:
                total = (w
                         + h - 1)
            for i in range(1,w) :
                total = total+ i
            try:
                return self.scale(total, h, by = 2), w[1:-1]
            except (KeyError , TypeError) as error :
                log( error )
                return  None


        def scale( self , x, y, by=1 ) :
            with open( x )  as f :
                return ( x+y*by-1 )

    def helper(a,b = "first"):
        while not a.done( ) : a = a.next
        return a if a and b else LIMIT [ b ]
''')


def every_line(source: str) -> dict[int, int]:
    return dict.fromkeys(range(1, source.count("\n") + 2), 1)


def planted(name: str, source: str, seed: int = 0, shared: frozenset[str] = frozenset()) -> set[str]:
    file = File(source, every_line(source), shared)
    made = [file.planted(MAKERS[name], site, f"{seed}") for site in file.sites(MAKERS[name])]
    return {one for one in made if one is not None}


def test_every_maker_has_an_example_here() -> None:
    assert set(PLANTS) == set(MAKERS)


@pytest.mark.parametrize("name", PLANTS)
def test_a_maker_plants_its_bug(name: str) -> None:
    source, wanted = PLANTS[name]
    made = {one for seed in range(6) for one in planted(name, source, seed)}
    assert made
    for one in made:
        ast.parse(one)
        assert one != source
    assert any(text in one for one in made for text in wanted), made


def test_a_key_that_two_modules_share_is_broken_in_one() -> None:
    made = planted("broken_invariant", "def f(a):\n    return a['name_of']\n", shared=frozenset({"name_of"}))
    assert made == {"def f(a):\n    return a['nameof']\n"}
    assert not planted("broken_invariant", "def f(a):\n    return a['name_of']\n")
    files = parsed({"a.py": "x = {'key': 1}\n", "b.py": "def f(a):\n    return a['key']\n"}, {"b.py": {2: 1}})
    assert ["'keys'" in one.edit[0].lines[0] for one in singles(files, "", ["broken_invariant"])] == [True]


@given(st.sampled_from(sorted(MAKERS)), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_only_the_lines_of_a_site_change(name: str, seed: int, draw) -> None:
    file = File(MESSY, every_line(MESSY), frozenset({"first"}))
    sites = file.sites(MAKERS[name])
    if not sites:
        return
    site = draw.choice(sites)
    new = file.planted(MAKERS[name], site, str(seed))
    if new is None:
        return
    assert new != MESSY
    ast.parse(new)
    before, after = edits.lines_of(MESSY), edits.lines_of(new)
    first, rest = site.start - 1, len(before) - site.end
    # A node owns the comments and blank lines above it, which go with it.
    assert before[: first - 2] == after[: first - 2]
    assert before[site.end :] == after[len(after) - rest :]
    assert new == file.planted(MAKERS[name], site, str(seed))


def test_only_lines_that_tests_run_are_edited() -> None:
    source = "def f(a):\n    return a + 1\n\ndef g(a):\n    return a + 2\n"
    found = list(singles(parsed({"m.py": source}, {"m.py": {5: 0b10}}), "0"))
    assert found
    assert {change.start for one in found for change in one.edit} <= {3, 4, 5}
    assert {one.tests for one in found} == {0b10}
    assert not list(singles(parsed({"m.py": source}, {"m.py": {}}), "0"))


def test_the_order_of_candidates_depends_on_the_seed_only_and_makers_take_turns() -> None:
    files = parsed({"m.py": MESSY}, {"m.py": every_line(MESSY)})
    first, again, other = ([one.edit for one in singles(files, seed)] for seed in ("0", "0", "1"))
    assert first == again
    assert first != other
    assert len(set(first)) == len(first)
    turn = [one.maker for one in singles(files, "0")][:12]
    assert len(set(turn)) == len(turn)


def test_a_feature_is_a_function_with_helpers_that_only_its_tests_need() -> None:
    source = "def f(a):\n    return g(a)\n\ndef g(a):\n    return a + 1\n\ndef h(a):\n    return a\n"
    files = parsed({"m.py": source}, {"m.py": {2: 0b011, 5: 0b001, 8: 0b100}})
    (found,) = singles(files, "0", [candidates.FEATURE])
    text = edits.applied(found.edit, {"m.py": source})["m.py"]
    assert text.count("raise NotImplementedError") == 2
    assert "def h(a):\n    return a\n" in text
    assert found.tests == 0b011


def test_combinations_break_few_tests_as_far_as_is_known() -> None:
    broken = {"a.py": range(10), "b.py": range(10), "c.py": range(10, 20), "d.py": range(15, 30)}
    kept = [
        (candidates.Candidate("boundary", (edits.LineChange(path, 0, 1, ("x\n",)),), 1), [str(n) for n in tests])
        for path, tests in broken.items()
    ]
    for most, many in ((20, False), (40, True)):
        found = [{change.path for change in one.edit} for one in candidates.combinations(kept, "0", most)]
        together = [len({test for path in paths for test in broken[path]}) for paths in found]
        assert {len(paths) for paths in found} == {2, 3} and max(together) <= most
        assert (max(together) > 20) == many
        for size in (2, 3):  # together they may break more, so those come first that break least
            first = [number for number, paths in zip(together, found, strict=True) if len(paths) == size]
            assert first == sorted(first)


def test_edits_are_not_combined_with_one_that_hides_them() -> None:
    """An edit that breaks all that the others break fails in its own way: there is that task already."""
    broken = {"a.py": "12", "b.py": "1", "c.py": "3", "d.py": "12"}
    kept = [
        (candidates.Candidate("boundary", (edits.LineChange(path, 0, 1, ("x\n",)),), 1), list(tests))
        for path, tests in broken.items()
    ]
    found = {frozenset(change.path for change in one.edit) for one in candidates.combinations(kept, "0", 20)}
    assert found and not found & {frozenset(alike) for alike in (("a.py", "b.py"), ("a.py", "d.py"), ("b.py", "d.py"))}
