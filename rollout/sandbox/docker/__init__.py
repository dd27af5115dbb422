"""Sandboxes in containers of Docker or podman."""
