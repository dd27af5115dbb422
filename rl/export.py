"""Export episodes to the formats of other programs. docs/traces.md

    python -m rl.export FORMAT RUN... --out DIR [options] [key=value ...]

RUN is the directory of a training run, an evaluation, a collection or a selection, one record file, or a states file of
rl.ingest (.jsonl, .jsonl.zst), which has other programs' conversations. Episodes in which the audit finds something, or
that the infrastructure failed (but for inspect), are not exported; choose others with rl.data.select first (--resolved,
for fine-tuning). key=value changes train.yaml of the formats for LLaMA-Factory.

{formats}

Exit status: 0 something was exported, 1 nothing was or the disk failed, 2 the input or the options are wrong, 130
interrupted. A command that fails leaves nothing, and an export that was there as it was.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rl.config.compose import ConfigError
from rl.data.choice import ChoiceRules, choose
from rl.data.select import inside, status_of
from rl.run.screen import Screen
from rl.traces.export import atif, inspect_log, llamafactory, swesmith, trl, whole
from rl.traces.export.sink import ABOUT, ExportError, Sink, sink
from rl.traces.export.source import KINDS, ExportSource
from rl.traces.ingest import recorded
from rl.traces.ingest.states import StatesError
from rollout import program


class ExportFormat(NamedTuple):
    """A format is a line about it, what writes it, of LLaMA-Factory's the stage of the training, and whether it has a
    place for episodes that the infrastructure failed."""

    about: str
    write: Callable[[ExportSource, Sink], None]
    stage: str = ""
    failed: bool = False


FORMATS = {
    "messages": ExportFormat("a line per conversation: messages and tools in OpenAI's form", trl.write_messages),
    "llamafactory": ExportFormat("LLaMA-Factory: sharegpt with tools", llamafactory.write_sharegpt, "sft"),
    "llamafactory-dpo": ExportFormat(
        "LLaMA-Factory: ranking, a resolved and an unresolved one", llamafactory.write_ranking, "dpo"
    ),
    "swesmith-xml": ExportFormat("SWE-smith and SWE-agent: ft_xml.jsonl", swesmith.write),
    "trl": ExportFormat("TRL: messages and tools", trl.write_trl),
    "trl-prompt-completion": ExportFormat("TRL: a row per reply", trl.write_prompt_completion),
    "trl-preference": ExportFormat("TRL: pairs of a resolved and an unresolved one", trl.write_preference),
    "atif": ExportFormat("ATIF v1.8: a trajectory per episode, with token ids and logprobs", atif.write),
    "inspect": ExportFormat("Inspect's viewer: logs with a sample per episode", inspect_log.write, failed=True),
    "sessions": ExportFormat(
        "Claude Code's own session files, for the Hugging Face Hub's viewer", whole.write_sessions
    ),
    "predictions": ExportFormat("patches for sb-cli and swebench: preds.json", whole.write_predictions),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = _parser().parse_intermixed_args(arguments)  # key=value may follow options
    return status_of(lambda screen: _export(args, screen), ConfigError, ExportError, StatesError)


def _export(args: argparse.Namespace, screen: Screen) -> int:
    kind = FORMATS[args.format]
    runs = [Path(one) for one in args.runs if "=" not in one or Path(one).exists()]
    overrides = [one for one in args.runs if "=" in one and not Path(one).exists()]
    if not runs:
        raise ExportError("no RUN is given")
    if overrides and not kind.stage:
        raise ExportError(f"{overrides[0]}: neither a run nor, with {args.format}, a key of train.yaml")
    if inside(args.out, runs):
        raise ExportError(f"--out {args.out} is inside of a RUN; name another one")
    if kind.stage:  # a wrong key is told before anything is read
        llamafactory.training(overrides, kind.stage, args.name or "episodes", args.out, "")
    mode = "overwrite" if args.overwrite else "append" if args.append else "new"
    with sink(args.out, args.format, mode) as out, tempfile.TemporaryDirectory(prefix="rl-export-") as scratch:
        runs = [_recorded(run, Path(scratch) / f"{number}" / run.name) for number, run in enumerate(runs)]
        chosen = choose(
            runs, ChoiceRules(), lambda done, total: screen.show("reading", done >> 20, total >> 20, "MiB"), kind.failed
        )
        source = ExportSource(chosen, args.threads, not args.no_thinking, args.name, out.known)
        source.progress = lambda done, total: screen.show("exporting", done, total)
        kind.write(source, out)
        if not source.exported:
            _tell(source, screen)
            known = source.skip and not source.entries()
            why = "all episodes were exported before" if known else "no episode could be exported"
            raise ExportError(f"{why}; nothing was written")
        if kind.stage:
            model = _model(source, overrides)
            out.text("train.yaml", llamafactory.training(overrides, kind.stage, source.data_set, args.out, model))
        out.text(ABOUT, json.dumps(_about(args, source, out), indent=1) + "\n")
    screen.clear()
    _tell(source, screen)
    for name, count in out.rows.items():
        screen.print(f"{count:>7} in {args.out / name}")
    if kind.stage:
        screen.next(("train", f"llamafactory-cli train {args.out / 'train.yaml'}"))
    return 0


def _model(source: ExportSource, overrides: Sequence[str]) -> str:
    """Return the model that played, which is the one to train. Raises ExportError if there are several."""
    played = {one.facts["model"] for one in source.chosen.entries}
    if len(played) > 1 and not any("model_name_or_path=" in text for text in overrides):
        raise ExportError(f"{len(played)} models have played; say with model_name_or_path=MODEL which is to be trained")
    return played.pop()


def _recorded(run: Path, scratch: Path) -> Path:
    """Return a run; of a states file, what is made of it."""
    return recorded.write(run, scratch) if run.is_file() and run.name.endswith((".jsonl", ".zst")) else run


def _tell(source: ExportSource, screen: Screen) -> None:
    screen.clear()
    for finding in (*source.chosen.damage, *source.left_out):
        print(f"left out: {finding}", file=sys.stderr)
    for rule, count in source.chosen.taken:
        if count:
            screen.print(f"{count:>7} episodes not exported: {rule}")
    before = len(source.chosen.entries) - len(source.entries())
    if before:
        screen.print(f"{before:>7} episodes were exported before")
    done = set(source.exported)
    unresolved = sum(
        e.facts["episode"] in done and not (e.facts["resolved"] or e.facts["infra"]) for e in source.chosen.entries
    )
    screen.print(f"{len(done):>7} episodes exported, {unresolved} of them unresolved")


def _about(args: argparse.Namespace, source: ExportSource, out: Sink) -> dict[str, object]:
    return {
        "format": args.format,
        "runs": [str(Path(one).resolve()) for one in args.runs if Path(one).exists()],
        "threads": args.threads,
        "thinking": not args.no_thinking,
        "rows": dict(out.rows),
        "left_out": [*source.chosen.damage, *source.left_out],
        "exported": sorted({*out.known, *source.exported}),
        "versions": {"claude-code-rl": version("claude-code-rl")},
    }


def _parser() -> argparse.ArgumentParser:
    formats = "\n".join(f"    {name:<22} {one.about}" for name, one in FORMATS.items())
    parser = program.parser("python -m rl.export", (__doc__ or "").format(formats=formats))
    add = parser.add_argument
    add("format", choices=FORMATS, metavar="FORMAT", help="one of the above")
    add("runs", nargs="+", metavar="RUN", help="directory of a run, or one record file")
    add("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--overwrite", action="store_true", help="replace DIR if it is an export")
    either.add_argument("--append", action="store_true", help="add the episodes that DIR does not have")
    text = "conversations: the main one, also those of sub-agents, or also side calls (default: %(default)s)"
    add("--threads", choices=KINDS, default="agents", help=text)
    add("--no-thinking", action="store_true", help="leave thinking out")
    add("--name", default="", help="of LLaMA-Factory's data set, or the model's in rows and predictions")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(main)
