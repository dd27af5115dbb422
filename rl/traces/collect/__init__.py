"""Play tasks without training, and keep all that an episode says (docs/traces.md)."""
