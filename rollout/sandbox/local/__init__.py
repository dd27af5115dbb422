"""This package makes sandboxes of directories and processes of this machine, isolated by bubblewrap."""
