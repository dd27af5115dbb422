"""``python -m rollout.audit``: see the package."""

from rollout import program
from rollout.audit import main

program.end(main)
