"""This module has command lines of evaluations, for tests."""

# An endpoint that does not answer.
HOSTED = ["endpoint=http://127.0.0.1:9", "protocol=messages", "model=m"]
