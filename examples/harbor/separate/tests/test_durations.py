import pytest
from durations import seconds


@pytest.mark.parametrize("text", ["soon", "", "1x30s", "30s later", "h"])
def test_no_durations(text):
    with pytest.raises(ValueError):
        seconds(text)


def test_durations():
    assert [seconds(text) for text in ("5s", "1h30m", "2m2s")] == [5, 5400, 122]
