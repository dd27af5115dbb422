"""A plain vLLM server as an engine, over HTTP: with it the proxy also works outside of training."""

from __future__ import annotations

import uuid
from typing import Any

import aiohttp
import msgspec

from rollout.proxy.engine import Completion, EngineError, logprobs_of

# vLLM closes a connection after 5 s without use. One that is about to be closed must not be used again.
_KEEPALIVE_S = 3.0
_CONNECT_S = 10.0


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class VllmHttpEngine:
    """A VllmHttpEngine calls ``POST {base_url}/inference/v1/generate``, which works on token ids and never on text.

    ``model``: the name under which the server serves the model. ``key``: the server's ``--api-key``. ``sampling`` uses
    the names of vLLM's SamplingParams. For parameters that are not in it, vLLM's own defaults apply, not the model's
    generation_config.json; the server ignores names that it does not know.

    Logprobs are those of the distribution that was sampled from if the server runs with ``--logprobs-mode
    processed_logprobs`` (``processed`` asks it). With vLLM's default, raw_logprobs, they are the model's own, which are
    the same only at temperature 1 without top_p, top_k or penalties. At temperature 0 they are those of temperature 1
    in both modes; a completion says which they are. Hits of the prefix cache are known if it runs with
    ``--enable-prompt-tokens-details``. The versions of the weights are unknown.
    """

    def __init__(self, base_url: str, model: str, key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.known: bool | None = None  # what ``processed`` found
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Reply)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Implement Engine.generate. Cancelling closes the connection, which makes the server abort the request.

        Every failure is an EngineError whose message is one line: no connection, a status other than 200, a reply that
        the server aborted or that lacks logprobs.
        """
        body = {
            "request_id": f"{request_id}-{uuid.uuid4().hex}",
            "model": self.model,
            "token_ids": prompt_ids,
            # logprobs=0 is the sampled token's logprob and no others. Stop sequences may contain special tokens.
            "sampling_params": {**sampling, "n": 1, "logprobs": 0, "skip_special_tokens": False},
        }
        url = f"{self.base_url}/inference/v1/generate"
        try:
            async with self._session().post(url, data=msgspec.json.encode(body), headers=self._headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            message = " ".join(raw.decode("utf-8", "replace").split())
            raise EngineError(f"{url}: status {response.status}: {message[:300]}", response.status)
        try:
            reply = self._decoder.decode(raw)
            choice = reply.choices[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise EngineError(f"{url}: the reply is not one of this endpoint: {error}") from error
        ids = choice.token_ids or []
        tokens = (choice.logprobs.content if choice.logprobs else None) or []
        if choice.finish_reason not in ("stop", "length"):
            raise EngineError(f"{url}: the server ended the reply after {len(ids)} tokens ({choice.finish_reason})")
        if len(tokens) != len(ids):
            raise EngineError(f"{url}: the reply has {len(ids)} tokens but {len(tokens)} logprobs")
        details = reply.usage.prompt_tokens_details if reply.usage else None
        cached = details.cached_tokens if details else None
        logprobs = [token.logprob for token in tokens]
        return Completion(ids, logprobs, cached=cached, logprobs_of=logprobs_of(sampling, self.known))

    async def processed(self, prompt_ids: list[int]) -> bool:
        """Tell whether the server's logprobs are those of the distribution that is sampled from. Raises EngineError.

        With top_k=1, only one token can be sampled: its logprob is 0 in that distribution, hardly ever in the model's.
        """
        sampling = {"temperature": 1.0, "top_k": 1, "max_tokens": 8, "ignore_eos": True}
        self.known = not any((await self.generate("logprobs-mode", prompt_ids, sampling)).logprobs)
        return self.known

    async def close(self) -> None:
        """Close the connections to the server."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                # Every episode may have a connection: the server queues the requests.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                # A reply has no time limit; whoever owns the session decides when to cancel.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._http
