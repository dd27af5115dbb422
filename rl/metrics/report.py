"""Curves of runs as PNG pictures, and a report on runs as one HTML page; ``rl.report`` is the command."""

from __future__ import annotations

import base64
import html
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.metrics.episodes import has_validation, resolve_rate
from rl.metrics.panels import SECTIONS, Panel, names_of
from rollout import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, list[dict]]  # records of metrics.jsonl by the run's name

_COLUMNS = 3
# Inches: the size of a chart with its title and legend; the left, bottom, width and height of the plot in it; the
# height of a section's title, and of a line of text at the top.
_CELL, _PLOT, _HEAD, _LINE = (5.0, 3.9), (0.75, 1.4, 4.0, 2.0), 0.5, 0.3
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
# Okabe and Ito's colours, which people with colour blindness can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#4B3B8F")
_LINES = ("-", "--", ":", "-.")
SAMPLES = 8  # episodes in a report


def figure(runs: Runs) -> Figure:
    """Return a picture of all panels that have data, by section. A stacked panel has one chart per run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = dict(zip(runs, itertools.cycle(_COLORS), strict=False)) if len(runs) > 1 else {}
    sections = {title: found for title, panels in SECTIONS.items() if (found := _charts(panels, runs))}
    height = _LINE * len(colors) + sum(_HEAD + _CELL[1] * -(-len(found) // _COLUMNS) for found in sections.values())
    width = _CELL[0] * _COLUMNS
    with rc_context(_STYLE):
        whole = Figure(figsize=(width, height))
        top = height - _LINE * len(colors)
        for number, (name, color) in enumerate(colors.items(), 1):
            whole.text(0.15 / width, 1 - _LINE * number / height, f"\u25a0 {name}", color=color, fontsize=11)
        for title, found in sections.items():
            whole.text(0.1 / width, (top - 0.3) / height, title, fontsize=15, fontweight="bold", color="0.4")
            top -= _HEAD
            for number, (panel, shown) in enumerate(found):
                row, column = divmod(number, _COLUMNS)
                left, bottom = column * _CELL[0] + _PLOT[0], top - (row + 1) * _CELL[1] + _PLOT[1]
                axes = whole.add_axes((left / width, bottom / height, _PLOT[2] / width, _PLOT[3] / height))
                draw(axes, panel, shown, colors if len(shown) > 1 else {})
                if len(shown) == 1 and len(runs) > 1:
                    axes.set_title(f"{panel.title}\n{next(iter(shown))}")
            top -= _CELL[1] * -(-len(found) // _COLUMNS)
    return whole


def _charts(panels: Sequence[Panel], runs: Runs) -> list[tuple[Panel, Runs]]:
    """Return the charts to draw: for each panel one for all runs, or one per run if their curves could not be told
    apart."""
    charts: list[tuple[Panel, Runs]] = []
    for panel in panels:
        counts = {name: len(panel.curves(names_of(records))) for name, records in runs.items()}
        have = {name: records for name, records in runs.items() if counts[name]}
        if panel.stacked or max(counts.values()) > len(_LINES):
            charts += [(panel, {name: records}) for name, records in have.items()]
        elif have:
            charts.append((panel, have))
    return charts


# The shortest span of a y axis, as a share of its largest value.
_LEAST_SPAN = 0.02


def draw(axes: Axes, panel: Panel, runs: Runs, colors: Mapping[str, str] | None = None) -> None:
    """Draw a panel's curves. ``colors``: a colour per run, if there are several; metrics then differ by line style."""
    from matplotlib.ticker import MaxNLocator

    for run, records in runs.items():
        curves = panel.curves(names_of(records))
        if panel.stacked:
            _stack(axes, records, curves)
            continue
        for number, (name, label) in enumerate(curves.items()):
            steps, values = zip(*[(r["step"], r[name]) for r in records if r.get(name) is not None], strict=True)
            color = colors[run] if colors else _COLORS[number % len(_COLORS)]
            style = _LINES[(number if colors else number // len(_COLORS)) % len(_LINES)]
            marker = "o" if len(steps) <= 30 else None
            axes.plot(steps, values, color=color, linestyle=style, marker=marker, label=label)
    low, high = panel.bounds
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    if (low, high) == (0.0, 1.0):
        axes.set_ylim(-0.03, 1.03)
    elif low is not None:
        axes.set_ylim(bottom=low)
    else:  # 0.9999996 beside 1 is no collapse
        bottom, top = axes.get_ylim()
        missing = _LEAST_SPAN * max(abs(bottom), abs(top)) - (top - bottom)
        if missing > 0:
            axes.set_ylim(bottom - missing / 2, top + missing / 2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles and (panel.stacked or len(panel.metrics) > 1 or len(handles) > 1):
        columns = min(len(handles), 3 if max(map(len, handles)) < 18 else 2)
        below: Any = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.19), "borderaxespad": 0.3}
        legend = axes.legend(handles.values(), handles.keys(), ncols=columns, **below)
        for line in legend.get_lines() if colors else ():
            line.set_color("0.3")


def _stack(axes: Axes, records: list[dict], curves: dict[str, str]) -> None:
    """Draw the curves as stacked bars: the parts belong to a step, not to the space between steps."""
    steps = [r for r in records if any(r.get(name) is not None for name in curves)]
    at, bottom = [r["step"] for r in steps], [0.0] * len(steps)
    for number, (name, label) in enumerate(curves.items()):
        values = [r.get(name) or 0.0 for r in steps]
        if any(values):
            color = _COLORS[number % len(_COLORS)]
            # Without an edge the background shows between bars.
            axes.bar(at, values, width=1.0, bottom=bottom, color=color, edgecolor=color, linewidth=0.4, label=label)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]


