"""The protocol of a LightningStore: what is asked of it, and what is raised when it does not do it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# Marks our rollouts among those of others, in their metadata.
SOURCE = "claude-code-rl"


class StoreError(Exception):
    """The store cannot be used now; the message is one line."""


class StoreRefusal(StoreError):
    """The store has answered, and has not taken what it was given."""


@dataclass
class StoredAttempt:
    """This is where an attempt is in the store. ``number``: counts from 1; ``ended``: whether all of it is there."""

    rollout: str
    attempt: str
    number: int
    ended: bool


class Store(Protocol):
    """A Store is a LightningStore, here or on a server. All methods raise StoreError."""

    async def known(self) -> dict[str, StoredAttempt]:
        """Return the last attempt of each of our episodes in the store, by the episode's name."""
        ...

    async def has(self, rollout: str) -> bool:
        """Tell whether the store has a rollout. A store that was started anew has lost all it had in memory."""
        ...

    async def start(self, rollout: Mapping[str, Any]) -> StoredAttempt:
        """Add a rollout with its first attempt. ``rollout``: its ``input``, ``mode`` and ``metadata``."""
        ...

    async def again(self, rollout: str) -> StoredAttempt:
        """Add an attempt to a rollout."""
        ...

    async def add(self, spans: Iterable[Mapping[str, Any]]) -> None:
        """Add spans in agentlightning's form. Those that are there already are left out."""
        ...

    async def end(self, place: StoredAttempt, status: str, metadata: Mapping[str, Any]) -> None:
        """End an attempt, ``succeeded`` or ``failed``."""
        ...


def places(rollouts: Iterable[Mapping[str, Any]]) -> dict[str, StoredAttempt]:
    """Return the last attempt of each of our episodes, by the episode's name. ``rollouts``: as JSON."""
    found = {}
    for rollout in rollouts:
        about, attempt = rollout.get("metadata") or {}, rollout.get("attempt")
        if about.get("source") == SOURCE and attempt:
            found[str(about.get("episode"))] = place_of(attempt)
    return found


def place_of(attempt: Mapping[str, Any]) -> StoredAttempt:
    """Return the place of an attempt, given as JSON."""
    ended = attempt["status"] in ("succeeded", "failed")
    return StoredAttempt(attempt["rollout_id"], attempt["attempt_id"], attempt["sequence_id"], ended)
