"""Edits are kept as changed lines, combined where they do not touch, and written as patches that git applies."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.make import edits
from rl.data.make.edits import LineChange

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "x = 1", "\tif"]), max_size=12)
TEXTS = st.tuples(LINES, st.booleans()).map(lambda one: "\n".join(one[0]) + ("\n" if one[1] and one[0] else ""))


@given(TEXTS, TEXTS)
def test_an_edit_makes_the_new_text_of_the_old_one(old: str, new: str) -> None:
    edit = edits.from_json(json.loads(json.dumps(edits.to_json(edits.between("f", old, new)))))
    assert edits.applied(edit, {"f": old}) == ({"f": new} if old != new else {})


@settings(max_examples=25, deadline=None)
@given(old=TEXTS, new=TEXTS.filter(bool))
def test_git_applies_a_patch(old: str, new: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("patch")
    (directory / "f").write_text(old)
    patch = edits.patch({"f": old}, {"f": new, "made/g": new})
    subprocess.run(["git", "apply", "-"], cwd=directory, input=patch.encode(), check=True)
    assert (directory / "f").read_bytes().decode() == new
    assert Path(directory, "made/g").read_bytes().decode() == new


def test_edits_that_touch_are_not_combined() -> None:
    one, far, near = (LineChange("f", at, at + 1, ("x\n",)) for at in (1, 5, 2))
    other = LineChange("g", 1, 2, ())
    assert edits.combined([(far, other), (one,)]) == (one, far, other)
    assert edits.combined([(one,), (near,)]) is None
    assert edits.combined([(one,), (one,)]) is None
