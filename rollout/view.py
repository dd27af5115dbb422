"""The command ``python -m rollout.view``: a local web page over runs' records (docs/records.md).

The program itself is ``rl.view``, because it shows figures and panels of runs. In this package, only this module,
``rollout.collect`` and the command of ``rollout.records`` import ``rl``.
"""

from rl.view.command import main
from rollout import program

if __name__ == "__main__":
    program.end(main)
