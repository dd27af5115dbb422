"""This module has what docs/metrics.md says about metrics, for tests that hold it against runs and panels."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rl.metrics.panels import pattern

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


class Documented(NamedTuple):
    name: str
    unit: str
    meaning: str
    healthy: str
    when: str


def documented() -> list[Documented]:
    """The rows of its tables."""
    rows = []
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows.append(Documented(cells[0].strip("`"), *cells[1:]))
    return rows


def check(logged: set[str]) -> None:
    """Assert that the document names every metric that such a run (with held-out episodes) logged, and no other."""
    rows = {row.name: row for row in documented()}
    used = {name: best(name, list(rows)) for name in logged}
    of_episodes = {name: f"episode/{name.removeprefix('val/')}" for name, by in used.items() if by == "val/<mean>"}
    unknown = [name for name, by in used.items() if by is None or of_episodes.get(name, by) not in rows]
    assert not unknown, f"docs/metrics.md does not name {sorted(unknown)}"
    missing = {name for name, row in rows.items() if row.when in ("", "held-out")} - set(used.values())
    assert not missing, f"docs/metrics.md names what the run did not log: {sorted(missing)}"


def best(name: str, names: list[str]) -> str | None:
    """The documented name that a metric goes by: itself, else the pattern with most letters of its own."""
    fitting = [one for one in names if pattern(one).fullmatch(name)]
    return max(fitting, key=lambda one: ("<" not in one, len(one)), default=None)
