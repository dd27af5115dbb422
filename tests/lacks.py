"""This module says what tests do that need a program which the machine does not have."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

LACKS = "this machine lacks: "
SLURM = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")


def lacks(words: str) -> NoReturn:
    """Skip the test; fail it in continuous integration, which installs what tests need."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{LACKS}{words}")


def slurm_problem() -> str:
    """Why no SLURM can be started here, "" if one can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in SLURM if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm)"
    return "" if os.getuid() == 0 else "slurmd needs root"
