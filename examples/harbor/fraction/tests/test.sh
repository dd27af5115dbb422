#!/bin/bash
passed=0
for part in sums differences lower_case others; do
    python -m pytest -q -p no:cacheprovider "/tests/test_roman.py::test_$part" && passed=$((passed + 1))
done
python -c "print($passed / 4)" >/logs/verifier/reward.txt
