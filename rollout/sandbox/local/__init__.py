"""Sandboxes of this machine's own directories and processes, isolated by bubblewrap where it works."""
