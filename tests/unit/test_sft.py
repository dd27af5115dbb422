"""Token rows are used as they are, and bad ones are refused."""

from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from rl.tune.rows import TokenRows


def rows(tmp_path, *pairs) -> TokenRows:
    table = pyarrow.table({"input_ids": [p[0] for p in pairs], "loss_mask": [p[1] for p in pairs]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    return TokenRows(str(tmp_path / "rows.parquet"), None, SimpleNamespace(max_length=4))


def test_ids_and_masks_come_back_unchanged(tmp_path):
    data = rows(tmp_path, ([5, 6, 7], [0, 0, 1]), ([9, 9], [0, 1]))
    assert len(data) == 2
    item = data[0]
    assert item["input_ids"].tolist() == [5, 6, 7]
    assert item["loss_mask"].tolist() == [0, 0, 1]
    assert item["position_ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [([1] * 5, [0] * 5, "5 tokens"), ([], [], "0 tokens"), ([1, 2], [0], "mask of 1"), ([1, 2], [1, 1], "first")],
)
def test_bad_rows_are_named(tmp_path, ids, mask, says):
    with pytest.raises(ValueError, match=f"row 0: .*{says}"):
        rows(tmp_path, (ids, mask))
