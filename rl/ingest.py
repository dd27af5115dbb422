"""Make states of recorded conversations, and training rows or evaluations of states. docs/traces.md

    python -m rl.ingest FORMAT PATH... --out FILE [--subagents] [--system FILE] [--tools FILE]
    python -m rl.ingest sft STATES|distill.jsonl|pairs.jsonl --tokenizer DIR --out ROWS.parquet [--max-tokens N]
    python -m rl.ingest evaluate STATES --url URL --model NAME --out DIR [--key-env VARIABLE]

FORMAT: claude-code (session files), openhands (output.jsonl, or folders with events/), swe-agent (.traj, SWE-smith's
rows, or mini-swe-agent's .traj.json), atif, or run (our own records). A PATH is a file or a folder. --system and
--tools give a system prompt (text) and tools (a JSON list) to conversations that do not name theirs. FILE ends in
.jsonl, .jsonl.zst (states files, in which each message is once) or .parquet (a row per state with all of its messages).
Exit status: 0 all was read, 1 something was not, 2 the command is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl.run.screen import Screen, ended
from rl.traces.ingest import states
from rl.traces.ingest.chat import tools_of
from rl.traces.ingest.lines import Findings
from rollout import program

FORMATS = ("claude-code", "openhands", "swe-agent", "atif", "run")  # each is read by the module of its name


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(program.plain(__doc__))
        return 0 if arguments else 2
    what, *rest = arguments
    programs = {name: functools.partial(read, name) for name in FORMATS} | {"sft": sft, "evaluate": evaluate}

    def work(screen: Screen) -> int:
        if what not in programs:
            raise ValueError(f"{what}: the first argument is one of {', '.join(programs)}")
        return programs[what](rest, screen)

    return ended("ingest", work, resumable=what == "evaluate")


def _parser(what: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python -m rl.ingest {what}", description=about, allow_abbrev=False)


def _findings(screen: Screen) -> Findings:
    def say(text: str) -> None:
        screen.clear()
        print(f"ingest: {text}", file=sys.stderr)

    return Findings(say, lambda read: screen.show("reading, MiB", read))


def read(format: str, arguments: Sequence[str], screen: Screen) -> int:
    """Write the states of recorded conversations; return the exit status. Raises OSError and ValueError."""
    parser = _parser(format, f"Write a state for each reply of conversations that are recorded in the format {format}.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--out", type=Path, required=True, help="states: .jsonl, .jsonl.zst or .parquet")
    parser.add_argument("--subagents", action="store_true", help="sub-agents' replies are states, too")
    parser.add_argument("--system", type=Path, help="a system prompt, for conversations without one: a text file")
    parser.add_argument("--tools", type=Path, help="tool definitions, for conversations without any: a JSON list")
    given = parser.parse_args(arguments)
    module = importlib.import_module(f"rl.traces.ingest.{format.replace('-', '_')}")
    system = given.system.read_text() if given.system else ""
    tools = tools_of(json.loads(given.tools.read_text())) if given.tools else []
    if given.tools and not tools:
        raise ValueError(f"--tools {given.tools}: a list of tool definitions is required, with a name each")
    with screen, states.writing(given.out, system, tools) as writer:
        findings = _findings(screen)
        for path in given.paths:
            try:
                if not path.exists():
                    raise FileNotFoundError("no such file or folder")
                module.ingest(path, writer, findings, given.subagents)
            except OSError as error:
                if error.errno is None or error.filename is not None:  # what is read; else the disk is full
                    findings.problem(str(path), error.strerror or error)
                else:
                    raise
    findings.counts["states whose model is not named: rl.teachers can't leave out its family"] += writer.unnamed
    findings.counts += Counter({f"replies left out: {why}": count for why, count in writer.left.items()})
    return _told(findings, f"{writer.states:>9,}  states in {given.out}", writer.states)


def _told(findings: Findings, made: str, count: int) -> int:
    """Print what was counted, and return the exit status."""
    for what, number in sorted((+findings.counts).items(), key=lambda one: (-one[1], one[0])):
        print(f"{number:>9,}  {what}")
    print(f"{findings.problems:>9,}  problems\n{made}")
    return 1 if findings.problems or not count else 0


def sft(arguments: Sequence[str], screen: Screen) -> int:
    """Write rows for fine-tuning, or pairs; return the exit status. Raises OSError and ValueError."""
    from rl.traces.ingest.sft import write

    about = "Write rows of token ids, one per conversation or line, as rl.sft takes them with data=[ROWS.parquet]."
    parser = _parser("sft", about)
    parser.add_argument("states", type=Path, metavar="FILE", help="states, or distill.jsonl or pairs.jsonl of teachers")
    parser.add_argument("--tokenizer", required=True, help="directory or hub name of the model that will be trained")
    parser.add_argument("--out", type=Path, required=True, help="rows: .parquet")
    parser.add_argument("--max-tokens", type=int, help="longer states are left out")
    given = parser.parse_args(arguments)
    with screen:
        findings = _findings(screen)
        show = functools.partial(screen.show, "rows")
        made = write(given.states, given.out, given.tokenizer, given.max_tokens, findings, show)
    note = "texts are encoded anew, so ids may differ from those that the recorded model has sampled"
    return _told(findings, f"{made:>9,}  rows in {given.out}; {note}", made)


def evaluate(arguments: Sequence[str], screen: Screen) -> int:
    """Ask a policy about recorded states; return the exit status. Raises OSError and ValueError."""
    from rl.traces.ingest.asking import key_of
    from rl.traces.ingest.endpoints import Endpoint
    from rl.traces.ingest.evaluate import evaluate as evaluate_states

    parser = _parser("evaluate", "Ask a policy for its reply to each state, and compare it with the recorded one.")
    parser.add_argument("states", type=Path, metavar="STATES", help="a states file: .jsonl or .jsonl.zst")
    parser.add_argument("--url", required=True, help="what /chat/completions (or /v1/messages) comes after")
    parser.add_argument("--model", required=True, help="the policy's name there")
    parser.add_argument("--protocol", choices=("chat", "messages"), default="chat")
    parser.add_argument("--key-env", help="the environment variable that has the key")
    parser.add_argument("--out", type=Path, required=True, help="directory of answers and results")
    parser.add_argument("--limit", type=int, help="only the first states")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a reply")
    parser.add_argument("--temperature", type=float, help="default: the server's")
    given = parser.parse_args(arguments)
    names = ("url", "model", "protocol", "concurrency", "max_tokens", "temperature")
    about = {name: getattr(given, name) for name in names}
    endpoint = Endpoint("policy", key=key_of(given.key_env), **about)
    return evaluate_states(given.states, endpoint, given.out, given.limit, screen)


if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
