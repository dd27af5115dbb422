"""Kinds and config groups of other packages are found, and what cannot be is told in one line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl.checks.keys import check_keys
from rl.config.command import help_text
from rl.config.compose import CONFIGS, ConfigError, compose
from rl.config.plugins import brought, named
from rl.episodes import boxes
from rl.episodes.setup import agent_from
from tests.packages_kit import APPTAINER, install, note


class Quiet(boxes.Local):
    """A kind of box that is not ours."""


def bring(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with config groups on sys.path, as if it were installed; return where its groups are."""
    note(directory, "brought", {"claude_code_rl.configs": {"brought": "brought_by_a_test"}})
    groups = directory / "brought_by_a_test"
    (groups / "sandbox").mkdir(parents=True)
    (groups / "experiment").mkdir()
    (groups / "__init__.py").touch()
    monkeypatch.syspath_prepend(directory)
    return groups


def test_a_kind_of_box_and_an_experiment_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert brought() == []
    groups = bring(tmp_path, monkeypatch)
    local = (CONFIGS / "sandbox" / "local.yaml").read_text()
    own = local.replace("kind: local", f"kind: {__name__}:Quiet") + "\n# Theirs, too.\nhush: 3\n"
    (groups / "sandbox" / "quiet.yaml").write_text(own)
    (groups / "experiment" / "theirs.yaml").write_text("# @package _global_\n#\n# Theirs.\n\nseed: 7\n")
    assert brought() == [groups]
    config = compose(["+experiment=theirs", "sandbox=quiet"])
    check_keys(config)
    told = help_text("rl.train", "")
    assert "sandbox=docker|local|quiet" in told and "theirs" in told
    kind = boxes.kind_of(config.sandbox)
    assert config.seed == 7 and type(kind) is Quiet and kind.name == "quiet"
    check_keys(compose(["sandbox=quiet", "sandbox.hush=4"]))  # their code reads it
    with pytest.raises(ConfigError, match=r"sandbox\.hush: nothing reads this key"):
        check_keys(compose(["+sandbox.hush=3"]))
    with pytest.raises(ConfigError, match=r"sandbox=quite: there is no sandbox 'quite'; did you mean quiet\?"):
        compose(["sandbox=quite"])


class Bare:
    """An agent that takes no keys."""

    def __init__(self, max_tokens: int, max_context: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lokal", r"sandbox\.kind is 'lokal'; it must be one of local, docker, or module:attribute"),
        (None, "sandbox.kind is None; it must be one of"),
        (
            "nowhere.at.all:Box",
            "sandbox.kind is 'nowhere.at.all:Box', which cannot be imported: ModuleNotFoundError: .* 'nowhere'",
        ),
        (f"{__name__}:Loud", "which cannot be imported: .* no attribute 'Loud'"),
        ("a b:c", "which cannot be imported"),
        (":c", "which is not of the form module:attribute"),
    ],
)
def test_a_kind_that_is_nowhere_is_told(kind: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        boxes.kind_of(OmegaConf.create({"kind": kind}))
    with pytest.raises(ValueError, match="must be|imported|form"):
        named(kind, {})


def test_keys_that_an_agent_does_not_know_are_told() -> None:
    config = OmegaConf.create({"agent": {"kind": f"{__name__}:Bare", "less": 1}})
    with pytest.raises(ValueError, match=rf"^agent.kind={__name__}:Bare: TypeError: .*'less'"):
        agent_from(config, 1, 1)


def test_a_package_of_this_repository_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "it is in a package of its own: .venv/bin/pip install --no-deps"
    with pytest.raises(ConfigError) as caught:
        compose(["sandbox=apptainer", "agent=shell"])
    assert caught.value.lines == (
        f"sandbox=apptainer: 'apptainer' is not installed; {said} packaging/apptainer",
        f"agent=shell: 'shell' is not installed; {said} examples/own_agent",
    )
    with pytest.raises(ConfigError, match=rf"imported: .* No module named 'own_agent'; {said} examples/own_"):
        boxes.kind_of(OmegaConf.create({"kind": "own_agent:ShellAgent.of"}))
    install(APPTAINER, tmp_path, monkeypatch)
    config = compose(["sandbox=apptainer", "sandbox.cache_dir=/shared/sif"])
    check_keys(config)
    kind = boxes.kind_of(config.sandbox)
    assert kind.name == "apptainer" and "cache_dir" in kind.speed_only


def test_the_package_of_apptainer_uses_public_names_of_boxes_only() -> None:
    """Its boxes know no tasks, agents, sessions or other kinds; only its kind knows the config."""
    known = r"rollout\.sandbox(?!\.(docker|local))"
    used = {"kind.py": rf"{known}|rewards\.task|rl\.config\.compose|rl\.episodes\.boxes"}
    files = sorted((APPTAINER / "apptainer_boxes").glob("*.py"))
    assert len(files) == 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{name.name}" for name in node.names]
                ours = [name for name in full if name.partition(".")[0] in ("rl", "rollout", "rewards")]
                wrong = [name for name in ours if "._" in name or not re.match(used.get(file.name, known), name)]
                assert wrong == [], file.name
