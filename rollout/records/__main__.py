"""The program ``rollout.records`` shows records in a terminal; it is rl/view/terminal.py."""

from rl.view.terminal import main
from rollout import program

if __name__ == "__main__":
    program.end(main)
