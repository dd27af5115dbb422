"""This module tests wandb's own client, online: what arrives at a server is what was logged, and the workspace is
one that it reads.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rl import dashboard
from rl.metrics import samples
from rl.metrics.panels import SECTIONS
from tests.unit.metrics.test_metrics import STEP
from tests.wandb_kit import ENTITY, KEY, Wandb, wandb_server

pytestmark = [pytest.mark.timeout(180)]

CONFIG = {"trainer": {"project_name": "coding-rl", "wandb_proxy": None}, "agent": {"max_turns": 30}, "sandbox": None}
SAMPLE = dict.fromkeys(samples.COLUMNS, "\u00e9 \x1b[31m <b>") | {"step": 1, "reward": 0.5}
PLAY = """
import json, sys
from rl.metrics.loggers import Loggers
from rl.metrics.samples import log_samples
told, said = json.load(sys.stdin), []
loggers = Loggers(said.append, "coding-rl", "quickstart", ["wandb"], told["config"])
for row in told["rows"]:
    step = row.pop("step")
    loggers.log(data=row, step=step)
    log_samples([told["sample"]], loggers, step)
loggers.finish()
print(json.dumps(said))
"""


def row(step: int) -> dict[str, Any]:
    """A step's metrics: as a run has them, and with values that a number's text may lose."""
    odd = {"actor/lr": 1e-9 * step, "perf/total_num_tokens": 2**40 + step, "failure/tests_failed": 1 / 3}
    return STEP | odd | {"step": step, "val/repo/a/b/resolve_rate": step / 7}


async def play(server: Wandb, home: Path, steps: range) -> None:
    told = json.dumps({"config": CONFIG, "rows": [row(step) for step in steps], "sample": SAMPLE})
    out = await server.python(home, "-W", "ignore", "-c", PLAY, given=told, WANDB_RUN_ID="one", WANDB_RESUME="allow")
    assert json.loads(out.splitlines()[-1]) == [], "the logger has failed"


async def test_what_is_logged_arrives_once_also_when_the_run_goes_on(tmp_path: Path) -> None:
    async with wandb_server() as server:
        await play(server, tmp_path, range(1, 4))
        first = dict(server.runs["one"].history)
        await play(server, tmp_path, range(4, 6))
    assert server.unknown == [] and server.refused == []
    (run,) = server.runs.values()
    assert {number: run.history[number] for number in first} == first, "a continued run overwrites nothing"
    assert [one["_step"] for one in run.rows] == [1, 2, 3, 4, 5]
    for step, arrived in enumerate(run.rows, 1):
        logged = {name: value for name, value in row(step).items() if name != "step"}
        assert {name: arrived.get(name) for name in logged} == logged
    assert {name: run.summary.get(name) for name in logged} == logged
    assert {name: run.config[name]["value"] for name in CONFIG} == CONFIG
    assert run.ended == [0, 0] and run.project == "coding-rl"
    table = run.rows[0][dashboard.SAMPLES]
    assert table["_type"] == "table-file"
    stored = json.loads(server.stored[f"one/{table['path']}"])
    assert stored["columns"] == list(samples.COLUMNS)
    assert stored["data"] == [[SAMPLE[name] for name in samples.COLUMNS]]
    texts = [json.dumps([one.history, one.summary, one.config]) for one in server.runs.values()]
    assert not any(KEY in text for text in (*texts, *map(str, server.stored.values())))


READ = """
import json, sys
import wandb_workspaces.workspaces as ws
read = ws.Workspace.from_url(sys.argv[1])
print(json.dumps([[section.name, len(section.panels)] for section in read.sections]))
"""


def plain(node: Any) -> Any:
    """A value without the names that are drawn at random."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items() if key not in ("__id__", "id")}
    return [plain(value) for value in node] if isinstance(node, list) else node


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # of wandb_workspaces itself
async def test_the_workspace_arrives_and_is_read_back(tmp_path: Path) -> None:
    from wandb_workspaces.workspaces.internal import WorkspaceViewspec

    async with wandb_server() as server:
        out = await server.python(tmp_path, "-W", "ignore", "-m", "rl.dashboard", "coding-rl")
        url = out.split()[-1]
        read = await server.python(tmp_path, "-W", "ignore", "-c", READ, url)
    assert server.unknown == [] and server.refused == []
    (view,) = server.views.values()
    assert (view["entityName"], view["projectName"], view["displayName"]) == (ENTITY, "coding-rl", "Training")
    assert url.startswith(f"{server.url}/{ENTITY}/coding-rl?nw=")
    arrived = json.loads(view["spec"])
    assert plain(arrived) == plain(dashboard.spec(dashboard.workspace(ENTITY, "coding-rl", "Training")))
    WorkspaceViewspec.model_validate_json(view["spec"])
    wanted = [[name, len(panels)] for name, panels in SECTIONS.items()]
    assert json.loads(read.splitlines()[-1])[:-1] == wanted
    # The panels of a workspace that was read find the metrics of a run that was logged.
    names = list(row(1))
    drawn = [panel["config"] for part in arrived["section"]["panelBankConfig"]["sections"] for panel in part["panels"]]
    found = {
        name
        for config in drawn
        for name in names
        if name in config.get("metrics", ()) or re.search(config.get("metricRegex") or r"(?!)", name)
    }
    expected = {name for panels in SECTIONS.values() for panel in panels for name in panel.curves(names)}
    assert found == expected and len(found) > 5
