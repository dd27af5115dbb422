"""Helpers for lists."""


def unique(items):
    """Return a list of the items, each once, in the order in which they came first."""
    return list(set(items))
