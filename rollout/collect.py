"""This module is the command ``python -m rollout.collect``: Claude Code on tasks, without training (docs/traces.md).

The program itself is ``rl.collect``, because a config tells it what to do. In this package, only this module
and ``rollout.view`` import ``rl``.
"""

import sys

from rl.collect.__main__ import main
from rollout import program

if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
