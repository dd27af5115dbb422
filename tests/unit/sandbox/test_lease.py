"""This module tests leases: one holder at a time, and none that is dead for long."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.sandbox import lease
from rollout.sandbox.owner import me


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_POLL_S", 0.05)


async def test_a_lease_is_held_by_one(tmp_path: Path) -> None:
    held, most = 0, 0

    async def hold() -> None:
        nonlocal held, most
        async with lease.lease(tmp_path / "x"):
            held += 1
            most = max(most, held)
            await asyncio.sleep(0.01)
            held -= 1

    await asyncio.gather(*(hold() for _ in range(4)))
    assert most == 1 and list(tmp_path.iterdir()) == []


async def test_a_lease_survives_its_holders_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from rollout.sandbox.owner import me; print(me())"], stdout=subprocess.PIPE, text=True
    )
    (tmp_path / "x").write_text(f"{child.stdout.strip()} 0")  # a process of this machine that has ended
    async with asyncio.timeout(30), lease.lease(tmp_path / "x"):
        pass
    (tmp_path / "x").write_text("elsewhere/boot/pid:[1]/1/1 0")  # of another machine, which says nothing any more
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), lease.lease(tmp_path / "x"):
            pass
    monkeypatch.setattr(lease, "STALE_S", 0.2)
    async with asyncio.timeout(30), lease.lease(tmp_path / "x"):
        assert (tmp_path / "x").read_text().startswith(me())
    assert list(tmp_path.iterdir()) == []


async def test_a_lease_that_is_renewed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second of the waiting side's clock for each of its looks; the lease is stale after 100 without a renewal.
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(lease, "_POLL_S", 0.002)
    monkeypatch.setattr(lease, "STALE_S", 100)
    monkeypatch.setattr(lease, "BEAT_S", 0.002)
    async with lease.lease(tmp_path / "x"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), lease.lease(tmp_path / "x"):
                pass


async def test_breaking_a_lease_spares_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("new")
    lease.break_off(tmp_path / "x", "old")
    assert (tmp_path / "x").read_text() == "new" and len(list(tmp_path.iterdir())) == 1
