"""Tasks are made of a real package with real boxes, and admitted: gold 100 %, empty 0 %."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.data import admit, images
from rl.data.make import __main__ as make
from rl.data.make.statement import leaks
from rollout.sandbox.docker.engine import PROJECT, get_engine
from tests.docker_kit import base_image
from tests.integration.make_kit import write_sdist

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.timeout(900),
]

SOURCE = '''\
"""A shop."""

LIMIT = 3


class Basket:
    """A basket of amounts."""

    def __init__(self, items=()):
        self.items = list(items)

    def add(self, amount):
        if amount < 0:
            raise ValueError("less than nothing")
        self.items.append(amount)
        return self

    def total(self, tax=0):
        found = 0
        for item in self.items:
            found += item
        return found + tax


def cheapest(baskets, most=LIMIT):
    ordered = sorted(baskets, key=Basket.total)
    return ordered[:most]


def label(basket, currency="EUR"):
    return f"{basket.total()} {currency}" if basket.items else "empty"
'''
TESTS = """\
import os
import sys

import pytest

from shop import Basket, cheapest, label


@pytest.fixture
def baskets():
    return [Basket([n]) for n in (5, 1, 4, 2)]


@pytest.mark.parametrize("amounts", [[1, 2], [3, 4, 5]])
def test_total(amounts):
    assert Basket(amounts).total(tax=1) == sum(amounts) + 1


class TestBasket:
    def test_add(self):
        basket = Basket()
        basket.add(2).add(0)
        assert basket.items == [2, 0]

    def test_refuse(self):
        with pytest.raises(ValueError):
            Basket().add(-1)


def test_cheapest(baskets):
    assert [one.total() for one in cheapest(baskets)] == [1, 2, 4]


def test_label():
    assert label(Basket([2])) == "2 EUR"
    assert label(Basket()) == "empty"


def test_flaky():
    assert "coverage" in sys.modules  # it is in one of the three runs
    assert label(Basket([2])) == "2 EUR"


@pytest.mark.skip(reason="not today")
def test_skipped():
    pass


def test_broken():
    raise OSError("broken")


def test_it_is_alone():
    assert "SECRET_OF_THE_CALLER" not in os.environ
    assert not os.path.exists(OUTSIDE)
