"""A LightningStore object in the same process, such as one in memory, for programs that have a store of their own.

    from agentlightning import InMemoryLightningStore
    store = InMemoryLightningStore()
    await send_all([Path("RUN")], LocalStore(store))

agentlightning is imported when the first span is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rl.traces.store.sending import send_all
from rl.traces.store.stores import StoredAttempt, place_of, places

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

__all__ = ["LocalStore", "send_all"]
_SPANS = 100  # that are added at once


class LocalStore:
    """A LocalStore is any ``agentlightning.LightningStore`` object. What it raises itself is not caught."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    async def known(self) -> dict[str, StoredAttempt]:
        """Implement Store.known."""
        return places([rollout.model_dump() for rollout in await self._store.query_rollouts()])

    async def has(self, rollout: str) -> bool:
        """Implement Store.has."""
        return await self._store.get_rollout_by_id(rollout) is not None

    async def start(self, rollout: Mapping[str, Any]) -> StoredAttempt:
        """Implement Store.start."""
        return place_of((await self._store.start_rollout(**rollout)).attempt.model_dump())

    async def again(self, rollout: str) -> StoredAttempt:
        """Implement Store.again."""
        return place_of((await self._store.start_attempt(rollout)).attempt.model_dump())

    async def add(self, spans: Iterable[Mapping[str, Any]]) -> None:
        """Implement Store.add."""
        from agentlightning.types import Span

        made = map(Span.model_validate, spans)
        while batch := list(itertools.islice(made, _SPANS)):
            await self._store.add_many_spans(batch)

    async def end(self, place: StoredAttempt, status: str, metadata: Mapping[str, Any]) -> None:
        """Implement Store.end."""
        ended: Any = status
        await self._store.update_attempt(place.rollout, place.attempt, status=ended, metadata=dict(metadata))
