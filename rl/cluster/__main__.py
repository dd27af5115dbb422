"""Train on the nodes of a SLURM job (``rl.cluster.task``).

A signal at any instant must not kill it, so the handlers come before all other imports.
"""

from rl.cluster import early

if __name__ == "__main__":
    early.install()
    import sys

    from rl.cluster.task import main

    sys.exit(main())
