"""Whatever is in a row of a public set, it becomes a task that can be written and read, or is refused in one line.

A row of each set is changed in some places, at any depth: values of other types, missing ones, huge ones, JSON as text,
lines of patches out of order.
"""

from __future__ import annotations

import datetime
import decimal
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.task import Task, TaskError, load_tasks
from rl.data import harbor
from rl.data.convert import convert, write_tasks
from rl.data.filters import Selection, split
from rl.data.sets import ConversionOptions
from rl.episodes.boxes import _at_least
from rollout.sandbox import Limits
from tests import datasets
from tests.harbor_kit import write_task
from tests.unit.data.test_sets import MAKE

_plain = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 7, 2**63, 10**30, 10**4000, float("nan"), float("inf"), 1e300, 0.5]),
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "\0", "\ud800", "a\nb", "a\u2028b", "null", "NaN", "1" * 5000, "[" * 100_000, "x" * 100_000]
    ),
    st.sampled_from([b"\xff", datetime.datetime(2021, 1, 1), datetime.date.max, decimal.Decimal("1e9999")]),
)
_nested = st.recursive(
    _plain,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
_json = _nested.map(lambda value: json.dumps(value, default=str) if _fits(value) else "{")
_values = st.one_of(_nested, _json)
_headers = [
    "diff --git a/x b/x", "diff --git a/x b/y", "--- a/x", "+++ b/x", "--- /dev/null", "+++ /dev/null", "@@ -1 +1 @@",
    "@@ -0,0 +1,99999999999 @@", f"@@ -1,{'9' * 5000} +1 @@", "@@", "new file mode 100644", "deleted file mode 100644",
    "rename from x", "rename to y", "copy from x", "index 1..2", "GIT binary patch", "Binary files a/x and b/x differ",
    "diff --git a/\x00 b/\x00", "\\ No newline at end of file", "", " ", "+", "-", "\r", "\x0c", "--- ", "+++ ",
]  # fmt: skip


def _fits(value: Any) -> bool:
    try:
        json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return False
    return True


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    """All places in a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, one in inner for found in _places(one, (*place, key)))]


def _change(draw: st.DrawFn, value: Any) -> Any:
    """Change a nested value in one place: another value, none, or a patch with lines out of order."""
    *above, key = draw(st.sampled_from(_places(value)[1:]))
    at = value
    for part in above:
        at = at[part]
    kind = draw(st.sampled_from(["value", "value", "gone", "lines"]))
    if kind == "gone":
        del at[key]
    elif kind == "lines" and isinstance(at[key], str):
        lines = at[key].split("\n")
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(lines)))
            lines[place : place + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(_headers), max_size=2))
        at[key] = "\n".join(lines)
    else:
        at[key] = draw(_values)
    return value


@st.composite
def _rows(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A row of a set, changed in one to four places, some of them inside of its JSON texts."""
    row = json.loads(json.dumps(MAKE[name]()))
    encoded = [key for key, value in row.items() if isinstance(value, str) and value[:2] in ('["', '{"')]
    opened = [key for key in encoded if draw(st.booleans())]
    for key in opened:
        row[key] = json.loads(row[key])
    for _ in range(draw(st.integers(1, 4))):
        if row:
            row = _change(draw, row)
    for key in opened:
        if key in row and draw(st.booleans()) and _fits(row[key]):
            row[key] = json.dumps(row[key], default=str)
    return row


def _is_a_line(text: str) -> bool:
    return text.splitlines() in ([text], []) and len(text) < 2000 and text.encode() is not None


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=150)
@given(data=st.data())
def test_every_row_is_a_task_or_is_refused_in_a_line(name: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(_rows(name), min_size=1, max_size=2))
    recipes = {"acme__calc-7": datasets.swe_bench()} if data.draw(st.booleans()) else {}
    regression = data.draw(st.sampled_from(["all", "same-files"]))
    made, refused = convert(rows, name, ConversionOptions(recipes=recipes, regression=regression))
    assert len(made) + len(refused) == len(rows)
    assert all(_is_a_line(one.detail) and _is_a_line(one.instance_id) for one in refused)
    json.dumps([vars(one) for one in refused]).encode()
    chosen, _ = Selection(repos=["a*"], difficulties=["1"], min_failing=1, max_statement=10, shuffle=1).apply(made)
    split(made, 0.5, "repo", 0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "tasks.parquet")
        for some in filter(None, (made, chosen)):
            write_tasks(path, some)
            assert load_tasks(path) == [Task.from_row(row, Path(directory)) for row in some]


