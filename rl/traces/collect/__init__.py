"""This package plays tasks without training and keeps all that an episode says (docs/traces.md)."""
