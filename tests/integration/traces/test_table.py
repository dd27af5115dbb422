"""This module tests that every program reads the same of an episode, of every kind of source (tests/trace_table.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trace_table import IDS, collections, sources_of, table

pytestmark = pytest.mark.claude


@pytest.mark.timeout(300)
def test_every_program_reads_the_same(tmp_path: Path) -> None:
    """The real Claude Code plays with servers that use one id for all, or none."""
    kinds = [("openai", IDS[0]), ("anthropic", IDS[2])]
    columns, wrong = table([*sources_of(collections(1, tmp_path, kinds), tmp_path)], tmp_path / "read")
    assert wrong == 0, columns
    assert len(columns) == 16 and {len(column) for _, column in columns} == {8}
    assert {cell for _, column in columns for cell in column.values()} == {"3 / 2 / 3 / 3"}
