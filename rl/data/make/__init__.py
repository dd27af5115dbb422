"""This package makes software tasks from a Python package's source distribution; `rl.data.make` is its command."""
