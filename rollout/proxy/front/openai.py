"""Write errors as both of OpenAI's APIs do, chat completions and Responses; no I/O."""

from __future__ import annotations

from typing import Any

from rollout.proxy.wire import RequestError

# The statuses that OpenAI has other ones for, and the codes of those whose code clients look at.
_STATUS = {529: 503}
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded", 503: "server_overloaded"}
# Clients know a full context by this code, or by these words.
_FULL_CODE = "context_length_exceeded"
_FULL_WORDS = "This model's maximum context length is exceeded: "


def failure(error: RequestError) -> dict[str, Any]:
    """Return what OpenAI's APIs say of an error."""
    status = _STATUS.get(error.status, error.status)
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    code = error.code or (_FULL_CODE if error.full else _CODES.get(status))
    said = f"{_FULL_WORDS}{error}" if error.full else str(error)
    return {"message": said, "type": kind, "param": None, "code": code}


def failed(error: RequestError) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    return _STATUS.get(error.status, error.status), {"error": failure(error)}
