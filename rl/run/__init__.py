"""One training run: its directory and checkpoints, how it is watched, and how it ends."""
