"""Pulling images: from where, and how long a pull waits for a registry that refuses for now."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FIRST_S, _LONGEST_S = 15.0, 600.0
_FOR_NOW = re.compile(
    r"toomanyrequests|too many requests|rate limit|\b429\b|\b50[0234]\b|time-?out|timed out|connection re(set|fused)"
    r"|unexpected EOF|TLS handshake|temporary failure|try again",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Pulls:
    """These values say how images are pulled.

    mirror: a registry, perhaps with a path, that has Docker Hub's images under their own names; None: Docker Hub.
    patience_s: seconds that a pull may wait in all for a registry that refuses for now.
    """

    mirror: str | None = None
    patience_s: float = 0.0

    def address(self, image: str) -> str:
        """Return the name to pull an image by: the mirror's for a tag of Docker Hub, if there is one; else its own."""
        host, path = split(image)
        if self.mirror is None or host != HUB or "@" in path:
            return image
        return f"{self.mirror.rstrip('/')}/{path}"

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait before each further try, until there is no patience left."""
        left, wait = self.patience_s, _FIRST_S
        while left > 0:
            yield min(wait, left)
            left, wait = left - wait, min(2 * wait, _LONGEST_S)


HUB = "registry-1.docker.io"


def split(image: str) -> tuple[str, str]:
    """Return an image's registry and the rest of its name, in full: ("registry-1.docker.io", "library/python:3.11")."""
    first, slash, rest = image.partition("/")
    if slash and (re.search(r"[.:]", first) or first == "localhost"):
        host, path = first, rest
    else:
        host, path = "docker.io", image
    if host in ("docker.io", "index.docker.io", HUB):
        host, path = HUB, path if "/" in path else f"library/{path}"
    return host, path


def with_tag(image: str) -> tuple[str, str]:
    """Return an image's name and its tag, "latest" if it names none."""
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")


def refused_for_now(error: str) -> bool:
    """Return whether an error says that the same pull may succeed later: rate limits, and registries in trouble."""
    return _FOR_NOW.search(error) is not None
