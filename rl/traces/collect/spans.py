"""An episode as spans, in the form that agentlightning's adapters read (version 0.3.0).

A reply is two spans that share ``gen_ai.response.id``: ``raw_gen_ai_request`` has the values as Python literals, as
agentlightning's LLMProxy reports them, and ``openai.chat.completion`` has them as attributes. The verdict and the
reward are an annotation after them. docs/traces.md lists the attributes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rl.traces.collect.dataset import messages_of
from rollout.records import Record
from rollout.trace import Trace

# OpenTelemetry's names for calls of models (``gen_ai.*``) are not stable yet; these are of this version.
SCHEMA = "https://opentelemetry.io/schemas/1.43.0"
_OURS = "claude_code_rl"


def spans_of(trace: Trace, rollout: str = "", attempt: str = "") -> Iterator[dict[str, Any]]:
    """Yield the spans of an episode as agentlightning's ``Span`` takes them.

    ``rollout`` and ``attempt``: the ids that a store has given the episode; by default, ids made of its name.
    """
    record = trace.record
    ended = record.started + record.timing.get("total", 0.0)
    about = {"service.name": "claude-code-rl"} | {f"{_OURS}.{key}": value for key, value in about_of(record).items()}
    alike: dict[str, Any] = {"events": [], "links": [], "resource": {"attributes": about, "schema_url": SCHEMA}}
    alike |= dict.fromkeys(("parent_id", "context", "parent"))
    number = 0

    def span(name: str, began: float, until: float, attributes: dict[str, Any], error: str = "") -> dict[str, Any]:
        nonlocal number
        number += 1
        return {
            "rollout_id": rollout or record.episode,
            "attempt_id": attempt or f"{record.episode}-{record.attempt}",
            "sequence_id": number,
            "trace_id": hashlib.sha256(record.episode.encode()).hexdigest()[:32],
            "span_id": f"{number:016x}",
            "name": name,
            "status": {"status_code": "ERROR" if error else "OK", "description": error or None},
            "attributes": attributes,
            "start_time": began,
            "end_time": until,
            **alike,
        }

    threads: dict[Any, int] = {}
    for point in trace.delivered:
        name, stopped, model = f"{record.episode}/{point.number}", point.stop, point.model
        *asked, said = messages_of(trace, point)
        told = trace.tokens(point)
        logprobs = [{"logprob": value} for value in told[2]] if told else []
        choice: dict[str, Any] = {"finish_reason": stopped, "message": {"role": "assistant", "content": point.blocks}}
        raw: dict[str, Any] = {"id": name, "model": model, "messages": asked}
        thread = threads.setdefault(trace.path(point)[0].number, len(threads))
        both: dict[str, Any] = {"gen_ai.response.id": name, f"{_OURS}.message_id": point.name}
        both |= {f"{_OURS}.side_call": point.side, f"{_OURS}.thread": thread}
        plain: dict[str, Any] = {
            **both,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [stopped],
        }
        if told:
            raw["prompt_token_ids"] = told[0]
            choice |= {"token_ids": told[1], "logprobs": {"content": logprobs}}
            plain |= {"prompt_token_ids": told[0], "response_token_ids": told[1]}
            plain |= {"gen_ai.usage.input_tokens": len(told[0]), "gen_ai.usage.output_tokens": len(told[1])}
            plain["logprobs.content"] = json.dumps(logprobs)
            plain[f"{_OURS}.trained"] = record.nodes[point.node].trained
        raw["choices"] = [choice]
        for place, message in enumerate(asked):
            plain |= {f"gen_ai.prompt.{place}.{key}": value for key, value in message.items()}
        plain |= {f"gen_ai.completion.0.{key}": value for key, value in said.items()}
        plain["gen_ai.completion.0.finish_reason"] = stopped
        literal = {f"llm.hosted_vllm.{key}": one if isinstance(one, str) else repr(one) for key, one in raw.items()}
        until = point.started + point.seconds
        yield span("raw_gen_ai_request", point.started, until, {**both, **literal})
        yield span("openai.chat.completion", point.started, until, plain)
    values: dict[str, Any] = {f"{_OURS}.{key}": value for key, value in ending_of(record).items()}
    if (reward := record.verdict["reward"]) is not None:
        values |= {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward}
    lost = record.verdict["outcome"] == "infra_failure"
    yield span("agentlightning.annotation", ended, ended, values, record.verdict["detail"] or "lost" if lost else "")


def about_of(record: Record) -> dict[str, Any]:
    """Return what identifies a record's episode."""
    names = ("episode", "attempt", "task", "repo", "difficulty", "split", "step")
    return {name: value for name in names if (value := getattr(record, name)) is not None}


def ending_of(record: Record) -> dict[str, Any]:
    """Return what became of a record's episode: verdict and flags, how the agent ended, seconds."""
    verdict = record.verdict
    found = {
        **{name: verdict.get(name) for name in ("outcome", "reason", "flags", "detail")},
        **{f"agent.{name}": record.agent.get(name) for name in ("status", "turns")},
        **{f"seconds.{name}": value for name, value in record.timing.items()},
        "overlong": record.overlong,
    }
    return {name: value for name, value in found.items() if value not in (None, "", [])}
