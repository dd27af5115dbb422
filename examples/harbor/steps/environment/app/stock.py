"""What a shop has in stock."""


class Stock:
    """Numbers of articles by their names."""

    def __init__(self):
        self.numbers = {}

    def add(self, name, number):
        """Put articles of a name into the stock."""
        self.numbers[name] = number

    def take(self, name, number):
        """Take articles of a name out of the stock."""
        self.numbers[name] -= number
