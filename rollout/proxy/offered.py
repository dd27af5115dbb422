"""This module keeps the tools that an agent offered, for the record of its episode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from rollout.proxy.wire import RequestError

# A template need not write all of a tool into the prompt, so the token limits do not bound these.
_MOST_BYTES = 16 << 20


class Offered(dict[str, dict[str, Any]]):
    """An Offered holds every tool that was offered in a session, by its name, in its newest form."""

    _bytes = 0  # of all that were put here

    def offer(self, tools: Iterable[dict[str, Any]]) -> None:
        """Keep what is new. Raises RequestError if this makes all tools together too large; then nothing is kept."""
        named = {tool["function"]["name"]: tool for tool in tools}
        new = [tool for name, tool in named.items() if (known := self.get(name)) is not tool and known != tool]
        size = self._bytes + sum(len(msgspec.json.encode(tool)) for tool in new)
        if size > _MOST_BYTES:
            text = f"the tools of this session may have at most {_MOST_BYTES} bytes"
            raise RequestError(text, 413, "request_too_large")
        self._bytes = size
        self.update(named)
