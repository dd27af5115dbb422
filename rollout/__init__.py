"""Episodes: a real Claude Code process on one task, its calls recorded as exact tokens."""
