"""This package exports episodes as data in other programs' formats (docs/traces.md)."""
