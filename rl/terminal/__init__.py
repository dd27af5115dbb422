"""This package shows what was recorded of runs in a terminal, read-only: ``python -m rl.terminal RUN...``"""
