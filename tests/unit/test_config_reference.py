"""docs/config.md is made from the comments in configs/; make lint says whether it is up to date."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from rl.boxes import KINDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "config_reference.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TEXT = """\
# @package _global_
#
# What this file is.
#
#   a command

defaults:
  - _self_

# About a,
# in two lines.
a: 1
b: [x, 'y # z'] # behind
# About the group.
group:
  # About c.
  c: ${a}

  d: null
other:
  e: {}
  f:
    - 1
    # In a list: not about the next key.
  g: "# no comment"
"""


def test_keys_with_their_comments(script: ModuleType) -> None:
    assert [(key.name, key.value, key.about) for key in script.keys(TEXT)] == [
        ("a", "1", "About a, in two lines."),
        ("b", "[x, 'y # z']", "behind"),
        ("group", "", "About the group."),
        ("group.c", "${a}", "About c."),
        ("group.d", "null", ""),
        ("other.e", "{}", ""),
        ("other.f", "[1]", ""),
        ("other.g", "'# no comment'", ""),
    ]
    assert script.header(TEXT) == "What this file is.\n\n  a command"
    assert script.header("# About a.\na: 1\n") == ""


def test_a_key_that_nothing_describes_is_an_error(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the shipped keys has a line; a key of ours and one of verl's show where it comes from."""
    shipped = script.everything()
    about = {key.name: key.about for some in shipped.values() for key in some}
    assert len(about) > 200 and all(about.values())
    assert about["sandbox.file_mb"] == "The largest file that a process may write, in MiB."
    assert about["actor_rollout_ref.actor.optim.weight_decay"] == "verl: Weight decay"
    assert about["actor_rollout_ref.actor.megatron.context_parallel_size"] == "verl: context parallel size"
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(script, "OUT", tmp_path / "config.md")
    monkeypatch.setattr(sys, "argv", ["config_reference.py"])
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open(tmp_path / "configs" / "evaluate.yaml", "a") as file:
        file.write("\nnew: 1\n")
    assert script.main() == 1 and "evaluate.yaml: nothing says what these are: new" in capsys.readouterr().err
    assert not (tmp_path / "config.md").exists()


def test_the_index_leads_to_every_key(script: ModuleType) -> None:
    text = script.reference()
    index = next(line for line in text.splitlines() if line.startswith("- `sandbox.file_mb`: "))
    for kind in KINDS:
        assert f"[sandbox/{kind}.yaml](#sandbox{kind}yaml)" in index
    assert "\n## sandbox/apptainer.yaml\n" in text
    for some in script.everything().values():
        assert all(f"\n- `{key.name}`: [" in text for key in some)


def test_every_key_of_every_file_is_there(script: ModuleType) -> None:
    text = script.reference()
    for path in script.files():
        content = yaml.safe_load(path.read_text()) or {}
        for key in set(content) - {"defaults"}:
            assert f"{key}." in text or f"{key}`" in text, (path, key)
