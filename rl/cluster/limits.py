"""Raise the limits of this process (ulimit) as far as a node allows, and say which stay low.

srun gives its tasks the soft limits of the shell in which ``sbatch`` was called, often a login node's 1024 open files.
"""

from __future__ import annotations

import resource
from pathlib import Path

_INFINIBAND = Path("/dev/infiniband")
_WANTED = {
    "n": (resource.RLIMIT_NOFILE, 16384, "Ray and the proxies of many episodes have as many files and sockets open"),
    "u": (resource.RLIMIT_NPROC, 16384, "Ray, the engines and the boxes have as many threads"),
}


def raise_limits() -> list[str]:
    """Raise soft limits to the hard ones, for this process and those it starts, and return a line for each low one."""
    low = []
    for letter, (kind, wanted, why) in _WANTED.items():
        if (hard := _raised(kind)) < wanted:
            low.append(f"ulimit -{letter} is {hard:.0f}, less than {wanted}: {why}; ask your site for a higher limit")
    if _raised(resource.RLIMIT_MEMLOCK) != float("inf") and _INFINIBAND.exists():
        low.append("ulimit -l is not unlimited: NCCL cannot use InfiniBand without it; ask your site")
    return low


def _raised(kind: int) -> float:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (hard, hard))
    return float("inf") if hard == resource.RLIM_INFINITY else hard
