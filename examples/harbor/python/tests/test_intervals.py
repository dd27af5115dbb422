from intervals import merge


def test_one_within_another():
    assert merge([(1, 10), (2, 3)]) == [(1, 10)]
    assert merge([(2, 3), (1, 10), (4, 12)]) == [(1, 12)]


def test_others():
    assert merge([(5, 6), (1, 3), (2, 4)]) == [(1, 4), (5, 6)]
