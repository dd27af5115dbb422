"""This module is the command ``python -m rollout.collect``: Claude Code on tasks, without training (docs/collect.md).

The program itself is ``rl.collect``, because it is told by a config what to do; nothing else here imports ``rl``.
"""

import sys

from rl.collect.__main__ import main
from rollout import program

if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
