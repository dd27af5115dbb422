"""Bugs of people and of other models become tasks: commits of a repository undone, functions that a model wrote."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.data.make import __main__ as make
from rl.data.make.repositories import git
from rl.traces.ingest.states import Message
from tests.endpoint_kit import KEY, StandIn, standing_in
from tests.integration.make_kit import write_sdist

pytestmark = [pytest.mark.bwrap, pytest.mark.timeout(900)]

SHOP = '''\
def total(amounts, tax=0):
    """Return the sum of amounts."""
    found = 0
    for amount in amounts:
        found += amount
    return found + tax


def cheapest(amounts, most=3):
    # The first ones.
    return sorted(amounts)[:most]
'''
TESTS = """\
from shop import cheapest, total


def test_total():
    assert total([1, 2]) == 3


def test_tax():
    assert total([1, 2], tax=1) == 4


def test_cheapest():
    assert cheapest([3, 2, 1, 0]) == [0, 1, 2]
"""
ABOUT = '[project]\nname = "shop"\nversion = "2"\ndependencies = []\noptional-dependencies = {test = ["pluggy"]}\n'


@pytest.fixture(autouse=True)
def _wheels(offline_pip: None) -> None:
    """pip needs no package index."""


def rows(out: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(out).to_pylist()


def test_commits_that_fixed_something_are_undone_and_their_tests_are_hidden(tmp_path: Path) -> None:
    """Only a commit whose own tests fail without it is a task; its later neighbours stay as they are."""
    repository = tmp_path / "shop"
    (repository / "tests").mkdir(parents=True)
    git(repository, "init", "--quiet", "--template=", "--initial-branch=main")
    hook = repository / ".git/hooks/post-index-change"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    untaxed, unsorted = SHOP.replace(" + tax", ""), ("sorted(amounts)[", "list(amounts)[")
    tests = [part + "\n\n" for part in TESTS.removesuffix("\n").split("\n\n\n")]
    history = [
        ("first", untaxed.replace(*unsorted), tests[:2]),
        ("total() forgot the tax", SHOP.replace(*unsorted), tests[:3]),
        ("without a test", SHOP, tests[:3]),
        ("a test alone", SHOP, tests),
        (
            "a comment, with a test",
            SHOP.replace("# The", "# All the"),
            [*tests, "def test_more(): assert total([]) == 0\n"],
        ),
    ]
    for message, source, some in history:
        (repository / "shop.py").write_text(source)
        (repository / "tests/test_shop.py").write_text("".join(some))
        (repository / "pyproject.toml").write_text(ABOUT)
        git(repository, "add", "--all")
        git(repository, "commit", "--quiet", f"--message={message}")
    before = git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")
    out = tmp_path / "made.parquet"
    command = [str(repository), "--out", str(out), "--limit", "3", "--jobs", "2", "--makers"]
    assert make.main([*command, "undo_fix"]) == 0
    (row,) = rows(out)
    (task,) = load_tasks(out)
    assert row["maker"] == "undo_fix" and row["difficulty"] == "commit" and row["version"] == "2"
    assert [*task.FAIL_TO_PASS] == ["tests/test_shop.py::test_tax"]
    assert "-    return found\n+    return found + tax\n" in row["patch"]
    assert "total([1, 2], tax=1)" in task.problem_statement and "forgot" not in task.problem_statement
    assert "test_tax" not in (task.snapshot / "tests/test_shop.py").read_text()
    assert "# All the first ones." in (task.snapshot / "shop.py").read_text()
    log = subprocess.run(["git", "log", "--all", "--format=%s"], cwd=task.snapshot, capture_output=True, text=True)
    assert log.stdout == "Snapshot\n"
    assert (git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")) == before
    assert not (tmp_path / "hooked").exists()
    assert make.main([*command, "undo_fix", "change_constants", "change_operator"]) == 0
    assert {one["maker"] for one in rows(out)} > {"undo_fix"}
    card = (tmp_path / "made.card.md").read_text()
    share = round(100 / len(rows(out)))
    assert re.search(rf"\| `undo_fix` \| \d \| 1 \| \d+ % \| {share} % \|", card), card


async def test_a_model_writes_bugs_which_are_tried_as_all_others(tmp_path: Path) -> None:
    """It reads functions alone and costs what its cap allows; a bug that no test sees is no task."""
    files = {"PKG-INFO": "Name: shop\nVersion: 1\nLicense: MIT\n", "shop.py": SHOP, "test_shop.py": TESTS}
    path = write_sdist(tmp_path / "shop-1.tar.gz", files)

    def reply(text: str) -> list[Message]:
        assert "test_shop" not in text and "assert" not in text
        part = SHOP.partition("\n\n\n")[2 if "def cheapest" in text else 0]
        wrong = part.replace("[:most]", "[: most - 1]").replace("found = 0", "found = 0 * tax")
        return [{"type": "text", "text": f"Here it is.\n\n```python\n{wrong}\n```"}]

    bugs, out = tmp_path / "made.bugs.jsonl", tmp_path / "made.parquet"
    async with standing_in(StandIn(reply)) as stand_in:
        teacher = f"name=t,url={stand_in.url},model=words-7b,key_env=THE_KEY,price_in=3,price_out=15"
        command = [sys.executable, "-m", "rl.teachers.bugs", str(path), "--out", str(bugs), "--teacher", teacher]
        environment = {**make.os.environ, "THE_KEY": KEY}
        for more, status, heard in (([], 2, 0), (["--max-cost", "0.00001"], 1, 0), (["--max-cost", "5"], 0, 2)):
            run = asyncio.to_thread(subprocess.run, [*command, *more], env=environment, capture_output=True, text=True)
            done = await run
            assert (done.returncode, len(stand_in.heard)) == (status, heard), done.stdout + done.stderr
    lines = [json.loads(line) for line in bugs.read_text().splitlines()]
    assert len(lines) == 2 and {one["model"] for one in lines} == {"words-7b"}
    command = [str(path), "--out", str(out), "--limit", "3", "--jobs", "2", "--bugs", str(bugs), "--makers", "written"]
    assert await asyncio.to_thread(make.main, command) == 0
    (row,) = rows(out)
    assert row["maker"] == row["difficulty"] == "written" and "+    return sorted(amounts)[:most]\n" in row["patch"]
    assert "cheapest([3, 2, 1, 0])" in row["problem_statement"]
    card = json.loads((tmp_path / "made.card.json").read_text())
    assert card["steps"][0]["summary"]["makers"] == {"written": {"tried": 2, "kept": 1}}
    bugs.write_text("{}\n")
    assert await asyncio.to_thread(make.main, [*command[:2], str(tmp_path / "other.parquet"), *command[3:]]) == 2
