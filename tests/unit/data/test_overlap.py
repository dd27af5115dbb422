"""Training tasks that are nearly held-out ones, or come from SWE-bench Verified's repositories, are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.checks.alike import Overlap, in_verified, overlaps
from rl.data import overlap
from rl.data.convert import write_tasks

PATCH = (
    "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1,4 +1,4 @@\n def {name}(first, second):\n"
    "-    return second.join(part.strip() for part in first if part)\n"
    "+    return second.join(part.{verb}() for part in first if part is not None)\n     # {name}\n"
)


def row(name: str, repo: str, patch: str, statement: str) -> dict:
    return {
        "instance_id": name, "repo": repo, "patch": patch, "problem_statement": statement, "image": "x", "version": "1",
        "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "base_commit": "", "FAIL_TO_PASS": ["t"],
        "PASS_TO_PASS": [], "eval_script": ">>>>> Start Test Output\n>>>>> End Test Output\n",
    }  # fmt: skip


def task(name: str, repo: str, verb: str, what: str) -> dict:
    statement = f"`{what}()` gives a wrong result for {what} and all that depends on {what}, which is {verb}."
    return row(name, repo, PATCH.format(name=what, verb=verb), statement)


HELDOUT = [task("h-1", "a/one", "strip", "join_words"), task("h-2", "a/two", "lower", "read_lines")]


def test_each_kind_is_found() -> None:
    training = [
        task("t-same", "b/other", "strip", "join_words"),
        row("t-words", "b/other", "", HELDOUT[1]["problem_statement"].upper()),
        row("t-repo", "A/Two", "", "An empty basket is shown as if it still had two items, since yesterday."),
        row("t-clean", "b/clean", "", "Nothing of this has been seen by anybody before today, or so they say."),
        row("t-verified", "django/django", "", "Another text that is about forms and their fields in templates."),
        row("t-package", "pypi/requests", "", "A text about sessions, adapters and their many timeouts."),
    ]
    found = overlaps(training, HELDOUT)
    assert [(one.instance_id, one.kind, one.other) for one in found] == [
        ("t-same", "diff", "h-1"),
        ("t-same", "statement", "h-1"),
        ("t-words", "statement", "h-2"),
        ("t-repo", "repo", "h-2"),
        ("t-verified", "verified", "django/django"),
        ("t-package", "verified", "pypi/requests"),
    ]
    assert found[0] == Overlap("t-same", "diff", "h-1", 1.0)


@pytest.mark.parametrize(
    ("repo", "instance_id", "known"),
    [
        ("Django/django", "t", True),
        ("someone/django", "t", True),
        ("pypi/scikit_learn", "t", True),
        ("SWE-Gym/django__django", "t", True),
        ("swesmith/django__django.1a2b3c4d", "t", True),
        ("mirror/x", "scikit-learn__scikit-learn-10297", True),
        ("mirror/x", "swesmith.psf__requests.1a2b3c4d.lm_rewrite__x", True),
        ("pypi/requests-cache", "t", False),
        ("a/django-filter", "a__django-filter-12", False),
        ("mirror/x", "other__django__django_extra-1", False),
    ],
)
def test_repositories_of_verified_are_known_by_all_their_names(repo: str, instance_id: str, known: bool) -> None:
    assert in_verified(repo, instance_id) is known


def test_a_bug_and_its_fix_are_the_same_and_short_changes_are_compared_with_their_place() -> None:
    head, body = HELDOUT[0]["patch"].split("@@\n")
    back = f"{head}@@\n" + body.replace("\n-", "\n#").replace("\n+", "\n-").replace("\n#", "\n+")
    assert [one.kind for one in overlaps([row("t", "b/b", back, "other words altogether here")], HELDOUT)] == ["diff"]
    small = "--- a/m\n+++ b/m\n@@ -1,3 +1,3 @@\n def {0}(value, of_{0}):\n-    i += 1\n+    i -= 1\n     return {0}\n"
    held = [row("h", "a/a", small.format("count_all"), "one two three")]
    assert not overlaps([row("t", "b/b", small.format("find_first"), "four five six")], held)
    assert overlaps([row("t", "b/b", small.format("count_all"), "four five six")], held)


@pytest.mark.parametrize(("allow", "status"), [([], 1), (["diff", "statement"], 0), (["verified"], 1)])
def test_the_command_refuses_what_is_not_allowed(
    allow: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "train.parquet", [task("t", "b/b", "strip", "join_words")])
    write_tasks(tmp_path / "held.parquet", HELDOUT)
    more = ["--allow", *allow] if allow else []
    assert overlap.main([str(tmp_path / "train.parquet"), "--heldout", str(tmp_path / "held.parquet"), *more]) == status
    assert "1 training tasks, 2 held out: 1 diff, 1 statement" in capsys.readouterr().out
    assert overlap.main([str(tmp_path / "none.parquet")]) == 2
