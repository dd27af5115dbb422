"""The part of docs/planning.md about tuning names keys and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.check_kit import composed
from tests.metric_docs import best, documented

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
TEXT = re.split(r"^## ", PAGE.partition("\n## Tuning a run\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
NAMED = {re.split(r"[ =:]", quoted)[0] for quoted in re.findall(r"`([^`\n]+)`", TEXT)}
KEY = r"(actor|rollout|model|algorithm|data|agent|proxy|sandbox|episode|grading|trainer|checkpoint_engine)\.[a-z_.0-9]+"


def test_keys_exist() -> None:
    configs = [composed(f"+experiment={name}") for name in ("qwen3_coder_30b", "qwen3_coder_30b_separate")]
    keys = {name for name in NAMED if re.fullmatch(KEY, name)}
    assert len(keys) > 20
    missing = set()
    for key in keys:
        full = f"actor_rollout_ref.{key}" if key.split(".")[0] in ("actor", "rollout", "model") else key
        if not any(exists(config, full) for config in configs):
            missing.add(key)
    assert not missing


def exists(config: object, key: str) -> bool:
    *parents, last = key.split(".")
    node = OmegaConf.select(config, ".".join(parents))
    return node is not None and last in node


@pytest.mark.parametrize("name", sorted(name for name in NAMED if re.fullmatch(r"[a-z_]+/[a-z_0-9/]+", name)))
def test_metrics_exist(name: str) -> None:
    names = [row.name for row in documented()]
    assert best(name, names) or best(f"{name}/mean", names)
