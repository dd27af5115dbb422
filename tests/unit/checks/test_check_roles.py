"""What is said of roles and of the rewards of rows is checked at the start."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from rl.checks import check
from tests.check_kit import good_config, refused


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("roles", "line"),
    [
        ({"sub_agent": {"train": False}}, "proxy.roles.sub_agent: there is no such role"),
        ({"subagent/a b": {"train": False}}, "there is no such role"),
        ({"side": {"train": False}}, "proxy.side_calls says what is done with side calls"),
        ({"main": {"train": "no"}}, "proxy.roles.main is {'train': 'no'}; give train, or endpoint and model"),
        ({"main": None}, "proxy.roles.main is None"),
        ({"main": {"train": True, "endpoint": "http://h", "model": "m"}}, "give train, or endpoint and model"),
        ({"main": {"endpoint": "http://h"}}, "give train, or endpoint and model"),
        ({"main": {"endpoint": "http://a:key@h", "model": "m"}}, "must be a URL without a key in it"),
        ({"main": {"endpoint": "h:80", "model": "m"}}, "must be a URL"),
        ({"main": {"endpoint": "http://h", "model": "m", "protocol": "x"}}, "proxy.roles.main.protocol is 'x'"),
        ({"main": {"endpoint": "http://h", "model": "m", "key_env": "NO_KEY"}}, "NO_KEY, which is not set"),
        ({"subagent/Explorer": {"train": False}}, "Claude Code has no such sub-agent; it has claude, Explore, fork"),
        ({"main": {"train": False}, "subagent": {"train": False}}, "nothing is trained"),
        (
            {"subagent/Plan": {"endpoint": "http://127.0.0.1:1", "model": "m"}},
            "http://127.0.0.1:1/v1/messages does not",
        ),
    ],
)
def test_roles_that_cannot_be(config, roles, line):
    config.proxy.roles = roles
    refused(config, line)


def test_roles(config):
    config.proxy.roles = {"main": {"train": False}, "subagent": {"train": False}, "subagent/Explore": {"train": True}}
    check(config)
    config.agent.tools = ["Bash", "Edit"]
    refused(config, "agent.tools has no Agent")
    config.agent.tools = None
    config.agent.project_settings = True  # which may define some
    config.proxy.roles = {"subagent/reviewer": {"train": False}}
    check(config)


def test_credit(config):
    refused(config, "episode.credit: 'nothing' is not of the form module:attribute", episode__credit="nothing")
    refused(
        config, "episode.credit: 'tests.lost:f' cannot be imported: ModuleNotFoundError", episode__credit="tests.lost:f"
    )
    config.episode.credit = "tests.kit:ends"
    refused(config, "episode.credit needs algorithm.adv_estimator=grpo and norm_adv_by_std_in_grpo=false")
    config.algorithm.norm_adv_by_std_in_grpo = False
    check(config)
    refused(config, "episode.credit needs algorithm.adv_estimator=grpo", algorithm__adv_estimator="rloo")
