"""The stand-alone proxy: a program of its own, between any Claude Code, or another agent, and any vLLM server.

Nobody opens sessions here, so a session is identified by what a request carries: the client's token and its agent's
session (a header, or else what the body says of it). A session is opened at its first request. It is closed when
it has been idle for long or its memory is needed; if its client comes back, the conversation is encoded anew.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import hmac
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from rollout.proxy.engine import Engine, EngineError
from rollout.proxy.garbage import collect_rarely, keep_imports
from rollout.proxy.messages import RequestError
from rollout.proxy.metrics import Metrics
from rollout.proxy.server import Handler, ProxyServer, token_of
from rollout.proxy.session import Policy, Session
from rollout.proxy.vllm_http import VllmHttpEngine

log = logging.getLogger("rollout.proxy")

# If all sessions together hold more tokens than this, the least recently used are closed. 1e7 tokens are about 400 MB.
_HELD_TOKENS = 20_000_000
# A session that holds more tokens than this is replaced by a new one at its next request. All clients that do not say
# who they are share one session, which would otherwise grow for ever.
_SESSION_TOKENS = 5_000_000
# A session of more calls than this is, too. What was asked for is kept also of calls that were given up.
_SESSION_CALLS = 20_000
# The most bytes of the bodies of all requests in progress, beyond which no large one is read.
_BODIES = 1 << 30
_SWEEP_S = 30.0
_RETRY_S = 2.0
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ProxyOptions:
    """ProxyOptions are the command-line options of the stand-alone proxy.

    ``engine``: the URL of a vLLM server. ``model``: the directory or hub name of its tokenizer, config and chat
    template. ``tool_parser`` and ``reasoning_parser``: vLLM's names. ``token``: the only one that is accepted; None
    accepts all. ``idle_s``: seconds after which an unused session is closed. ``max_sessions``: how many are kept.
    ``grace_s``: seconds that calls in progress have to end at shutdown. ``engine_key``: the server's ``--api-key``.
    """

    engine: str
    model: str
    tool_parser: str
    reasoning_parser: str | None = None
    any_family: bool = False
    token: str | None = None
    idle_s: float = 3600.0
    max_sessions: int = 256
    grace_s: float = 30.0
    engine_key: str | None = None


# The headers in which Claude Code and Codex name their session.
_SESSION_HEADERS = ("X-Claude-Code-Session-Id", "session-id")
# What may name a session: Claude Code's ids do.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


class EngineRefused(Exception):
    """The engine answers, but not as a vLLM server that lets us in; the message is one line that says what to do."""


class _Metadata(msgspec.Struct):
    user_id: str = ""


class _Owner(msgspec.Struct):
    metadata: _Metadata | None = None
    prompt_cache_key: str | None = None  # OpenAI's APIs
    user: str | None = None


_KEY = web.RequestKey("key", bytes)  # identifies the session that a request uses
_owner = msgspec.json.Decoder(_Owner)


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int
    root: str = ""  # the directory or hub name that the server was started with


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class StandAlone(ProxyServer):
    """A StandAlone opens sessions as requests need them. It answers calls with 529 until ``load`` has returned.

    ``keep`` is called in a thread with each session that was closed. It may raise OSError.
    """

    def __init__(
        self, options: ProxyOptions, *, ping_s: float = 5.0, keep: Callable[[Session], None] | None = None
    ) -> None:
        super().__init__(ping_s=ping_s, metrics=Metrics())
        self.options = options
        self._keep = keep
        self._keeping: set[asyncio.Task[None]] = set()
        self.held = 0  # bytes of the bodies of requests in progress
        self.policy: Policy | None = None
        self.model = _ListedModel(options.model, 0)  # replaced by what the engine says
        self.problem = ""  # why the engine could not be asked yet
        self._keys: dict[bytes, Session] = {}  # the least recently used first
        self._used: dict[bytes, float] = {}
        self._in_use: Counter[bytes] = Counter()
        self._http: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.app.middlewares.append(self._held)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{name:.+}", self._models)
        self.app.router.add_get("/v1beta/models", self._gemini_models)
        self.app.router.add_get("/v1beta/models/{name:.+}", self._gemini_models)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen as ProxyServer does, and begin to close idle sessions."""
        key = self.options.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=headers)
        await super().start(host, port)
        self._tasks.add(asyncio.create_task(self._sweep()))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop as ProxyServer does, and close the connections to the engine."""
        await super().stop(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._keeping)
        if self.policy is not None and isinstance(self.policy.engine, VllmHttpEngine):
            await self.policy.engine.close()
        if self._http is not None:
            await self._http.close()

    async def close_session(self, session: Session) -> None:
        """Close a session as ProxyServer does, and begin to keep it. ``stop`` waits until all are kept."""
        known = session.secret in self.sessions
        await super().close_session(session)
        if known and self._keep is not None:
            # Nobody may wait for a disk here: who closes sessions counts on nothing happening in between.
            self._keeping.add(task := asyncio.create_task(self._kept(session, self._keep)))
            task.add_done_callback(self._keeping.discard)

    async def _kept(self, session: Session, keep: Callable[[Session], None]) -> None:
        try:
            await asyncio.to_thread(keep, session)
        except OSError as error:
            self._log.error("session %s is not recorded: %s", session.episode_id, error)
        except Exception as error:  # a bug, which must not keep the others from being recorded
            self._log.error("session %s is not recorded", session.episode_id, exc_info=error)

    async def load(self) -> None:
        """Wait until the engine answers and everything that is slow to import is imported (tens of seconds).

        The port answers meanwhile. Raises EngineRefused, and what the tokenizer, parser and renderer raise for an
        unknown model.
        """
        parts = asyncio.create_task(_in_daemon(lambda: load_policy(self.options)))
        try:
            while problem := await self._ask_engine():
                if problem != self.problem:
                    log.warning("waiting for the engine: %s/v1/models: %s", self.options.engine, problem)
                self.problem = problem
                if parts.done():
                    parts.result()
                await asyncio.sleep(_RETRY_S)
            self.problem = ""
            make = await parts
        finally:
            parts.cancel()
        keep_imports()
        collect_rarely()
        engine = VllmHttpEngine(self.options.engine, self.model.id, self.options.engine_key)
        policy = make(engine, self.model.max_model_len)
        await self._check_logprobs(engine, policy)
        self.policy = policy

    async def _check_logprobs(self, engine: VllmHttpEngine, policy: Policy) -> None:
        """Warn if the recorded logprobs would not be those of the distribution that replies are sampled from."""
        try:
            processed = await engine.processed(policy.renderer.start([{"role": "user", "content": "Hello"}], []))
        except EngineError as error:
            log.warning("could not find out what the server's logprobs are: %s", error)
            return
        if not processed:
            log.warning(
                "%s returns the model's own logprobs, not those of the distribution that it samples from; if you use "
                "recorded logprobs, start it with --logprobs-mode processed_logprobs",
                self.options.engine,
            )

    async def _ask_engine(self) -> str:
        """Ask for the engine's name of the model and its longest context. Return why it is to be asked again, or "".

        Clients are told that, too (``_health``), so it does not name the engine's address. Raises EngineRefused if
        asking again will not help.
        """
        assert self._http is not None
        url = f"{self.options.engine}/v1/models"
        try:
            async with self._http.get(url) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"unreachable ({type(error).__name__})"
        if response.status in (401, 403):
            known = "the one in ROLLOUT_ENGINE_KEY is wrong" if self.options.engine_key else "set ROLLOUT_ENGINE_KEY"
            raise EngineRefused(f"{url}: status {response.status}: it wants its --api-key; {known}")
        if response.status == 404:
            raise EngineRefused(f"{url}: status 404: --engine is the address of a vLLM server, without /v1")
        if response.status != 200:
            return f"status {response.status}"
        try:
            models = msgspec.json.decode(raw, type=_Models).data
        except msgspec.MsgspecError as error:
            raise EngineRefused(f"{url}: this is not the answer of a vLLM server: {error}") from error
        if not models:
            return "it serves no model"
        wanted = self.options.model.rstrip("/")
        own = [model for model in models if wanted in (model.id, model.root)]
        self.model = own[0] if own else models[0]
        if not own:
            log.warning(
                "the engine serves %s and not --model %s; if it is another model, all that it gets are wrong tokens",
                self.model.id if self.model.root in ("", self.model.id) else f"{self.model.id} ({self.model.root})",
                wanted,
            )
        return ""

    async def receive(self, request: web.Request) -> tuple[Session, bytes]:
        """Return the session that a request belongs to, opened if needed, and the body. Raises RequestError."""
        token = self._authenticate(request)
        if self.policy is None:
            raise RequestError("the proxy is loading its model's tokenizer", 529, "overloaded_error")
        body = await self.body(request, self, _BODIES)
        named = (request.headers[name] for name in _SESSION_HEADERS if name in request.headers)
        owner = next(named, "") or _owner_in(body)
        key = hashlib.blake2b(f"{token}\0{owner}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._in_use[key] += 1
        request[_KEY] = key
        session = self._keys.pop(key, None)
        full = session is not None and (
            session.tree.tokens > _SESSION_TOKENS or session.counters.calls > _SESSION_CALLS
        )
        if session is not None and full and self._in_use[key] == 1:
            await self.close_session(session)
            session = None
        opened = session is None
        if session is None:
            name = owner if _NAME.fullmatch(owner) else key.hex()
            session = await self.open_session(name, self.policy)
        self._keys[key] = session
        self._used[key] = time.monotonic()
        if opened:
            await self._make_room()
        return session, body

    def _authenticate(self, request: web.Request) -> str:
        """Return the token that came with a request. Raises RequestError if it is not the one that is accepted."""
        given = token_of(request)
        wanted = self.options.token
        if wanted is not None and not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode()):
            raise RequestError("this is not the proxy's token", 401, "authentication_error")
        return given

    @web.middleware
    async def _held(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Mark the session of a request as no longer in use when the request ends (see ``receive``)."""
        try:
            return await handler(request)
        finally:
            if (key := request.get(_KEY)) is not None:
                self._in_use[key] -= 1
                if not self._in_use[key]:
                    del self._in_use[key]

    async def _make_room(self) -> None:
        """Close the least recently used sessions, except those in use, until no limit is exceeded."""
        held = sum(session.tree.tokens for session in self._keys.values())
        for key, session in list(self._keys.items()):
            if len(self._keys) <= self.options.max_sessions and held <= _HELD_TOKENS:
                break
            if not self._in_use[key]:
                held -= session.tree.tokens
                await self._drop(key)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.options.idle_s))
            old = time.monotonic() - self.options.idle_s
            for key in [key for key, used in self._used.items() if used < old and not self._in_use[key]]:
                await self._drop(key)
            await self._make_room()

    async def _drop(self, key: bytes) -> None:
        del self._used[key]
        await self.close_session(self._keys.pop(key))

    async def _models(self, request: web.Request) -> web.Response:
        name = self.model.id
        model: dict[str, Any] = {"type": "model", "id": name, "display_name": name}
        model |= {"created_at": "1970-01-01T00:00:00Z"}
        model |= {"object": "model", "created": 0, "owned_by": "vllm"}  # as OpenAI's clients want it
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return self._model_or_list(request, model, listed)

    async def _gemini_models(self, request: web.Request) -> web.Response:
        name = self.model.id
        model: dict[str, Any] = {"name": f"models/{name}", "displayName": name}
        model |= {"inputTokenLimit": self.model.max_model_len}
        model |= {"supportedGenerationMethods": ["generateContent", "countTokens"]}
        return self._model_or_list(request, model, {"models": [model]})

    def _model_or_list(self, request: web.Request, model: dict[str, Any], listed: dict[str, Any]) -> web.Response:
        """Answer with the model, if a request names it, or with the list. Raises RequestError."""
        self._authenticate(request)
        asked = request.match_info.get("name")
        if asked not in (None, self.model.id):
            raise RequestError("there is no model of this name", 404, "not_found_error")
        return web.json_response(listed if asked is None else model)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 if a call would be answered now, else 503 with what is missing."""
        assert self._http is not None
        try:
            async with self._http.get(f"{self.options.engine}/health") as response:
                engine = "ok" if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            engine = f"unreachable ({type(error).__name__})"
        proxy = "ok" if self.policy is not None else f"loading; {self.problem}" if self.problem else "loading"
        status = 200 if engine == proxy == "ok" else 503
        return web.json_response({"proxy": proxy, "engine": engine, "sessions": len(self.sessions)}, status=status)

    async def _metrics(self, request: web.Request) -> web.Response:
        assert self.metrics is not None
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _owner_in(body: bytes) -> str:
    try:
        owner = _owner.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # the front end has the better error message
    named = owner.metadata.user_id if owner.metadata is not None else ""
    return named or owner.prompt_cache_key or owner.user or ""


def load_policy(options: ProxyOptions) -> Callable[[Engine, int], Policy]:
    """Import everything that is slow to import (vLLM, verl, transformers) and load the tokenizer.

    Returns a function that makes the policy from an engine and the longest context in tokens.
    """
    from transformers import AutoConfig, AutoTokenizer

    from rollout.proxy.fits import check_fits
    from rollout.proxy.parsers import VllmReplyParser
    from rollout.proxy.render import ChatTemplateRenderer, end_ids, generation_config, vocabulary

    model_type = _loaded(AutoConfig, options.model, "config.json").model_type
    tokenizer: Any = _loaded(AutoTokenizer, options.model, "tokenizer")
    renderer = ChatTemplateRenderer(tokenizer, model_type)
    check_fits(renderer, options.tool_parser, options.any_family)
    parser = VllmReplyParser(options.tool_parser, options.reasoning_parser, tokenizer)
    generation, size = generation_config(options.model), vocabulary(options.model)

    def make(engine: Engine, max_context: int) -> Policy:
        return Policy(
            engine=engine,
            renderer=renderer,
            parser=parser,
            tokenizer=tokenizer,
            end_ids=end_ids(tokenizer, generation),
            max_tokens=max_context,
            max_context=max_context,
            max_session_tokens=2 * _SESSION_TOKENS,
            sampling={name: generation[name] for name in _SAMPLING if generation.get(name) is not None},
            vocabulary=size,
        )

    return make


def _loaded(kind: Any, model: str, what: str) -> Any:
    """Load a part of a model with transformers. Raises ValueError with a message of our own."""
    try:
        return kind.from_pretrained(model)
    except Exception as error:  # from json, the hub's client, tokenizers or transformers, with pages of text
        log.debug("loading %s", model, exc_info=True)
        if Path(model).is_dir():
            raise ValueError(f"its {what} is missing or cannot be read ({type(error).__name__})") from error
        raise ValueError(
            f"this is no directory, and no model of this name could be loaded from the hub (its {what}: "
            f"{type(error).__name__}); is the name right, and can the hub be reached?"
        ) from error


async def _in_daemon(work: Callable[[], Any]) -> Any:
    """Run ``work`` as asyncio.to_thread does, but in a thread that does not keep the program from ending."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only abandoned

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
