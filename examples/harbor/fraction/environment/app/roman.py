"""Roman numbers."""

VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def number(text):
    """Return the number that a text of Roman digits stands for. Raises ValueError for other texts."""
    return sum(VALUES[digit] for digit in text)
