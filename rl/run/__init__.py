"""This package looks after one training run: its directory, checkpoints, signals, deaths and progress on the screen."""
