"""This package has other models answer recorded states: preference pairs, data to distil (docs/traces.md)."""
