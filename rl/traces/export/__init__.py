"""Export episodes as data in other programs' formats (docs/traces.md)."""
