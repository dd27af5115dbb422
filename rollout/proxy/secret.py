"""Session secrets that prove by themselves that this process issued them.

A secret is ``ID.MAC``: a random id and its message authentication code. The holder of a closed session's secret can be
told that it is closed (410) without a list of all closed sessions, and a guess is refused before anything is looked up.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_KEY = secrets.token_bytes(32)


def issue() -> str:
    """Make a new secret: 128 random bits and a code of 192 bits, in characters that are allowed in a header."""
    session_id = secrets.token_hex(16)
    return f"{session_id}.{_mac(session_id.encode())}"


def issued(secret: str) -> bool:
    """Tell whether ``secret`` came from ``issue``. All wrong secrets of one length take the same time."""
    # aiohttp represents header values that are not UTF-8 with surrogates.
    session_id, _, mac = secret.encode("utf-8", "surrogateescape").rpartition(b".")
    return hmac.compare_digest(_mac(session_id).encode(), mac)


def _mac(session_id: bytes) -> str:
    return hashlib.blake2b(session_id, key=_KEY, digest_size=24).hexdigest()
