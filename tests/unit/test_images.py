"""What is said while images are made. How they are made is in integration."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from rollout.sandbox import sealing


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [(1, ["3 of 3"]), (6, ["1 of 3", "2 of 3", "3 of 3"])],  # between two images
)
async def test_each_line_is_said_once(monkeypatch: pytest.MonkeyPatch, seconds: int, lines: list[str]) -> None:
    monkeypatch.setattr(sealing, "time", SimpleNamespace(monotonic=itertools.count(step=seconds).__next__))
    said: list[str] = []

    async def make(wanted: sealing.Wanted) -> tuple[str, tuple, tuple]:
        return "", (), ()

    wanted = [sealing.Wanted(name, sealing.Source("image")) for name in "abc"]
    await sealing.ahead(wanted, make, parallel=1, say=said.append, count=None)
    assert said == [f"images: {line} ready" for line in lines]
