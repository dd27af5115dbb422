"""This module has the SLURM that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.train_kit import warm_start
from tests.slurm_kit import Slurm, slurm

__all__ = ["warm_start"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real SLURM of two nodes, whose jobs must leave no process."""
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made
    left = [process.cmdline()[:4] for process in made.processes()]
    assert left == [], "jobs have left processes"
