#!/bin/bash
for part in order lists; do
    python -m pytest -q -p no:cacheprovider /tests/test_lists.py -k "$part"
    declare "$part=$((! $?))"
done
echo "{\"reward\": $((order && lists)), \"order\": $order, \"lists\": $lists}" >/logs/verifier/reward.json
