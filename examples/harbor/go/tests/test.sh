#!/bin/bash
cp /tests/lru_test.go .
go test ./...
if [ $? -eq 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
