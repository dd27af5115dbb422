"""Look at runs in the terminal: tasks, their episodes, what was said, tokens. Nothing is written.

    python -m rl.terminal RUN...

RUN is the directory of a training run, an evaluation, a collection or a selection, or one record file. A run may still
be going on: r reads again what there is.

    enter        opens what the line is about: run, task, episode, a reply's tokens
    escape       goes back
    home, end    go to the first and the last line
    /            of a list: shows the lines with these words, and with such figures: turns>20 step=3 resolved
                 of an episode or of tokens: finds the words in a line; n and N go to the next and the previous one
    l            of tokens: goes to the least probable one, then to the next
    q            ends

Exit status: 0 done, 2 a RUN does not exist, or this is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout import program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.terminal", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, or record files")
    args = parser.parse_args(arguments)
    for run in args.runs:
        if not run.exists():
            print(f"terminal: {run}: no such run directory or record file", file=sys.stderr)
            return 2
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("terminal: this is no terminal; python -m rollout.records prints what is in a RUN", file=sys.stderr)
        return 2
    from rl.terminal.screens import Browser

    Browser(list(dict.fromkeys(args.runs))).run()
    return 0


if __name__ == "__main__":
    program.end(main)
