"""Front ends: the APIs in which agents can speak to the proxy. Each is loaded at the first request of its API."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from rollout.proxy.front.base import Front

# Where each API is served, and the module that answers it.
PATHS = {
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "responses",
    "/v1beta/models/{call:.+}": "gemini",
    "/v1/models/{call:.+}": "gemini",
}
# The beginnings of the paths whose errors are not in the form of Anthropic's.
_FORMS = {"/v1/chat": "chat", "/v1/responses": "responses", "/v1beta": "gemini", "/v1/models": "gemini"}
# How the paths end that count tokens.
_COUNT = ("/count_tokens", "/input_tokens", ":countTokens")


def front_of(path: str, method: str = "POST") -> Front[Any]:
    """Return the front end that answers requests to a path, if only with an error."""
    if method == "GET":  # lists of models, which only Gemini's clients ask for elsewhere than others
        return _load("gemini" if path.startswith("/v1beta") else "messages")
    name = PATHS.get(path) or next((name for begins, name in _FORMS.items() if path.startswith(begins)), "messages")
    return _load(name)


def route_of(path: str) -> str:
    """Return where a path is served, "other" for those that are not: there is an endless number of them."""
    if path in PATHS:
        return path
    return next((at for at in PATHS if "{" in at and path.startswith(at.partition("{")[0])), "other")


def counts(path: str) -> bool:
    """Tell whether a path counts the tokens of a prompt."""
    return path.endswith(_COUNT)


@functools.cache
def _load(name: str) -> Front[Any]:
    return importlib.import_module(f"rollout.proxy.front.{name}").FRONT
