import pytest
from stock import Stock


def test_what_is_added_is_added():
    stock = Stock()
    stock.add("tea", 2)
    stock.add("tea", 3)
    assert stock.numbers == {"tea": 5}


def test_no_more_is_taken_than_there_is():
    stock = Stock()
    stock.add("tea", 2)
    for name, number in (("tea", 3), ("coffee", 1)):
        with pytest.raises(ValueError):
            stock.take(name, number)
    stock.take("tea", 1)
    assert stock.numbers == {"tea": 1}
