"""The command ``python -m rollout.collect``: Claude Code on tasks, without training (docs/traces.md).

The program itself is ``rl.traces.collect.command``, because a config tells it what to do. In this package, only this
module, ``rollout.view`` and the command of ``rollout.records`` import ``rl``.
"""

import sys

from rl.traces.collect.command import main
from rollout import program

if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
