"""Tasks of functions are made of packages in real boxes, and an expert plays them with the real Claude Code."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rewards.task import Task, load_tasks
from rl.data.functions import main, make
from rl.data.make.puzzles import FILE
from rl.data.make.sources import MakeError
from rl.data.make.swaps import swaps
from rl.quickstart.policy import make_policy
from rl.quickstart.tasks import verify
from rl.sft.episodes import rows_of
from rollout import audit
from rollout.records.reading import Reader
from tests.integration.make_kit import write_sdist
from tests.integration.programs_kit import start

CHECK = "python3 check.py"
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


def read(directory: Path) -> dict[str, bytes]:
    """Read all files, but not git's index, which has times."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "index")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def function_of(task: Task) -> str:
    return (task.snapshot / FILE).read_text().partition("def ")[2].partition("(")[0]


def test_tasks_are_made_of_functions_and_repaired_by_one_exchange(
    tmp_path: Path, packages: tuple[list[str], list[str]]
) -> None:
    out, said, made = tmp_path / "out", list[str](), list[dict[str, bytes]]()
    for _ in range(2):  # existing files are replaced
        make(out, *packages, 3, (40, 40), said.append)
        made.append(read(out))
        (out / "old").touch()
    assert made[0] == made[1]
    assert said == said[:2] * 2 and "fields-1.0.tar.gz: " in said[0] and " tasks of 2 functions" in said[0], said
    train, heldout = load_tasks(out / "train.parquet"), load_tasks(out / "heldout.parquet")
    asyncio.run(verify([*train, *heldout]))  # the gold patch resolves each, and one that keeps the bug does not
    sources = {task.instance_id: (task.snapshot / FILE).read_text() for task in [*train, *heldout]}
    assert {function_of(task) for task in train} >= {"clamp", "count_above"}
    # A bug that never ends makes no task, nor does a function of what has no literal.
    assert not any("while n != 0" in text or "of_an_object" in text or '"""' in text for text in sources.values())
    assert {task.repo for task in train} == {"pypi/tracks"} and {task.repo for task in heldout} == {"pypi/fields"}
    assert "shared" in {function_of(task) for task in heldout}
    assert "shared" not in {function_of(task) for task in train}  # it is held out
    assert sorted(sources) == [f"function__{number:04d}" for number in range(len(sources))]
    for task in [*train, *heldout]:
        gold = task.patch or ""
        (added,) = [line[1:] for line in gold.split("\n") if line.startswith("+") and not line.startswith("+++")]
        source = sources[task.instance_id]
        assert any(added in one.applied(source).split("\n") for one in swaps(source))
        shown = task.problem_statement.partition("```python\n")[2].partition("\n```")[0].split("\n")
        assert shown[0] == f"from module import {function_of(task)}"
        assert shown[1] in (task.snapshot / "check.py").read_text()
        assert f"value({shown[1]!r}" not in task.eval_script
    steps = [text for text in sources.values() if "def steps" in text]
    assert steps and all("from math import floor" in text and "STEP = 2" in text for text in steps)
    with pytest.raises(MakeError, match="no task for heldout"):
        make(tmp_path / "none", packages[0], [], 3, (4, 4), said.append)
    assert not (tmp_path / "none").exists()


@pytest.mark.claude
async def test_an_expert_plays_them(
    tmp_path: Path, packages: tuple[list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """By sed, since the agent has no Edit; the policy's tokenizer and template are all that is needed of it."""
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    (train,), (heldout,) = packages
    options = ["--heldout-packages", heldout, "--out", str(tasks), "--train", "4", "--heldout", "2"]
    assert await asyncio.to_thread(main, [train, *options]) == 0, capsys.readouterr().err
    make_policy(tmp_path / "policy", seed=1)
    what = ["expert", f"data={tasks / 'train.parquet'}", f"policy={tmp_path / 'policy'}", "+experiment=quickstart"]
    what += ["agent.tools=[Bash,Read]", "agent.max_turns=16", "proxy.max_tokens=256", f"expert.check={CHECK}"]
    process = start(*what, "epochs=3", "expert.gives_up=0.3", f"out={out}", program="rollout.collect")
    text, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, text
    records = list(Reader(out))
    assert len(records) == 12 and [record.missing for record in records] == [[]] * 12, text
    assert audit.main([str(out)]) == 0
    outcomes = [record.verdict["outcome"] for record in records]
    assert set(outcomes) == {"resolved", "unresolved"}, outcomes
    nodes = [node for record in records for node in record.nodes]
    assert {block["name"] for node in nodes for block in node.blocks if block["type"] == "tool_use"} == {"Bash", "Read"}
    commands = [block["input"]["command"] for node in nodes for block in node.blocks if block.get("name") == "Bash"]
    assert any(one.startswith("sed -i ") for one in commands) and CHECK in commands
    assert any(one.startswith(f"git checkout -q {FILE}; sed -i ") for one in commands)  # after a check that has failed
    # What was played can be imitated: each episode is one row, with the ids of its calls.
    assert all(len(list(rows_of(record))) == 1 for record in records)
