"""The front end for Anthropic's Messages API, whose requests need no translation; no I/O."""

from __future__ import annotations

from typing import Any

from rollout.proxy.front.base import Answer, Front, Translated
from rollout.proxy.replies import Reply, reply_events, reply_json, reply_start_event, sse
from rollout.proxy.tree import Tree
from rollout.proxy.wire import RequestError, WireRequest, decode_request


class _Answer(Answer):
    def whole(self, reply: Reply) -> Any:
        return reply_json(reply, self.model)

    def begin(self) -> bytes:
        # How many tokens another endpoint reads, it tells with its reply.
        return reply_start_event(self.id, self.model, self.input_tokens) if self.input_tokens else b""

    def ping(self) -> bytes:
        return sse("ping", {})

    def rest(self, reply: Reply) -> bytes:
        start = b"" if self.input_tokens else reply_start_event(self.id, self.model, reply.input_tokens)
        return start + reply_events(reply)

    def failed(self, error: RequestError) -> bytes:
        return sse("error", {"error": {"type": error.kind, "message": str(error)}})


class Messages(Front[WireRequest]):
    """Messages answers POST /v1/messages and /v1/messages/count_tokens."""

    name = ""

    def read(self, body: bytes, path: str) -> WireRequest:
        """Decode a body (``wire.decode_request``)."""
        return decode_request(body)

    def new_bytes(self, asked: WireRequest, known: Translated, tree: Tree) -> int:
        """Return 0."""
        return 0

    def wire(self, asked: WireRequest, known: Translated, tree: Tree) -> WireRequest:
        """Return the request as it is."""
        return asked

    def answer(self, asked: WireRequest, reply_id: str, input_tokens: int) -> Answer:
        """Return what writes the reply to a request."""
        return _Answer(reply_id, asked.model, input_tokens)

    def error(self, error: RequestError, asked: WireRequest | None = None) -> tuple[int, Any]:
        """Return the status and the body of an error."""
        return error.status, error.told

    def counted(self, tokens: int) -> Any:
        """Return the body of a count of tokens."""
        return {"input_tokens": tokens}


FRONT = Messages()
