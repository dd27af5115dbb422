"""verl's LLM client as an engine of the proxy: token ids in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rl.run.programs import last_lines
from rollout.proxy.engine import Completion, EngineError, logprobs_of


class VerlEngine:
    """This engine is verl's client. It is sticky by episode: all calls of an episode go to one server.

    *Logprobs* are those of the distribution that was sampled from: verl starts vLLM with
    ``logprobs_mode=processed_logprobs``. At temperature 0 they are those of temperature 1.

    A token's *weight version* is the trainer's global step that its server had when the attempt ended. It is exact for
    each token, because verl ends every attempt before it loads new weights. The async trainer's client then makes
    another attempt, which continues from the tokens it has; to the caller both are one slow reply. If the server ends a
    reply and the client does not resume it (the sync client never does, but no weight update should interrupt it
    either), EngineError is raised and the agent retries.

    *Cancelling* a call cancels its Ray task, whereupon vLLM frees the request's slot. verl's own ``abort_request`` does
    not work: it needs an id that only the client knows, and looks for it among vLLM's internal request ids, where vLLM
    has not kept it since 0.12.
    """

    def __init__(self, client: LLMServerClient) -> None:
        self.servers: dict[str, str] = {}  # by episode, until the caller takes it out
        self.client = _watched(client, self.servers)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Sample one reply. Raises EngineError."""
        attempts: list[_Attempt] = []
        _attempts.set(attempts)
        try:
            out = await self.client.generate(request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling)
        except asyncio.CancelledError:
            for attempt in attempts:
                if attempt.out is None:
                    ray.cancel(attempt.ref)
            raise
        except Exception as error:  # Ray and the server raise many kinds; all of them mean: no reply
            # A remote error's text is a whole traceback, whose last line says what it was.
            raise EngineError(f"{type(error).__name__}: {last_lines(str(error))}") from error
        if out.stop_reason in ("aborted", "abort"):
            raise EngineError(f"the server ended the reply after {len(out.token_ids)} tokens")
        if out.log_probs is None or len(out.log_probs) != len(out.token_ids):
            raise EngineError(f"reply of {len(out.token_ids)} tokens without their logprobs ({out.stop_reason})")
        if out.routed_experts is not None:
            expected = len(prompt_ids) + len(out.token_ids) - 1 - sampling.get("routed_experts_prompt_start", 0)
            if len(out.routed_experts) != expected:
                raise EngineError(f"routing of {len(out.routed_experts)} tokens where {expected} were asked for")
        # The first attempt tells what earlier calls had cached; a later one also finds what the first one computed.
        first = next((attempt.out for attempt in attempts if attempt.out is not None), out)
        cached = first.extra_fields.get("num_cached_tokens")
        logprobs = [float(p) for p in out.log_probs]
        of = logprobs_of(sampling, processed=True)
        return Completion(list(out.token_ids), logprobs, _versions(attempts), cached, out.routed_experts, of)


@dataclass
class _Attempt:
    """An attempt is one generation on a server: the Ray task and, once it is done, its output."""

    ref: ray.ObjectRef
    out: TokenOutput | None = None


# The attempts of the generate() call that the current asyncio task is making.
_attempts: contextvars.ContextVar[list[_Attempt]] = contextvars.ContextVar("_attempts")


class _WatchedServer:
    """This stands for a server's handle, as far as verl's client uses it, and notes the attempts of a call."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.generate = self  # the client calls server.generate.remote(...)

    async def remote(self, **arguments: Any) -> TokenOutput:
        attempt = _Attempt(self.handle.generate.remote(**arguments))
        _attempts.get().append(attempt)
        attempt.out = await attempt.ref
        return attempt.out


def _watched(client: LLMServerClient, servers: dict[str, str]) -> LLMServerClient:
    """Return the same client with watched servers, whose names are noted in ``servers`` by request id.

    All of verl's clients pick their servers in ``_acquire_server``, which makes that method the one place to observe
    them; what ``generate`` returns neither lists the attempts nor can end them.
    """
    watched = copy.copy(client)

    async def acquire(request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, handle = await type(client)._acquire_server(watched, request_id, **extra)
        servers[request_id] = server_id
        return server_id, _WatchedServer(handle)

    watched._acquire_server = acquire
    return watched


def _versions(attempts: list[_Attempt]) -> tuple[int, ...]:
    """Return one weight version per token; none at all if any attempt does not tell its own."""
    versions: list[int] = []
    for attempt in attempts:
        if attempt.out is None or not attempt.out.token_ids:
            continue
        step = attempt.out.extra_fields.get("global_steps")
        if step is None:
            return ()
        versions += [step] * len(attempt.out.token_ids)
    return tuple(versions)
