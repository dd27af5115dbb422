from stock import Stock


def test_what_is_added_is_added():
    stock = Stock()
    stock.add("tea", 2)
    stock.add("tea", 3)
    assert stock.numbers == {"tea": 5}
