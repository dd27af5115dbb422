import pytest
from roman import number


def test_sums():
    assert [number(text) for text in ("III", "XVI", "MDCLXVI")] == [3, 16, 1666]


def test_differences():
    assert [number(text) for text in ("XIV", "XC", "MCMXCIV")] == [14, 90, 1994]


def test_lower_case():
    assert number("xvi") == 16


@pytest.mark.parametrize("text", ["", "XA", "16"])
def test_others(text):
    with pytest.raises(ValueError):
        number(text)
