"""What is counted of a session: calls, their times, and what became of requests and replies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counters are the totals of one session; times are in seconds.

    ``retries``: calls that the client marked as retries. ``aborted``: generations that were cancelled because nobody
    waited for them any more. ``overhead_s``: the proxy's own work, without the engine. ``malformed_calls``: replies
    with a tool call that could not be read. ``cut_replies``: replies that reached their token limit. ``context_full``:
    requests refused because the context was full. ``refused_calls``: those refused because the session had made all the
    calls that it may make. ``foreign_calls``: replies that the agent did not ask for itself (``Session.disown``);
    ``unknown_reports``: replies that the agent's output names and the session never sent. ``unread_replies``: replies
    that were sent, but that their client is not proven to have read; they are not trained on. ``cache_queries``: prompt
    tokens of the calls for which the engine reported its prefix cache, and ``cache_hits``: those of them that were in
    the cache.
    """

    calls: int = 0
    retries: int = 0
    side_calls: int = 0
    aborted: int = 0
    overhead_s: float = 0.0
    engine_s: float = 0.0
    malformed_calls: int = 0
    cut_replies: int = 0
    context_full: int = 0
    refused_calls: int = 0
    foreign_calls: int = 0
    unknown_reports: int = 0
    unread_replies: int = 0
    engine_errors: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