"""


@pytest.fixture(autouse=True)
def _wheels(offline_pip: None) -> None:
    """pip needs no package index."""


def sdist(directory: Path) -> Path:
    """Write the source distribution of a small package, as a build would."""
    outside = directory / "outside"
    outside.write_text("not for tests\n")
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: shop\nVersion: 1.0\nLicense: MIT\n",
        "shop.py": SOURCE,
        "tests/test_shop.py": TESTS.replace("OUTSIDE", repr(str(outside))),
        "setup.py": "raise SystemExit('a build must not run here')\n",
    }
    return write_sdist(directory / "shop-1.0.tar.gz", files)


def admitted(out: Path, tries: int, sandbox: str = "local") -> dict:
    """Admit the tasks and return the report."""
    arguments = [str(out), "--out", str(out.with_name("admitted.parquet")), "--tries", str(tries), "--jobs", "2"]
    boxes = {"local": "sandbox.isolation=bwrap", "docker": "sandbox=docker"}
    assert admit.main([*arguments, boxes[sandbox]]) == 0
    return json.loads(out.with_name("admitted.admission.json").read_text())


def test_tasks_are_made_of_a_package_and_all_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "1")
    out = tmp_path / "out" / "tasks.parquet"
    arguments = [str(sdist(tmp_path)), "--out", str(out), "--limit", "6", "--jobs", "2"]
    assert make.main(arguments) == 0
    tasks = load_tasks(out)
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert len(tasks) == 6
    for task, row in zip(tasks, rows, strict=True):
        assert all(row[f"statement_{level}"] for level in (1, 2, 3))
        hidden = [f"{name}::x" for name in ("tests/test_shop.py",)] + list(task.FAIL_TO_PASS)
        assert not leaks(task.problem_statement, hidden, task.patch or "")
        kept = task.snapshot / "tests/test_shop.py"
        left = kept.read_text() if kept.exists() else ""
        for test in task.FAIL_TO_PASS:
            assert f"def {test.rpartition('::')[2].partition('[')[0]}(" not in left
        log = subprocess.run(["git", "log", "--all", "--format=%s"], cwd=task.snapshot, capture_output=True, text=True)
        assert log.stdout == "Snapshot\n"
        assert not [path for path in task.snapshot.rglob("shop*.py*") if path != task.snapshot / "shop.py"]
        assert "test_flaky" not in str(task.FAIL_TO_PASS + task.PASS_TO_PASS)
    assert any(row["maker"].startswith("combine") for row in rows)
    for row in rows:
        bugs = {"combine_two": 2, "combine_three": 3}.get(row["maker"], 1)
        assert all(row[f"statement_{level}"].count("```python") >= bugs for level in (1, 2, 3))
    card = json.loads((out.parent / "tasks.card.json").read_text())
    assert card["tasks"] == 6 and card["licences"] == {"MIT": 6} and card["boxes"] == {"snapshots": 6}
    (made,) = card["steps"]
    assert made["did"] == "made" and made["summary"]["tasks"] == 6
    assert made["packages"][0]["flaky"] == ["tests/test_shop.py::test_flaky"]
    unused = {"not the same outcome each time": 1, "skipped: Skipped: not today": 1, "OSError: broken": 1}
    assert made["packages"][0]["unused"] == unused
    assert "| shop | OSError: broken | 1 |" in (out.parent / "tasks.card.md").read_text()
    report = admitted(out, tries=1)
    assert report["counts"]["pass"] == 6

    # The same command does nothing anew, and gives the same bytes.
    before, journal = out.read_bytes(), (out.parent / "tasks.make.jsonl").read_bytes()
    assert make.main(arguments) == 0
    assert (out.read_bytes(), (out.parent / "tasks.make.jsonl").read_bytes()) == (before, journal)


@pytest.mark.docker
def test_made_tasks_are_put_into_images_and_admitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The images have no network, no Python of this machine and no copy of the package, and are graded right."""
    made, out, repository = tmp_path / "tasks.parquet", tmp_path / "imaged.parquet", f"{PROJECT}/test-made"
    assert make.main([str(sdist(tmp_path)), "--out", str(made), "--limit", "3", "--jobs", "2"]) == 0
    command = [str(made), "--out", str(out), "--limit", "2", "--repository", repository]
    assert images.main([*command, "--base", f"{PROJECT}/none:1"]) == 1
    assert "no image" in capsys.readouterr().err
    command += ["--base", base_image()]
    if sys.version_info[:2] != (3, 11):  # the base image's
        assert images.main(command) == 2
        assert "which these tasks need" in capsys.readouterr().err
        return
    client = get_engine().client
    try:
        assert images.main(command) == 0
        ids = {image["Id"] for image in client.images(repository)}
        assert len(ids) == 3  # two tasks, one environment
        assert images.main(command) == 0
        assert {image["Id"] for image in client.images(repository)} == ids
        tasks = load_tasks(out)
        assert [task.instance_id for task in tasks] == [task.instance_id for task in load_tasks(made)[:2]]
        report = admitted(out, 1, "docker")
        assert report["counts"]["pass"] == 2
        # An image with the package in it would show the right code.
        assert images.main([*command[:-1], tasks[0].image]) == 2
        assert "a copy of a package: /testbed/shop.py" in capsys.readouterr().err
    finally:
        for image in client.images(repository):
            for tag in image["RepoTags"]:
                client.remove_image(tag, force=True)


def test_what_cannot_be_made_is_told_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "tasks.parquet")]
    assert make.main(["requests==2.32.3", *out]) == 2
    assert "SWE-bench Verified has tasks of it" in capfd.readouterr().err
    assert make.main(["shop", *out]) == 2
    assert "write a package as NAME==VERSION" in capfd.readouterr().err
    path = sdist(tmp_path)
    write_sdist(path, {"PKG-INFO": "Name: shop\nVersion: 1\n", "shop.py": "x = 1\n", "test_a.py": "import none\n"})
    assert make.main([str(path), *out]) == 2
    said = capfd.readouterr().err
    assert "its tests need none; name the packages that have them with --requires" in said
    write_sdist(path, {"PKG-INFO": "Name: shop\nVersion: 1\n", "shop.py": "x = 1\n"})
    assert make.main([str(path), *out]) == 2
    assert "pytest finds no test" in capfd.readouterr().err
    files = {"shop.py": "def x():\n    return 1\n", "tests.py": "import shop\ndef test(): assert shop.x()\n"}
    write_sdist(path, {"PKG-INFO": "Name: shop\nVersion: 1\n", **files})
    assert make.main([str(path), *out, "--makers", "boundary"]) == 1  # its test is found, and there is nothing to break
    said = capfd.readouterr()
    assert "1 of 1 tests pass each time" in said.out and "no task was made" in said.err
    assert not (tmp_path / "tasks.parquet").exists() and "tasks.parquet" not in said.out + said.err


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "tasks.parquet"
    command = [sys.executable, "-m", "rl.data.make", str(sdist(tmp_path))]
    command += ["--out", str(out), "--limit", "5", "--jobs", "2"]
    journal = tmp_path / "tasks.make.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 5):
            time.sleep(0.05)
        process.kill()
    begun = journal.read_text()
    assert begun, process.stdout
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert journal.read_text().startswith(begun[: begun.rfind("\n") + 1])
    assert len(load_tasks(out)) == 5
    assert admitted(out, tries=2)["counts"]["pass"] == 5
