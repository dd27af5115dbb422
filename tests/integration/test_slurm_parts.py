"""A real SLURM of three nodes runs a job of three parts: one trains, one plays the episodes, and one grades them."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.test_slurm import OVERRIDES, SCRIPT, submit
from tests.integration.train_kit import WarmStart, command_line
from tests.slurm_kit import Slurm, slurm

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.xdist_group("trainers-2")]

ENDS = ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED")


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[Slurm]:
    """A real SLURM of three nodes, whose jobs must leave no process."""
    with slurm(tmp_path / "slurm", nodes=3) as made:
        yield made
    assert [command_line(process) for process in made.processes()] == [], "jobs have left processes"


def seen_on(cluster: Slurm, node: str) -> set[str]:
    """The command lines of the processes below Ray's actors on a node; a box's own have no environment of SLURM."""
    found = set()
    for actor in cluster.processes(SLURMD_NODENAME=node):
        if command_line(actor).startswith("ray::"):
            try:
                found |= {command_line(child) for child in actor.children(recursive=True)}
            except psutil.Error:
                continue
    return found


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_heterogeneous_job_plays_on_one_part_and_grades_on_another(
    three_nodes: Slurm, warm_start: WarmStart, tmp_path: Path
) -> None:
    out = tmp_path / "out.txt"
    one = ["--nodes=1", "--exclusive", "--mem=0"]
    changed = ["trainer.nnodes=1", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1"]
    job = submit(
        three_nodes, out, *one, ":", *one, ":", *one, SCRIPT, f"run.root={tmp_path}", *OVERRIDES, *changed,
        *warm_start.given(),
    )  # fmt: skip
    seen: dict[str, set[str]] = defaultdict(set)
    end = time.monotonic() + 1200
    while (ended := three_nodes.job(job))["JobState"] not in ENDS:
        assert time.monotonic() < end, out.read_text()
        for node in three_nodes.nodes:
            seen[node] |= seen_on(three_nodes, node)
        time.sleep(0.05)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    run = tmp_path / "quickstart" / f"slurm-{job}"
    (record,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert record["episode/count"] == 4 and record["infra/failures"] == 0

    def workers(node: str, words: str = "") -> set[str]:
        """The numbers of Ray's workers on a node whose output has these words."""
        files = (run / "logs" / node / "ray-0").glob("worker-*.out")
        return {path.stem.rpartition("-")[2] for path in files if words in path.read_text()}

    played = {path.stem.rpartition("-")[2] for path in (run / "episode_metrics").glob("*.jsonl")}
    assert len(played) == 2 and played <= workers("n2"), "both agent loop workers were on the second node"
    graders = {node for node in three_nodes.nodes if workers(node, ":actor_name:Host")}  # as Ray writes it
    assert graders == {"n3"}, "the graders were on the third node"
    agents = {node for node in seen if any(re.search(r"\bclaude\b", line) for line in seen[node])}
    assert agents == {"n2"}
    assert any("test" in line for line in seen["n3"]), seen["n3"]
