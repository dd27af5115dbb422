"""What the stand-alone proxy tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.proxy.replies import Reply
from rollout.proxy.session import Counters, Session

_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_LATENCY_S = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEAD_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.05, 0.1, 0.25, 1)


class Metrics(Collector):
    """Counts requests as they end, and sums up the sessions' own counters when it is asked.

    ``sessions``: the open ones; those that were closed are added by ``retire``.
    """

    def __init__(self) -> None:
        self.sessions: Mapping[str, Session] = {}
        self._retired = Counters()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_proxy_requests", "Requests answered; 499: the client hung up.", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._latency = Histogram(
            "rollout_proxy_request_seconds", "From a request's headers to its last byte.", ["path"],
            buckets=_LATENCY_S, registry=self._registry,
        )  # fmt: skip
        self._overhead = Histogram(
            "rollout_proxy_overhead_seconds",
            "The proxy's own work on a call, the engine left out; calls of one session that overlap share theirs.",
            buckets=_OVERHEAD_S, registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            "rollout_proxy_tokens", "Tokens of prompts and of sampled replies.", ["kind"], registry=self._registry
        )
        self._registry.register(self)

    def request(self, path: str, status: int, seconds: float) -> None:
        path = path if path in _PATHS else "other"  # whoever asks must not be able to make labels
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def reply(self, reply: Reply, overhead_s: float) -> None:
        self._tokens.labels("prompt").inc(reply.input_tokens)
        self._tokens.labels("sampled").inc(reply.output_tokens)
        self._overhead.observe(overhead_s)

    def retire(self, session: Session) -> None:
        _add(self._retired, session.counters)

    def text(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        total = Counters()
        _add(total, self._retired)
        for session in self.sessions.values():
            _add(total, session.counters)
        for field in fields(Counters):
            name = f"{field.name[:-2]}_seconds" if field.name.endswith("_s") else field.name
            about = f"Total {field.name.replace('_', ' ').removesuffix(' s')} of all sessions."
            yield CounterMetricFamily(f"rollout_proxy_session_{name}", about, getattr(total, field.name))
        yield GaugeMetricFamily("rollout_proxy_open_sessions", "Sessions open now.", len(self.sessions))


def _add(total: Counters, part: Counters) -> None:
    for field in fields(Counters):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
