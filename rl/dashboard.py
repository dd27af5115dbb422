"""Create the wandb workspace of a project.

    python -m rl.dashboard RUN|PROJECT|ENTITY/PROJECT [--name NAME] [--dry-run]

RUN is a run directory, whose config names the project. The workspace shows the panels of ``rl.metrics.panels``, by
section, over all runs of the project, and a table of sampled episodes. Upload runs that were offline with ``wandb
sync`` first. Needs ``WANDB_API_KEY`` or ``wandb login``; ``--dry-run`` needs neither and prints the workspace as JSON.
Exit status: 0 done, 1 wandb refused or could not be reached, 2 the arguments are wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.metrics.panels import SECTIONS, Panel, pattern
from rollout import program

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Workspace

SAMPLES = "samples/episodes"


def workspace(entity: str, project: str, name: str) -> Workspace:
    """Return the workspace without saving it. Needs no network."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=title, panels=[_plot(panel) for panel in panels], is_open=True)
        for title, panels in SECTIONS.items()
    ]
    samples = wr.WeavePanelSummaryTable(table_name=SAMPLES, layout=wr.Layout(w=24, h=10))
    sections.append(ws.Section(name="Episodes as they were played", panels=[samples]))
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _plot(panel: Panel) -> LinePlot:
    import wandb_workspaces.reports.v2 as wr

    which: dict[str, Any] = {"y": list(panel.metrics)}
    if any("<" in metric for metric in panel.metrics):
        which = {"metric_regex": "|".join(f"^{pattern(metric).pattern}$" for metric in panel.metrics)}
    return wr.LinePlot(
        title=panel.title,
        title_y=panel.unit,
        range_y=panel.bounds,
        plot_type="stacked-area" if panel.stacked else "line",
        **which,
    )


def spec(made: Workspace) -> dict[str, Any]:
    """Return a workspace as the JSON value that wandb stores."""
    return json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def place(target: str) -> tuple[str, str]:
    """Return (entity, project) for a run directory or a name; the entity is "" for the user's default one.

    Raises ValueError if `target` is neither.
    """
    config = Path(target) / "config.yaml"
    if config.is_file():
        from omegaconf import OmegaConf

        return os.environ.get("WANDB_ENTITY", ""), OmegaConf.load(config).trainer.project_name
    if Path(target).is_dir():
        raise ValueError(f"{target}: not a run directory, as it has no config.yaml")
    entity, _, project = target.rpartition("/")
    if not project or "/" in entity:
        raise ValueError(f"{target}: neither a run directory nor PROJECT or ENTITY/PROJECT")
    return entity or os.environ.get("WANDB_ENTITY", ""), project


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.dashboard", __doc__)
    parser.add_argument("target", metavar="RUN|PROJECT", help="a run directory, PROJECT or ENTITY/PROJECT")
    parser.add_argument("--name", default="Training", help="the workspace's name (default: Training)")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON, upload nothing")
    args = parser.parse_args(arguments)
    try:
        entity, project = place(args.target)
    except ValueError as error:
        return program.failed(f"dashboard: {error}", 2)
    if args.dry_run:
        print(json.dumps(spec(workspace(entity or "me", project, args.name)), indent=1))
        return 0
    import requests
    import wandb

    try:
        api = wandb.Api()
        made = workspace(entity or api.default_entity or "", project, args.name).save()
    except (wandb.errors.Error, requests.RequestException, ValueError) as error:
        hint = "--dry-run prints the workspace; a project exists once a run was synced to it"
        return program.failed(f"dashboard: wandb: {' '.join(str(error).split())}\n{hint}")
    print(made.url)
    return 0


if __name__ == "__main__":
    program.end(main)
