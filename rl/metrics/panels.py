"""Panels are the charts that people look at: one list for the wandb workspace (``rl.dashboard``) and for ``rl.report``.

Metrics have the names of docs/metrics.md; ``<...>`` in a name stands for any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A panel is one chart over steps.

    ``metrics``: the labels of its curves, by the name of the metric; ``{}`` in a label is filled with the text that
    ``<...>`` stands for. ``unit``: label of the y axis; ``bounds``: its ends, None for automatic. ``stacked``: the
    curves are parts of a whole.
    """

    title: str
    unit: str
    metrics: dict[str, str]
    stacked: bool = False
    bounds: tuple[float | None, float | None] = (None, None)

    def curves(self, names: list[str]) -> dict[str, str]:
        """Return the labels of those of ``names`` that belong here, by name and in the panel's order."""
        found: dict[str, str] = {}
        for metric, label in self.metrics.items():
            for name in names:
                if match := pattern(metric).fullmatch(name):
                    found.setdefault(name, label.format(*match.groups()))
        return found


def pattern(metric: str) -> re.Pattern[str]:
    """Return the pattern of the names that a documented name stands for."""
    parts = re.split(r"<[^>]+>", metric)
    return re.compile("(.+)".join(re.escape(part) for part in parts))


SHARE = (0.0, 1.0)

SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(
            "Resolve rate",
            "share of episodes",
            {"episode/resolve_rate": "training", "val/resolve_rate": "held-out"},
            bounds=SHARE,
        ),
        Panel("Reward", "per episode", {"episode/reward_mean": "training", "val/reward_mean": "held-out"}),
        Panel(
            "Groups whose episodes all end alike",
            "share of groups",
            {"group/all_resolved": "all resolved", "group/none_resolved": "none resolved"},
            stacked=True,
            bounds=SHARE,
        ),
        Panel(
            "Verdicts",
            "training episodes",
            {"episode/resolved": "resolved", "failure/<reason>": "{}", "infra/failures": "infrastructure"},
            stacked=True,
        ),
        Panel(
            "Held-out resolve rate by difficulty",
            "share of episodes",
            {"val/difficulty/<difficulty>/resolve_rate": "{}"},
            bounds=SHARE,
        ),
        Panel(
            "Held-out resolve rate by repository",
            "share of episodes",
            {"val/repo/<repository>/resolve_rate": "{}"},
            bounds=SHARE,
        ),
    ),
    "Episodes": (
        Panel("Rows per episode", "rows", {"episode/rows": "training"}, bounds=(0, None)),
        Panel("Turns and calls", "per episode", {"episode/turns": "turns", "episode/calls": "calls"}, bounds=(0, None)),
        Panel(
            "Tokens per episode",
            "tokens",
            {
                "episode/tokens_context": "context",
                "episode/tokens_sampled": "sampled",
                "episode/tokens_trained": "trained",
            },
            bounds=(0, None),
        ),
        Panel(
            "Faulty replies",
            "per episode",
            {"episode/malformed_calls": "malformed tool calls", "episode/cut_replies": "cut at max_tokens"},
            bounds=(0, None),
        ),
        Panel(
            "Wall time of episodes",
            "seconds",
            {"episode/wall_s_p50": "p50", "episode/wall_s_p90": "p90", "episode/wall_s_p99": "p99"},
            bounds=(0, None),
        ),
        Panel(
            "Where an episode's time goes",
            "seconds (mean)",
            {"episode/boot_s": "boot", "episode/agent_s": "agent", "episode/grade_s": "grading"},
            stacked=True,
        ),
    ),
    "Policy": (
        Panel("Entropy", "nats per token", {"actor/entropy": "entropy"}),
        Panel("Gradient norm", "before clipping", {"actor/grad_norm": "gradient norm"}, bounds=(0, None)),
        Panel(
            "Clipped tokens",
            "share of tokens",
            {"actor/pg_clipfrac": "ratio clipped", "actor/pg_clipfrac_lower": "dual clip"},
        ),
        Panel("KL of the update", "nats per token", {"actor/ppo_kl": "old to new policy"}),
    ),
    "Rollout against trainer": (
        Panel(
            "Correlation of probabilities",
            "Pearson",
            {"training/rollout_actor_probs_pearson_corr": "rollout / trainer"},
        ),
        Panel("KL, rollout to trainer", "nats per token", {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}),
        Panel("Perplexity ratio, trainer / rollout", "ratio", {"rollout_corr/ppl_ratio": "ratio"}),
        Panel(
            "Importance weights",
            "weight",
            {
                "rollout_corr/rollout_is_mean": "mean",
                "rollout_corr/rollout_is_max": "max",
                "rollout_corr/rollout_is_min": "min",
            },
        ),
        Panel(
            "Staleness of trained rows",
            "weight versions",
            {
                "training/off_policy/trajectory_staleness/mean": "mean",
                "training/off_policy/trajectory_staleness_worst/max": "worst",
            },
            bounds=(0, None),
        ),
    ),
    "Speed": (
        Panel(
            "Where a step's time goes",
            "seconds",
            {
                "timing_s/gen": "rollout",
                "timing_s/old_log_prob": "log-probs",
                "timing_s/ref": "reference",
                "timing_s/adv": "advantage",
                "timing_s/update_actor": "update",
                "timing_s/save_checkpoint": "checkpoint",
                "timing_s/update_weights": "weight sync",
                "timing_s/testing": "held-out",
            },
            stacked=True,
        ),
        Panel(
            "Prefix-cache hit rate", "share of prompt tokens", {"engine/prefix_cache_hit_rate": "vLLM"}, bounds=SHARE
        ),
        Panel(
            "Proxy overhead",
            "ms per call",
            {"proxy/overhead_ms": "mean", "proxy/overhead_ms_p95": "p95 of episodes"},
            bounds=(0, None),
        ),
        Panel("GPU busy", "share of time", {"gpu/busy": "mean", "gpu/busy_min": "idlest GPU"}, bounds=SHARE),
        Panel("Throughput", "tokens per second and GPU", {"perf/throughput": "tokens of rows"}, bounds=(0, None)),
        Panel(
            "Memory",
            "GB",
            {"actor/perf/max_memory_allocated_gb": "GPU, trainer", "actor/perf/cpu_memory_used_gb": "CPU"},
            bounds=(0, None),
        ),
    ),
}
