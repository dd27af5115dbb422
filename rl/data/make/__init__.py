"""Software tasks made from a Python package's source distribution; `rl.data.make` is the command for it."""
