"""After a wrong config the last lines say what is wrong, and never that the same command continues: it would not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from rl.config.compose import ConfigError
from rl.run.screen import Screen
from rl.train import __main__ as train
from tests.check_kit import composed


def test_what_verl_refuses_is_a_wrong_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl says so minutes into the start, by an assertion; here before Ray is started."""
    config = composed("+experiment=quickstart", f"run.dir={tmp_path}", "actor_rollout_ref.rollout.temperature=0.0")
    OmegaConf.resolve(config)
    screen = Screen()
    with pytest.raises(ConfigError, match=r"^verl refuses this config: ") as caught:
        train.check_verl(config)
    run = cast(Any, SimpleNamespace(dir=tmp_path, checkpoint_step=0))
    assert train.report(caught.value, run, screen) == 2
    told = capsys.readouterr()
    assert "temperature should be greater than 0" in told.err and "continue" not in told.err + told.out


def test_a_failure_of_a_run_still_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cast(Any, SimpleNamespace(dir=tmp_path, checkpoint_step=3))
    assert train.report(RuntimeError("no disk"), run, Screen()) == 1
    told = capsys.readouterr()
    assert "the same command continues after step 3" in " ".join((told.err + told.out).split())


def test_a_value_that_leads_nowhere_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the environment of workers depends on it, which is set before the check."""
    monkeypatch.setattr("sys.argv", ["rl.train", "+experiment=quickstart", "trainer.device=${nope}"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    assert "trainer.device=${nope}: Interpolation key 'nope' not found" in capsys.readouterr().err
