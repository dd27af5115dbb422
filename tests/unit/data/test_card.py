"""This module tests the cards of task files: what is counted, and that each command's step stays."""

from __future__ import annotations

import json
from pathlib import Path

from rewards.task import load_tasks
from rl.data.card import facts, write_card
from rl.data.convert import write_tasks
from rl.data.rates import ResolveRate, write_rated
from tests.check_kit import row


def rows(count: int) -> list[dict]:
    return [row(f"task-{number}", repo=f"owner/{number % 2}", image=f"image-{number}") for number in range(count)]


def test_a_card_tells_what_is_in_the_file_and_how_it_came_to_be(tmp_path: Path) -> None:
    made, kept = tmp_path / "made.parquet", tmp_path / "rated.parquet"
    write_tasks(made, [{**one, "maker": "boundary", "licence": "MIT"} for one in rows(4)], ("maker", "licence"))
    write_card(made, "made", text=["| a | table |"], tried=9)
    rates = {f"task-{n}": ResolveRate(8, solved) for n, solved in ((0, 0), (1, 4), (3, 8))}
    write_rated(made, kept, load_tasks(made), rates)
    write_card(kept, "rated", made, episodes=24)

    card = json.loads((tmp_path / "rated.card.json").read_text())
    assert card["tasks"] == 3 and card["repositories"] == {"owner/1": 2, "owner/0": 1}
    assert card["licences"] == {"MIT": 3} and card["makers"] == {"boundary": 3} and card["boxes"] == {"images": 3}
    assert card["resolve_rates"] == {"never": 1, "up to 0.8": 1, "always": 1}
    first, second = card["steps"]
    assert (first["did"], first["file"], first["tried"]) == ("made", "made.parquet", 9)
    assert (second["did"], second["file"], second["episodes"]) == ("rated", "rated.parquet", 24)
    assert len({first["sha256"], second["sha256"]}) == 2
    text = (tmp_path / "rated.card.md").read_text()
    assert "# 3 tasks" in text and "| a | table |" in text and "- episodes: 24" in text and "tried" not in text


def test_a_file_without_a_card_is_named_by_its_digest(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.parquet", tmp_path / "out.parquet"
    write_tasks(mine, rows(2))
    write_tasks(out, rows(1))
    for broken in (None, "[", "[]", '{"steps": 3}'):
        if broken is not None:
            (tmp_path / "mine.card.json").write_text(broken)
        write_card(out, "admitted", mine)
        first, second = json.loads((tmp_path / "out.card.json").read_text())["steps"]
        assert first["did"] == "found" and first["file"] == "mine.parquet" and second["did"] == "admitted"
    assert facts(out)["licences"] == {} and facts(out)["resolve_rates"] == {}
