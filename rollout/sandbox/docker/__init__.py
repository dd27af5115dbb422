"""This package makes sandboxes in containers of Docker or podman."""
