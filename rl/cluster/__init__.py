"""This package makes one Ray cluster of the nodes of a job (``python -m rl.cluster`` under SLURM)."""
