"""Numbers for reports."""


def percent(part, whole):
    """Return how much of the whole a part is, in percent."""
    return 100 * part / whole