def curve(records: list[dict], path: Path) -> None:
    """Write a PNG file with the learning curve alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        picture = Figure(figsize=(7, 4), layout="constrained")
        draw(picture.subplots(), SECTIONS["Learning"][0], {"": records})
        save(picture, path)


def save(picture: Figure, path: Path) -> None:
    """Write a picture as PNG."""
    with files.replacing(path) as new:
        picture.savefig(new, dpi=110, format="png")


def percent(share: float | None) -> str:
    """Return a share as a text."""
    return "-" if share is None else f"{100 * share:.1f} %"


# What the summary shows as the mean over steps: label, metric, format.
_MEANS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("groups that teach nothing", "group/all_equal", percent),
    ("seconds per step", "timing_s/step", "{:.1f}".format),
    ("  rollout", "timing_s/gen", "{:.1f}".format),
    ("  update", "timing_s/update_actor", "{:.1f}".format),
    ("  weight sync", "timing_s/update_weights", "{:.2f}".format),
    ("rows per episode", "episode/rows", "{:.2f}".format),
    ("turns per episode", "episode/turns", "{:.1f}".format),
    ("prefix-cache hit rate", "engine/prefix_cache_hit_rate", percent),
    ("proxy overhead per call, ms", "proxy/overhead_ms", "{:.1f}".format),
    ("GPU busy", "gpu/busy", percent),
)


def summary(records: list[dict]) -> list[tuple[str, str]]:
    """Return a run's main figures as (label, value), from its records of metrics.jsonl."""
    steps = [r for r in records if "timing_s/step" in r]
    held_out = [(r["step"], resolve_rate(r, "val")) for r in records if has_validation(r)]
    ends = [*held_out[:1], *held_out[1:][-1:]]
    rows = [(f"held-out resolved, step {step}", percent(rate)) for step, rate in ends]
    rows.append(("steps", str(len(steps))))
    third = max(1, len(steps) // 3)
    for label, part in (("first", steps[:third]), ("last", steps[-third:])):
        if rates := [rate for r in part if (rate := resolve_rate(r, "train")) is not None]:
            rows.append((f"train resolved, {label} third", percent(statistics.fmean(rates))))
    for label, metric, form in _MEANS:
        if values := _values(steps, metric):
            rows.append((label, form(statistics.fmean(values))))
    if pearsons := _values(steps, "training/rollout_actor_probs_pearson_corr"):
        rows.append(("lowest rollout/trainer correlation", f"{min(pearsons):.4f}"))
    if failures := _values(steps, "infra/failures"):
        rows.append(("infrastructure failures", f"{sum(failures):.0f}"))
    return rows


def _values(records: list[dict], metric: str) -> list[float]:
    return [value for record in records if (value := record.get(metric)) is not None]


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ border-bottom: 1px solid #ddd; padding: .2rem .8rem; text-align: left; vertical-align: top }}
td:first-child {{ white-space: pre }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
img {{ max-width: 100% }}
pre {{ background: #f6f6f6; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def page(runs: Runs, picture: bytes, samples: Sequence[dict[str, Any]]) -> str:
    """Return the report as one HTML file. ``picture``: a PNG file. ``samples``: rows of ``rl.metrics.samples``."""
    image = base64.b64encode(picture).decode()
    summaries = {name: dict(summary(records)) for name, records in runs.items()}
    steps = {name: [r for r in records if "timing_s/step" in r] for name, records in runs.items()}
    last = {f"{name}, step {found[-1]['step']}": found[-1] for name, found in steps.items() if found}
    values = {
        name: {k: f"{v:.6g}" for k, v in sorted(record.items()) if k not in ("step", "time") and v is not None}
        for name, record in last.items()
    }
    body = [
        _table(summaries),
        f'<img alt="curves" src="data:image/png;base64,{image}">',
        f"<h2>Metrics of the last step</h2><details><summary>all of them</summary>{_table(values)}</details>",
    ]
    if samples:
        body += ["<h2>Episodes as they were played</h2>", *map(_sample, samples)]
    return _PAGE.format(title=html.escape(" and ".join(runs)), body="\n".join(body))


def _table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table of the columns, with a row for each name that occurs in any of them."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    head = "".join(f"<th>{html.escape(title)}" for title in ["", *columns])
    rows = "".join(
        f"<tr><td>{html.escape(name)}"
        + "".join(f'<td class="number">{html.escape(column.get(name, ""))}' for column in columns.values())
        + "\n"
        for name in names
    )
    return f"<table><tr>{head}\n{rows}</table>"


def _sample(one: dict[str, Any]) -> str:
    title = f"{one['task']}: {one['verdict']}, {one['split']} step {one['step']}, {one['turns']} turns"
    return (
        f"<details><summary>{html.escape(title)}</summary>"
        f"<pre>{html.escape(one['last messages'])}</pre><pre>{html.escape(one['patch'])}</pre></details>"
    )
