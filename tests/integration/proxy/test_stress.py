"""A thousand calls of the hundred thousand that ``python -m tests.stress_proxy`` makes and checks token by token."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rl.quickstart.policy import make_policy
from tests.stress_proxy import KINDS, stress


def test_every_token_is_trained_on_once_after_the_prompt_that_its_agent_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)
    make_policy(tmp_path / "policy", seed=1)
    told, failed = stress(str(tmp_path / "policy"), calls=1000, loops=2, sample=10)
    assert not failed
    assert all(told[kind] for kind in KINDS) and told["prompts encoded as a whole"] > 20
