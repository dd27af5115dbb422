"""Realcode's tasks are made of packages in real boxes; its policy is prepared with the real Claude Code."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.config import compose
from rl.make.sources import MakeError
from rl.quickstart.realcode.prepare import prepare
from rl.quickstart.realcode.swaps import swaps
from rl.quickstart.realcode.tasks import FILE, make_tasks
from rl.screen import Screen
from rollout.records import Reader
from tests.integration.make_kit import write_sdist

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("offline_pip"),
]

TRACKS = '''\
from math import floor

STEP = 2

def clamp(x: int, low: int = 0, high: int = 10) -> int:
    """Keep it between."""
    if x < low:
        return low
    if x > high + 1:
        return high
    return x

def count_above(values, limit=0):
    found = 0
    for value in values:
        if value > limit and value is not None:
            found += 1
    return found

def steps(length):
    whole = floor(length / STEP)
    return whole + 1 if length >= 0 and whole < 99 else None

def forever(n):
    while n == 0:
        pass
    return n - 1

def shared(a, b):
    return a - b if a == b else a + b

def of_an_object(thing):
    return thing.name == "x" and True
'''
TRACKS_TESTS = """\
import pytest
from types import SimpleNamespace
from tracks import clamp, count_above, forever, of_an_object, shared, steps

@pytest.mark.parametrize("x", [-2, 0, 3, 10, 11, 12, 40])
def test_clamp(x):
    assert 0 <= clamp(x) <= 11
    assert clamp(x, low=x) == x or x > 10

@pytest.mark.parametrize("values", [[], [1], [0, 1, 2], [-1, 0], [5, 5, 5]])
def test_count(values):
    assert count_above(values) == len([v for v in values if v > 0])

@pytest.mark.parametrize("length", [0, 1, 2, 3, 8])
def test_steps(length):
    assert steps(length) == length // 2 + 1

@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_rest(n):
    assert forever(n) == n - 1
    assert shared(n, n) == 0 and shared(n, 0) == n
    assert of_an_object(SimpleNamespace(name="x"))
"""
FIELDS = """\
def shared(a, b):
    return a - b if a == b else a + b

def middle(values):
    half = len(values) // 2
    if len(values) == 0:
        return None
    return values[half] if half > 0 else values[0]
"""
FIELDS_TESTS = """\
import pytest
from fields import middle, shared

@pytest.mark.parametrize("n", range(1, 6))
def test_middle(n):
    assert middle(list(range(n))) == n // 2

@pytest.mark.parametrize("n", [1, 2, 3])
def test_shared(n):
    assert shared(n, n) == 0 and shared(n, 0) == n
"""


@pytest.fixture
def packages(tmp_path: Path) -> tuple[list[str], list[str]]:
    """Source distributions to train on, and to hold out."""
    made = []
    for name, source, tests in (("tracks", TRACKS, TRACKS_TESTS), ("fields", FIELDS, FIELDS_TESTS)):
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: MIT\n"
        files = {"PKG-INFO": about, f"{name}.py": source, f"tests/test_{name}.py": tests}
        made.append([str(write_sdist(tmp_path / f"{name}-1.0.tar.gz", files))])
    return made[0], made[1]


def test_tasks_are_made_of_functions_and_repaired_by_one_exchange(
    tmp_path: Path, packages: tuple[list[str], list[str]]
) -> None:
    said: list[str] = []
    for name in ("one", "other"):  # make_tasks grades the gold patch and one that keeps the bug
        make_tasks(tmp_path / name, 3, *packages, (40, 40), tmp_path / "packages", said.append)
    out = tmp_path / "one"
    for split in ("train", "heldout"):
        one, other = (pyarrow.parquet.read_table(tmp_path / name / f"{split}.parquet") for name in ("one", "other"))
        assert one.equals(other)
    train, heldout = load_tasks(out / "train.parquet"), load_tasks(out / "heldout.parquet")
    sources = {task.instance_id: (task.snapshot / FILE).read_text() for task in [*train, *heldout]}
    assert {text.partition("def ")[2].partition("(")[0] for text in sources.values()} >= {"clamp", "count_above"}
    # A bug that never ends makes no task, nor does a function of what has no literal.
    assert not any("while n != 0" in text or "of_an_object" in text or '"""' in text for text in sources.values())
    assert {task.repo for task in train} == {"pypi/tracks"} and {task.repo for task in heldout} == {"pypi/fields"}
    assert not any("def shared" in sources[task.instance_id] for task in train)  # it is held out
    for task in train:
        gold = task.patch or ""
        (added,) = [line[1:] for line in gold.split("\n") if line.startswith("+") and not line.startswith("+++")]
        source = sources[task.instance_id]
        assert any(added in one.applied(source).split("\n") for one in swaps(source))
        assert task.problem_statement.split(" gives ")[0] not in task.eval_script
    steps = [text for text in sources.values() if "def steps" in text]
    assert steps and all("from math import floor" in text and "STEP = 2" in text for text in steps)
    with pytest.raises(MakeError, match="held-out"):
        make_tasks(tmp_path / "none", 3, packages[0], [], (4, 4), tmp_path / "packages", said.append)


@pytest.mark.claude
def test_a_policy_is_prepared_with_the_real_agent(tmp_path: Path, packages: tuple[list[str], list[str]]) -> None:
    keys = [
        "quickstart.train_tasks=4",
        "quickstart.heldout_tasks=2",
        "quickstart.warm_episodes=6",
        "realcode.drills=32",
    ]
    lists = [f"realcode.{split}=['{spec[0]}']" for split, spec in zip(("train", "heldout"), packages, strict=True)]
    config = compose(["+experiment=realcode", *keys, *lists, "quickstart.sft.epochs=1", f"run.root={tmp_path}"])
    made = prepare(config, Screen())
    assert (Path(made["actor_rollout_ref.model.path"]) / "config.json").is_file()
    (where,) = (tmp_path / "prepared").glob("realcode-*")
    records = list(Reader(where / "warm/episodes"))
    assert len(records) == 6
    nodes = [node for one in records for node in one.nodes]
    used = {block["name"] for node in nodes for block in node.blocks if block["type"] == "tool_use"}
    assert used == {"Bash", "Read"}
    assert any("sed -i" in node.text for node in nodes) and any(b"module.py" in one.patch for one in records)
