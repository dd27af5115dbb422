"""Draw the curves of runs without any service.

    python -m rl.report RUN [RUN...] [--out PREFIX]

PREFIX.png has the panels of ``rl.metrics.panels``, drawn from the runs' metrics.jsonl. PREFIX.html has the same
picture, a summary, the last step's metrics and some episodes as they were played; it needs no other file. PREFIX is
RUN/report for one run, else ./report. A run may still be going on. Exit status: 0 done, 2 a run does not exist or has
no step yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.metrics.episodes import read_jsonl
from rl.metrics.report import SAMPLES, figure, page, save
from rollout import files, program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="where the two files go")
    args = parser.parse_args(arguments)
    directories = [*dict.fromkeys(directory.resolve() for directory in args.runs)]
    names = [f"{directory.parent.name} {directory.name}" for directory in directories]
    if len(set(names)) < len(names):
        names = [*map(str, directories)]
    runs = {name: read_jsonl(path / "metrics.jsonl") for name, path in zip(names, directories, strict=True)}
    for directory, records in zip(directories, runs.values(), strict=True):
        if not records:
            return program.failed(f"report: {directory}: no metrics.jsonl with a step in it; give run directories", 2)
    prefix = args.out or (directories[0] / "report" if len(directories) == 1 else Path("report"))
    png, page_path = prefix.with_name(f"{prefix.name}.png"), prefix.with_name(f"{prefix.name}.html")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    save(figure(runs), png)
    samples = [
        one
        for directory in directories
        for path in sorted((directory / "samples").glob("*"))
        for one in read_jsonl(path)
    ]
    text = page(runs, png.read_bytes(), sorted(samples, key=lambda one: one["step"])[-SAMPLES:])
    files.write(page_path, text)
    print(f"{png}\n{page_path}")
    return 0


if __name__ == "__main__":
    program.end(main)
