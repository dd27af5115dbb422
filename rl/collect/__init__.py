"""Collection: Claude Code on tasks without training, with everything that an episode says kept (docs/collect.md)."""
