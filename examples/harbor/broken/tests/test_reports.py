from reports import percent


def test_two_digits():
    assert percent(1, 3) == 33.33
