"""One Ray cluster over the nodes of a job (``python -m rl.cluster`` under SLURM)."""
