"""The Prometheus metrics of the stand-alone proxy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.proxy.counters import Counters
from rollout.proxy.front import route_of
from rollout.proxy.replies import Reply
from rollout.proxy.session import Session

_LATENCY_S = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEAD_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.05, 0.1, 0.25, 1)


class Metrics(Collector):
    """A Metrics counts requests as they end, and adds up the sessions' own counters when it is read.

    ``sessions`` are the open sessions; those that are closed must be passed to ``retire``.
    """

    def __init__(self) -> None:
        self.sessions: Mapping[str, Session] = {}
        self._retired = Counters()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_proxy_requests", "Requests by status; 499 means that the client hung up.", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._latency = Histogram(
            "rollout_proxy_request_seconds", "Time from a request's headers to the reply's last byte.", ["path"],
            buckets=_LATENCY_S, registry=self._registry,
        )  # fmt: skip
        self._overhead = Histogram(
            "rollout_proxy_overhead_seconds",
            "The proxy's own work on a call, without the engine; overlapping calls of a session count each other's.",
            buckets=_OVERHEAD_S, registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            "rollout_proxy_tokens", "Tokens in prompts and in sampled replies.", ["kind"], registry=self._registry
        )
        self._registry.register(self)
        # Finding the counter of a label takes longer than counting.
        self._of_status = functools.cache(lambda path, status: self._requests.labels(path, str(status)))
        self._of_path = functools.cache(self._latency.labels)
        self._prompt, self._sampled = self._tokens.labels("prompt"), self._tokens.labels("sampled")

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        path = route_of(path)  # clients must not be able to create labels
        self._of_status(path, status).inc()
        self._of_path(path).observe(seconds)

    def reply(self, reply: Reply, overhead_s: float) -> None:
        """Count a reply that was sent, and the seconds that the proxy itself worked on it."""
        self._prompt.inc(reply.input_tokens)
        self._sampled.inc(reply.output_tokens)
        self._overhead.observe(overhead_s)

    def retire(self, session: Session) -> None:
        """Keep the counters of a session that is being closed."""
        for field in fields(Counters):
            sums = getattr(self._retired, field.name) + getattr(session.counters, field.name)
            setattr(self._retired, field.name, sums)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the sums of the sessions' counters; Prometheus' client calls this."""
        counted = [self._retired, *(session.counters for session in self.sessions.values())]
        for field in fields(Counters):
            name = f"{field.name[:-2]}_seconds" if field.name.endswith("_s") else field.name
            about = f"Total {field.name.replace('_', ' ').removesuffix(' s')} of all sessions."
            total = sum(getattr(counters, field.name) for counters in counted)
            yield CounterMetricFamily(f"rollout_proxy_session_{name}", about, total)
        yield GaugeMetricFamily("rollout_proxy_open_sessions", "Sessions open now.", len(self.sessions))
