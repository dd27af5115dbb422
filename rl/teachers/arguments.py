"""Teachers on a command line (``--teacher``): read them, show what asking would cost, ask, and tell what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.run.screen import Screen, this_command
from rl.traces.ingest.asking import AskingResult, Survey, key_of
from rl.traces.ingest.endpoints import Endpoint

_NUMBERS = {"price_in": float, "price_out": float, "temperature": float, "patience_s": float}
_COUNTS = {"concurrency": int, "max_tokens": int}


def teacher_of(text: str) -> Endpoint:
    """Return the endpoint of a --teacher. Raises ValueError, with one line."""
    given = dict(part.partition("=")[::2] for part in text.split(","))
    known = {"name", "url", "model", "protocol", "key_env", *_NUMBERS, *_COUNTS}
    if unknown := given.keys() - known:
        raise ValueError(f"--teacher {text}: {min(unknown)!r} is none of {', '.join(sorted(known))}")
    if missing := {"name", "url", "model"} - given.keys():
        raise ValueError(f"--teacher {text}: {min(missing)} is missing")
    if given.get("protocol", "chat") not in ("chat", "messages"):
        raise ValueError(f"--teacher {text}: protocol is chat or messages")
    values: dict[str, Any] = {name: given[name] for name in ("name", "url", "model", "protocol") if name in given}
    for name, kind in {**_NUMBERS, **_COUNTS}.items():
        if name in given:
            try:
                values[name] = kind(given[name])
            except ValueError:
                raise ValueError(f"--teacher {text}: {name}={given[name]!r} is no number") from None
            if not 0 <= values[name] < 1e9 or (name in _COUNTS and not values[name]):
                raise ValueError(f"--teacher {text}: {name}={given[name]} is out of range")
    if ("price_in" in values) != ("price_out" in values):
        raise ValueError(f"--teacher {text}: give both price_in and price_out, or none")
    return Endpoint(**values, key=key_of(given.get("key_env")))


def ask(survey: Survey, directory: Path, most: float | None, screen: Screen) -> AskingResult:
    """Show what asking would cost, and ask (``Survey.ask``). Raises ValueError if there are prices, but no cap."""
    table = Table("teacher", "states", "input tokens, about", "cost, about", "at most")
    for one in survey.endpoints:
        about, highest = survey.estimate(one)
        prices = (f"${about:.4f}", f"${highest:.4f}") if one.price_in is not None else ("?", "?")
        table.add_row(one.name, str(len(survey.wanted[one.name])), f"{survey.bytes[one.name] // 4:,}", *prices)
    screen.print(table)
    if most is None and any(one.price_in is not None for one in survey.endpoints):
        raise ValueError("that is the estimate; give --max-cost DOLLARS to go on")
    if free := [one.name for one in survey.endpoints if one.price_in is None]:
        screen.say(f"without prices, so not counted in costs: {', '.join(free)}")
    return survey.ask(directory, most, screen)


def told(asked: AskingResult, counts: Mapping[str, int], screen: Screen, *made: tuple[str, str]) -> int:
    """Show how much came of it, what it has cost and what to do next; return the exit status: 1 if answers are missing.

    made: what was written, each after its label.
    """
    for what, count in counts.items():
        screen.print(f"{count:>7,}  {what}")
    screen.print(f"cost: ${asked.cost:.4f}")
    screen.next(*([("ask the rest", this_command())] if asked.left else []), *made)
    return 1 if asked.left else 0
