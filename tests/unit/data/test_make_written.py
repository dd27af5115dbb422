"""A model's reply is taken if it is the same function with other code; a commit is undone as it was."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.data.make import edits, sources
from rl.data.make.history import _undone
from rl.data.make.written import Question, edit_of

FUNCTION = '''\
    @cached
    def total(self, tax=0):  # of all
        """Return the sum."""
        found = sum(self.items)
        return found + tax
'''
SOURCE = f"class Basket:\n    items = ()\n\n{FUNCTION}\n\nLIMIT = 3\n"
QUESTION = Question("shop.py", 4, 8, FUNCTION)


def block(text: str) -> str:
    return f"Sure.\n```python\n{text}```\n"


def test_a_function_with_other_code_is_an_edit_in_its_place() -> None:
    """Its indentation is its place's, whatever the reply's is."""
    new = FUNCTION.replace("found + tax", "found - tax")
    for text in (new, textwrap.dedent(new), textwrap.indent(new, "  ")):
        edit = edit_of(QUESTION, SOURCE, block(text))
        assert not isinstance(edit, str)
        assert edits.applied(edit, {"shop.py": SOURCE}) == {"shop.py": SOURCE.replace("found + tax", "found - tax")}


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (FUNCTION, "not one code block"),
        (block(FUNCTION) * 2, "not one code block"),
        (block(FUNCTION), "no change"),
        (block(FUNCTION.replace("  # of all", "")), "no change"),
        (block(FUNCTION.replace("found + tax", "found  # a bug")), "new comments"),
        (block(FUNCTION.replace("+ tax", "+")), "not Python"),
        (block(FUNCTION + "\nimport os\n"), "not Python"),
        (block("os.system('')\n"), "not Python"),
        (block(FUNCTION.replace("tax=0", "tax=1")), "another head"),
        (block(FUNCTION.replace("total", "sums")), "another head"),
        (block(FUNCTION.replace("@cached", "@once")), "another head"),
        (block(FUNCTION.replace("the sum", "the wrong sum")), "another docstring"),
    ],
)
def test_other_replies_are_not_taken(reply: str, why: str) -> None:
    assert edit_of(QUESTION, SOURCE, reply) == why


@given(st.text(alphabet="`\n dreftunpyox():=1#'\"\\", max_size=80))
def test_whatever_a_model_replies_is_an_edit_of_python_or_a_reason(text: str) -> None:
    for reply in (text, block(text), block(FUNCTION + text)):
        edit = edit_of(QUESTION, SOURCE, reply)
        if not isinstance(edit, str):
            compile(edits.applied(edit, {"shop.py": SOURCE})["shop.py"], "shop.py", "exec")


LINES = st.lists(st.sampled_from([f"v{n} = {n}\n" for n in range(4)]), max_size=8).map("".join)


@given(LINES, LINES, st.booleans())
def test_a_commit_is_undone_as_a_whole_or_not_at_all(old: str, new: str, later: bool) -> None:
    """If a later commit has changed a part of it, such as a version, nothing is undone."""
    between = "".join(f"w{n} = 0\n" for n in range(9))
    versions = ["version = 1\n", "version = 2\n", "version = 3\n" if later else "version = 2\n"]
    before, after, head = (version + between + text for version, text in zip(versions, (old, new, new), strict=True))
    undone = _undone(edits.patch({"a/b.py": before}, {"a/b.py": after}).encode(), {"a/b.py": head})
    assert undone == (None if later else {"a/b.py": before})
    assert _undone(b"no patch", {"a/b.py": new}) is None


PYPROJECT = """\
[project]
name = "Shop"
version = "3"
dependencies = ["six", "old; python_version < '3'"]
optional-dependencies = {test = ["PyHamcrest>=2", "yes; python_version > '3'"], lint = ["ruff"]}
"""
SETUP = """\
[metadata]
name = Shop
[options]
install_requires =
    six
    old; python_version < '3'
[options.extras_require]
test =
    PyHamcrest>=2
    yes; python_version > '3'
"""


@pytest.mark.parametrize(("file", "text", "version"), [("pyproject.toml", PYPROJECT, "3"), ("setup.cfg", SETUP, "0")])
def test_a_repository_says_what_it_needs_without_a_build(file: str, text: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("x = 1\n")
    with pytest.raises(sources.MakeError, match="names the package"):
        sources.read(tmp_path, "0")
    (tmp_path / file).write_text(text)
    package = sources.read(tmp_path, "0")
    assert (package.name, package.version) == ("shop", version)
    assert package.requires == ("six", "PyHamcrest>=2", "yes")


def test_what_is_no_repository_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(sources.MakeError, match=r"git rev-parse fails: .*not a git repository"):
        sources.fetch(str(tmp_path), tmp_path / "sdists")
