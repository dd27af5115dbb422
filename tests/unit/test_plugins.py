"""Kinds and config groups of other packages are found, and what cannot be is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl.checks.keys import check_keys
from rl.config.command import help_text
from rl.config.compose import CONFIGS, ConfigError, compose
from rl.config.plugins import brought, named
from rl.episodes import boxes


class Quiet(boxes.Local):
    """A kind of box that is not ours."""


def bring(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with config groups on sys.path, as if it were installed; return where its groups are."""
    about = directory / "brought-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[claude_code_rl.configs]\nbrought = brought_by_a_test\n")
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
    assert "sandbox=apptainer|docker|local|quiet" in told and "theirs" in told
    assert config.seed == 7 and type(boxes.kind_of(config.sandbox)) is Quiet
    with pytest.raises(ConfigError, match=r"sandbox\.hush: nothing reads this key"):
        check_keys(compose(["+sandbox.hush=3"]))
    with pytest.raises(ConfigError, match=r"sandbox=quite: there is no sandbox 'quite'; did you mean quiet\?"):
        compose(["sandbox=quite"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lokal", r"sandbox\.kind is 'lokal'; it must be one of local, docker, apptainer, or module:attribute"),
        (None, "sandbox.kind is None; it must be one of"),
        (
            "nowhere.at.all:Box",
            "sandbox.kind is 'nowhere.at.all:Box', which cannot be imported: No module named 'nowhere'",
        ),
        (f"{__name__}:Loud", "which cannot be imported: .* no attribute 'Loud'"),
        ("a b:c", "which cannot be imported"),
    ],
)
def test_a_kind_that_is_nowhere_is_told(kind: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        boxes.kind_of(OmegaConf.create({"kind": kind}))
    with pytest.raises(ValueError, match=r"must be|imported"):
        named(kind, {})
