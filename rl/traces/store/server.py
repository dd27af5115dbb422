"""A client for the server of a LightningStore (``agl store``) that does not import agentlightning.

That import takes 10 s of CPU time and 380 MB, although no more than six kinds of requests are needed. Spans go in as
OTLP, as many as fit into one request; agentlightning's own client sends each span alone, and gets it back.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from rl.traces.store.stores import StoredAttempt, StoreError, StoreRefusal, place_of, places

_PAGE = 500  # rollouts in one answer
_BATCH = 4 << 20  # bytes of spans in one request, before compression; a larger span goes alone
_STATUS = {"OK": Status.STATUS_CODE_OK, "ERROR": Status.STATUS_CODE_ERROR}


class StoreServer:
    """A StoreServer is a LightningStore at a URL. Close it in the end. ``timeout_s``: for each request."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))
        self.sent = 0  # bytes of spans, compressed

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def known(self) -> dict[str, StoredAttempt]:
        """Implement Store.known."""
        found: list[Any] = []
        while True:  # in order of time, so that new ones come at the end
            asked = {"limit": _PAGE, "offset": len(found), "sort_by": "start_time"}
            page = await self._json("/rollouts/search", asked)
            found += page["items"]
            if len(page["items"]) < _PAGE:
                return places(found)

    async def has(self, rollout: str) -> bool:
        """Implement Store.has."""
        found = await self._json("/rollouts/search", {"rollout_id_in": [rollout]})
        return bool(found["items"])

    async def start(self, rollout: Mapping[str, Any]) -> StoredAttempt:
        """Implement Store.start."""
        return place_of((await self._json("/rollouts", rollout))["attempt"])

    async def again(self, rollout: str) -> StoredAttempt:
        """Implement Store.again."""
        return place_of((await self._json(f"/rollouts/{rollout}/attempts", {}))["attempt"])

    async def add(self, spans: Iterable[Mapping[str, Any]]) -> None:
        """Implement Store.add."""
        batch, size = ExportTraceServiceRequest(), 0
        for one in spans:
            made = _resource_spans(one)
            if size and size + made.ByteSize() > _BATCH:
                await self._post(batch)
                batch, size = ExportTraceServiceRequest(), 0
            batch.resource_spans.append(made)
            size += made.ByteSize()
        if size:
            await self._post(batch)

    async def end(self, place: StoredAttempt, status: str, metadata: Mapping[str, Any]) -> None:
        """Implement Store.end."""
        path = f"/rollouts/{place.rollout}/attempts/{place.attempt}"
        await self._json(path, {"status": status, "metadata": metadata})

    async def _post(self, batch: ExportTraceServiceRequest) -> None:
        body = await asyncio.to_thread(lambda: gzip.compress(batch.SerializeToString(), 1))
        self.sent += len(body)
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        await self._ask("/v1/traces", body, headers)

    async def _json(self, path: str, body: Mapping[str, Any]) -> Any:
        sent = _clean(json.dumps(body, ensure_ascii=False)).encode()
        answer = await self._ask(f"/v1/agl{path}", sent, {"Content-Type": "application/json"})
        try:
            return json.loads(answer)
        except ValueError:
            raise StoreError(f"{self.url} is no LightningStore: {path} is answered by {answer[:60]!r}") from None

    async def _ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        try:
            async with self._session.post(self.url + path, data=body, headers=headers) as response:
                answer = await response.read()
        except TimeoutError:
            raise StoreError(f"{self.url} has not answered in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise StoreError(f"{self.url} does not answer: {' '.join(str(error).split())}") from None
        if response.status >= 400:
            said = " ".join(answer.decode(errors="replace").split())[:200]
            raise StoreRefusal(f"{self.url}{path} answers {response.status}: {said}")
        return answer


def _clean(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()


def _resource_spans(span: Mapping[str, Any]) -> ResourceSpans:
    """Return a span in OTLP's form. The store finds its place by attributes of the resource."""
    ids = {name: span[name] for name in ("rollout_id", "attempt_id")}
    ids["span_sequence_id"] = str(span["sequence_id"])
    resource = span["resource"]["attributes"] | {f"agentlightning.{name}": value for name, value in ids.items()}
    made = Span(
        trace_id=bytes.fromhex(span["trace_id"]),
        span_id=bytes.fromhex(span["span_id"]),
        name=span["name"],
        start_time_unix_nano=round(span["start_time"] * 1e9),
        end_time_unix_nano=round(span["end_time"] * 1e9),
        attributes=_attributes(span["attributes"]),
        status=Status(code=_STATUS[span["status"]["status_code"]], message=_clean(span["status"]["description"] or "")),
    )
    scope = ScopeSpans(spans=[made])
    about = Resource(attributes=_attributes(resource))
    return ResourceSpans(resource=about, scope_spans=[scope], schema_url=span["resource"]["schema_url"])


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=_clean(name), value=_value(value)) for name, value in values.items()]


def _value(value: bool | int | float | str | Sequence[Any]) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=_clean(value))
    return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
