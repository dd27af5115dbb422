"""A real SLURM of three nodes runs a job of three parts: one trains, one plays the episodes, and one grades them."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster.test_slurm import OVERRIDES, SCRIPT, submit
from tests.integration.process_kit import command_line
from tests.integration.train_kit import WarmStart
from tests.slurm_kit import Slurm, slurm

pytestmark = [pytest.mark.slurm]

ENDS = ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED")


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[Slurm]:
    """A real SLURM of three nodes, whose jobs must leave no process."""
    with slurm(tmp_path / "slurm", nodes=3) as made:
        yield made
    assert [command_line(process) for process in made.processes()] == [], "jobs have left processes"


class Nodes:
    """Nodes keep what was seen on them while a job ran: where agents were, and what graders' boxes have used of a CPU.

    Processes in a box have no environment of SLURM, so they are found below Ray's actors; what those of a grader have
    used is in the grader's own account when they have ended, so none of them is missed.
    """

    def __init__(self) -> None:
        self.agents: set[str] = set()
        self.graders: dict[tuple[str, int], float] = {}

    def look(self, cluster: Slurm) -> None:
        for actor in cluster.processes():
            with contextlib.suppress(psutil.Error):
                # In this order: a child that an actor has forked has the actor's name until it becomes another program,
                # or ends, and then it has another environment, or none.
                node = actor.environ().get("SLURMD_NODENAME", "")  # batch scripts have none
                line = command_line(actor)
                if line.startswith("ray::Host"):
                    used = actor.cpu_times()
                    self.graders[node, actor.pid] = used.children_user + used.children_system
                elif line.startswith("ray::"):
                    below = [command_line(child) for child in actor.children(recursive=True)]
                    self.agents |= {node for line in below if re.search(r"\bclaude\b", line)}


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_heterogeneous_job_plays_on_one_part_and_grades_on_another(
    three_nodes: Slurm, warm_start: WarmStart, tmp_path: Path
) -> None:
    out = tmp_path / "out.txt"
    one = ["--nodes=1", "--exclusive", "--mem=0"]
    changed = ["trainer.nnodes=1", "trainer.total_training_steps=1"]
    job = submit(
        three_nodes, out, *one, ":", *one, ":", *one, SCRIPT, f"run.root={tmp_path}", *OVERRIDES, *changed,
        *warm_start.given(),
    )  # fmt: skip
    seen = Nodes()
    end = time.monotonic() + 1200
    while (ended := three_nodes.job(job))["JobState"] not in ENDS:
        assert time.monotonic() < end, out.read_text()
        seen.look(three_nodes)
        time.sleep(0.3)
    text = out.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    run = tmp_path / "quickstart" / f"slurm-{job}"
    (record,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert record["episode/count"] == 8 and record["infra/failures"] == 0

    def workers(node: str, words: str = "") -> set[str]:
        """The numbers of Ray's workers on a node whose output has these words."""
        files = (run / "logs" / node / "ray-0").glob("worker-*.out")
        return {path.stem.rpartition("-")[2] for path in files if words in path.read_text()}

    lines = [line for path in (run / "episode_metrics").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert any(json.loads(line)["reason"] != "empty_patch" for line in lines), lines
    played = {path.stem.rpartition("-")[2] for path in (run / "episode_metrics").glob("*.jsonl")}
    assert len(played) == 2 and played <= workers("n2"), "both agent loop workers were on the second node"
    assert {node for node in three_nodes.nodes if workers(node, ":actor_name:Host")} == {"n3"}  # as Ray writes it
    assert seen.agents == {"n2"}
    assert {node for node, _ in seen.graders} == {"n3"}
    assert max(seen.graders.values()) > 0, "hidden tests ran on the third node"
