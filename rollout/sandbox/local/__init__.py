"""Sandboxes of directories and processes of this machine, isolated by bubblewrap where it works."""
