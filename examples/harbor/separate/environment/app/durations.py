"""Durations such as 1h30m."""

import re

UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text):
    """Return the seconds of a duration. Raises ValueError for what is none."""
    parts = re.findall(r"(\d+)([smh])", text)
    return sum(int(number) * UNITS[unit] for number, unit in parts)