@settings(max_examples=500)
@given(data=st.data())
def test_every_v5_row_is_a_task_or_is_refused_in_a_line(data: st.DataObject) -> None:
    row = datasets.snapshot_row("a__b-1", patch=datasets.GOLD, setup_patch="", hidden_paths='["x"]', difficulty="1")
    names = st.sampled_from(sorted(row))
    for key, value in data.draw(st.dictionaries(names, _values, max_size=4)).items():
        row[key] = value
    for key in data.draw(st.sets(names, max_size=2)):
        del row[key]
    try:
        task = Task.from_row(row, Path())
    except TaskError as error:
        assert _is_a_line(str(error)) and any(f": {name}: " in str(error) for name in row.keys() | {*_required(row)})
    else:
        assert Task.from_row(task.to_row(), Path()) == task


_toml = st.recursive(
    st.one_of(
        st.booleans(),
        st.sampled_from([0, -1, 7, 10**30, 10**4000, float("nan"), float("inf"), 0.5]),
        st.sampled_from(["", "a\nb", "${X}", "2G", "9" * 5000 + "G", "public", "separate", "../x", "\0", "x" * 10_000]),
        st.just(datetime.date.max),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
_HARBOR = {
    "schema_version": "1.4",
    "task": {"name": "a/b", "version": "1"},
    "metadata": {"difficulty": "easy"},
    "artifacts": ["/app/x", {"source": "/app/y", "exclude": ["z"]}],
    "agent": {"timeout_sec": 9.0, "network_mode": "no-network"},
    "verifier": {
        "timeout_sec": 9.0,
        "environment_mode": "separate",
        "env": {"A": "1"},
        "environment": {"memory": "1G"},
    },
    "solution": {"env": {"A": "1"}},
    "environment": {
        **{"network_mode": "no-network", "workdir": "/app", "memory": "1G", "storage_mb": 9, "cpus": 1, "gpus": 0},
        **{"docker_image": "base", "env": {"A": "1"}, "mcp_servers": [], "build_timeout_sec": 9.0},
    },
}


@settings(max_examples=300)
@given(data=st.data())
def test_every_task_of_harbors_is_a_task_or_is_refused_in_a_line(data: st.DataObject) -> None:
    config = json.loads(json.dumps(_HARBOR))
    for _ in range(data.draw(st.integers(0, 3))):
        *above, key = data.draw(st.sampled_from(_places(config)[1:]))
        at = config
        for part in above:
            at = at[part]
        if data.draw(st.booleans()):
            at[key] = data.draw(_toml)
        else:
            del at[key]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        place = write_task(Path(directory), "one")
        patch.setattr(harbor.tomllib, "loads", lambda text: config)
        options = ConversionOptions({}, out=Path(directory))
        made, refused = convert([{"instance_id": "one", "path": str(place)}], "harbor", options)
        assert len(made) + len(refused) == 1
        assert all(_is_a_line(one.detail) and _is_a_line(one.instance_id) for one in refused)
        if made:
            write_tasks(Path(directory, "tasks.parquet"), made)
            (task,) = load_tasks(Path(directory, "tasks.parquet"))
            assert task == Task.from_row(made[0], Path(directory))
            _at_least(Limits(), task.limits)


def _required(row: dict[str, Any]) -> set[str]:
    return {*datasets.snapshot_row("x")} - row.keys()
