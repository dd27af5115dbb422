"""This module writes an episode as spans, in the form that agentlightning's adapters read (version 0.3.0).

A call is two spans that share ``gen_ai.response.id``: ``raw_gen_ai_request`` has the values as Python literals, as its
LLMProxy reports them, and ``openai.chat.completion`` as attributes. The reward is an annotation after them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rl.collect.dataset import calls_of, messages_of, reply_of, tokens_of
from rollout.records import Record

# What all spans have in common.
_RESOURCE = {"attributes": {"service.name": "claude-code-rl"}, "schema_url": ""}
_ALIKE: dict[str, Any] = {"status": {"status_code": "OK"}, "events": [], "links": [], "resource": _RESOURCE}
_ALIKE |= dict.fromkeys(("parent_id", "context", "parent"))


def spans_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the spans of a record as agentlightning's ``Span`` takes them; an episode is a rollout with one attempt."""
    ended = record.started + record.timing.get("total", 0.0)
    number = 0

    def span(name: str, began: float, until: float, attributes: dict[str, Any]) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {
            "rollout_id": record.episode,
            "attempt_id": f"{record.episode}-{record.attempt}",
            "sequence_id": number,
            "trace_id": hashlib.sha256(record.episode.encode()).hexdigest()[:32],
            "span_id": f"{number:016x}",
            "name": name,
            "attributes": attributes,
            "start_time": began,
            "end_time": until,
            **_ALIKE,
        }

    for call in calls_of(record):
        name, blocks, stopped = reply_of(record, call)
        *asked, said = messages_of(record, call)
        told = tokens_of(record, call)
        logprobs = [{"logprob": value} for value in told[2]] if told else []
        model = str(call.reply.get("model") or record.model)
        choice: dict[str, Any] = {"finish_reason": stopped, "message": {"role": "assistant", "content": blocks}}
        raw: dict[str, Any] = {"id": name, "model": model, "messages": asked}
        plain: dict[str, Any] = {"gen_ai.response.id": name, "gen_ai.request.model": model}
        if told:
            raw["prompt_token_ids"] = told[0]
            choice |= {"token_ids": told[1], "logprobs": {"content": logprobs}}
            plain |= {"prompt_token_ids": told[0], "response_token_ids": told[1]}
            plain["logprobs.content"] = json.dumps(logprobs)
        raw["choices"] = [choice]
        for place, message in enumerate(asked):
            plain |= {f"gen_ai.prompt.{place}.{key}": value for key, value in message.items()}
        plain |= {f"gen_ai.completion.0.{key}": value for key, value in said.items()}
        plain["gen_ai.completion.0.finish_reason"] = stopped
        texts = {key: value if isinstance(value, str) else repr(value) for key, value in raw.items()}
        literal = {f"llm.hosted_vllm.{key}": text for key, text in texts.items()}
        until = call.started + call.seconds
        yield span("raw_gen_ai_request", call.started, until, {"gen_ai.response.id": name, **literal})
        yield span("openai.chat.completion", call.started, until, plain)
    if (reward := record.verdict["reward"]) is not None:
        values = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward}
        yield span("agentlightning.annotation", ended, ended, values)
