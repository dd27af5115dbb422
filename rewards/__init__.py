"""Rewards turn a patch into a verdict: the task's hidden tests judge it in a fresh box."""
