"""Intervals of numbers, as pairs of start and end."""


def merge(intervals):
    """Return the union of intervals: sorted, and none touches another."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
