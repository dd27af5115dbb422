"""Ask a registry how large images are, without pulling them (the registry API, version 2).

Docker Hub counts such a question as a pull, so only a sample is asked about: `estimate`.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.sandbox.pulls import HUB, Pulls, split, with_tag

_INDEX = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFEST = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class TransferEstimate:
    """This is the size of images in bytes, compressed as in transfer, and how many of them were asked about."""

    compressed: int
    asked: int


def estimate(images: Sequence[str], ask: Callable[[str], dict[str, int]], sample: int = 20) -> TransferEstimate:
    """Estimate the size of images from a sample. A layer that several images of the sample share is counted only once.

    ask: returns the `layers` of an image. Raises OSError if not even one image can be asked about.
    """
    sizes: dict[str, int] = {}
    seen: Counter[str] = Counter()
    asked = 0
    for image in images[:: max(1, len(images) // sample)][:sample]:
        try:
            found = ask(image)
        except OSError:  # most likely the rate limit: what is known must do
            if not asked:
                raise
            break
        sizes |= found
        seen.update(found.keys())
        asked += 1
    shared = sum(size for digest, size in sizes.items() if seen[digest] > 1)
    own = sum(size for digest, size in sizes.items() if seen[digest] == 1)
    return TransferEstimate(shared + own * len(images) // max(asked, 1), asked)


def layers(image: str, pulls: Pulls) -> dict[str, int]:
    """Return the compressed size in bytes of each layer of an image, by digest. Blocks. Raises OSError."""
    host, path = split(pulls.address(image))
    name, _, reference = path.partition("@")
    if not reference:
        name, reference = with_tag(path)
    try:
        manifest = _get(host, name, reference)
        if "manifests" in manifest:
            of_platform = [
                one for one in manifest["manifests"] if one.get("platform", {}).get("architecture") == _MACHINE
            ]
            manifest = _get(host, name, (of_platform or manifest["manifests"])[0]["digest"])
        return {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    except (KeyError, IndexError, ValueError) as error:
        raise OSError(f"{image}: {host} gave no manifest that is understood: {error!r}") from error
    except OSError as error:
        raise OSError(f"{image}: {host}: {error}") from error


def _get(host: str, name: str, reference: str) -> Any:
    scheme = "http" if host.split(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{host}/v2/{name}/manifests/{reference}"
    headers = {"Accept": ", ".join((*_INDEX, *_MANIFEST))}
    try:
        return _json(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        challenge = error.headers.get("WWW-Authenticate", "")
    return _json(url, headers | {"Authorization": _authorized(challenge, _credentials(host))})


def _authorized(challenge: str, credentials: str | None) -> str:
    """Return the header that a registry's challenge asks for: the user's own credentials, or a token got with them."""
    basic = {"Authorization": f"Basic {credentials}"} if credentials else {}
    if not challenge.lower().startswith("bearer"):
        return basic.get("Authorization", "")
    given = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: given[key] for key in ("service", "scope") if key in given})
    answer = _json(f"{given['realm']}?{query}", basic)
    return f"Bearer {answer.get('token') or answer['access_token']}"


def _credentials(host: str) -> str | None:
    """Return what `docker login` has kept for a registry, where it keeps it in its own file."""
    file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
    try:
        known = json.loads(file.read_text()).get("auths", {})
    except (OSError, ValueError):
        return None
    names = ("https://index.docker.io/v1/", "docker.io") if host == HUB else (host, f"https://{host}")
    kept = next((known[name].get("auth") for name in names if name in known), None)
    return kept if kept and b":" in base64.b64decode(kept) else None


def _json(url: str, headers: dict[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
        return json.loads(answer.read())
