from lists import unique


def test_order():
    assert unique([3, 1, 3, 2]) == [3, 1, 2]


def test_lists():
    assert unique([[1], [1], []]) == [[1], []]
