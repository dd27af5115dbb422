"""This module tests which host gets a box, without hosts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rollout.sandbox import SandboxError
from rollout.sandbox.docker.fleet import Fleet, Host


class Pretended(Host):
    """A host that is reached by asking this object. has_now: its images. lost: nobody can reach it."""

    def __init__(self, name: str, cpus: int = 2) -> None:
        super().__init__(name, None)
        self.has_now: set[str] = set()
        self.lost, self.tried, self.cpus = False, True, cpus

    def up(self):
        return None if self.lost else self

    def usable(self) -> bool:
        return not self.lost

    def wake(self, pool: object, now: bool) -> None:
        self.error = f"{self.name}: no route" if self.lost else ""

    def has(self, image: str) -> bool | None:
        return None if self.lost else image in self.has_now


def fleet_of(*hosts: Pretended, per_host: int = 16) -> Fleet:
    fleet = Fleet([], Path("none"), per_host)
    fleet.hosts = list(hosts)
    return fleet


def test_200_boxes_on_4_hosts_come_where_their_images_are() -> None:
    hosts = [Pretended(name) for name in "abcd"]
    fleet = fleet_of(*hosts, per_host=100)
    images = [f"image-{number}" for number in range(25)]
    for image in images:  # before a run, each goes to one host
        fleet.engine_for(image).has_now.add(image)  # type: ignore[attr-defined]
    assert sorted(len(host.has_now) for host in hosts) == [6, 6, 6, 7]
    assert not any(host.booting for host in hosts)
    for image in images * 8:
        assert image in fleet.choose(image).has_now  # type: ignore[attr-defined]
    assert sorted(host.booting for host in hosts) == [48, 48, 48, 56]


def test_a_group_comes_where_its_first_box_is_and_a_full_host_gives_some_away() -> None:
    hosts = [Pretended("a"), Pretended("b"), Pretended("large", cpus=8)]
    fleet = fleet_of(*hosts, per_host=8)
    first = [fleet.choose("image").name for _ in range(8)]
    assert len(set(first)) == 1  # nobody has it yet
    rest = Counter(fleet.choose("image").name for _ in range(72 - 8))
    total = Counter(first) + rest
    assert set(total) == {"a", "b", "large"} and total["large"] > total["a"] + total["b"]


def test_a_host_that_is_lost_is_left_out() -> None:
    hosts = [Pretended("a"), Pretended("b")]
    hosts[0].has_now.add("image")
    fleet = fleet_of(*hosts)
    assert fleet.choose("image").name == "a"
    hosts[0].lost = True
    assert {fleet.choose("image").name for _ in range(20)} == {"b"}
    hosts[1].lost = True
    with pytest.raises(SandboxError, match="no_engine: no host answers: a: no route; b: no route"):
        fleet.choose("image")
