"""Checks tell what is wrong with an agent, or with one of several, in one clear line before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from rl.checks import check
from rl.checks.keys import check_keys, check_types
from rl.checks.numbers import check_numbers
from rl.config.compose import ConfigError, compose
from rl.episodes.setup import AGENTS
from tests.check_kit import good_config, refused, write
from tests.datasets import snapshot_row as row


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sorted(set(AGENTS) - {"claude_code"}))
def test_an_agent_may_have_no_limit_of_turns(name: str) -> None:
    """Codex has no such key; opencode's is 0, as that of others may be."""
    for program in ("train", "evaluate", "collect"):
        made = compose([f"agent={name}"], program)
        check_numbers(made, ())
        check_types(made, program)
        for wrong in (-1, "many") if "max_turns" in made.agent else ():
            made.agent.max_turns = wrong
            with pytest.raises(ConfigError, match=rf"^agent\.max_turns is {wrong!r}; it must be a number above 0$"):
                check_numbers(made, ())
            check_types(made, program)  # which leaves it to the other


def test_every_agent_of_a_mix_is_checked(config: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program, its keys and its limits, all in one go; agents that are not in the mix need nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is installed
    config.agent = compose(["agent=mixed", "agent.mix={claude_code:1,command:0}"]).agent
    config.agent.command.command = ["true"]
    check(config)
    rows = [row(f"a-{number}", agent="command" if number else None) for number in range(config.data.train_batch_size)]
    config.data.train_files = write(tmp_path / "named.parquet", rows)
    check(config)
    config.agent.mix = {"codex": 0.5, "claude_code": 1}
    config.agent.claude_code.max_turns, config.agent.codex.timeout_s = 0, "long"
    refused(config, "agent.claude_code.max_turns is 0; it must be a number above 0")
    refused(config, "agent.codex.timeout_s is 'long'")
    config.agent.claude_code.max_turns, config.agent.codex.timeout_s = 3, 9
    refused(config, "python -m rl.agents install codex")
    refused(config, "a-1: agent: 'command' is not in agent.mix, which has codex")
    config.agent.mix = {"coddex": 1}
    refused(config, "agent.mix: there is no agent 'coddex'; there are claude_code, codex, command")
    config.agent.mix = {"claude_code": 0}
    refused(config, "a-0: agent: the task names no agent, and all weights of agent.mix are 0")
    config.agent.mix, config.agent.claude_code.bare, config.agent.claude_code.claude_md = {"claude_code": 1}, True, True
    refused(config, "agent.claude_code: agent.bare=true runs without")
    refused(config, "'command' is not in agent.mix")
    with pytest.raises(ConfigError, match=r"agent\.codex\.timeout: nothing reads this key; did you mean agent\.codex"):
        check_keys(compose(["agent=mixed", "agent.mix={codex:1}", "+agent.codex.timeout=1"]))
