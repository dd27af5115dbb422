"""Each key of the config is described, and can be found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from rl import keys
from rl.episodes.boxes import KINDS

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


def test_keys_with_their_comments() -> None:
    assert [(key.name, key.value, key.about) for key in keys.keys(TEXT)] == [
        ("a", "1", "About a, in two lines."),
        ("b", "[x, 'y # z']", "behind"),
        ("group", "", "About the group."),
        ("group.c", "${a}", "About c."),
        ("group.d", "null", ""),
        ("other.e", "{}", ""),
        ("other.f", "[1]", ""),
        ("other.g", "'# no comment'", ""),
    ]
    assert keys.header(TEXT) == "What this file is.\n\n  a command"
    assert keys.header("# About a.\na: 1\n") == ""


def test_each_shipped_key_has_a_line() -> None:
    """A key of ours and two of verl's show where it comes from."""
    shipped = keys.everything()
    about = {key.name: key.about for some in shipped.values() for key in some}
    assert len(about) > 200
    assert [(file, key.name) for file, some in shipped.items() for key in some if not key.about] == []
    assert about["sandbox.file_mb"] == "The largest file that a process may write, in MiB."
    assert about["grading.timeout_s"].endswith("(Above 0.)") and about["sft.budget"].endswith("(Above 0, or null.)")
    assert about["actor_rollout_ref.actor.optim.weight_decay"] == "verl: Weight decay"
    assert about["actor_rollout_ref.actor.megatron.context_parallel_size"] == "verl: context parallel size"


def test_a_key_of_an_outside_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "mine.yaml").write_text("# How loud it is.\nloudness: 3\n\nnew: 1\n")
    monkeypatch.setattr("rl.config.plugins.brought", lambda: [tmp_path])
    silent = [(file, key.name) for file, some in keys.everything().items() for key in some if not key.about]
    assert silent == [("agent/mine.yaml", "agent.new")]  # what the test above fails on
    assert keys.matching(["loud", "how"]) == "agent.loudness\n    3 in agent/mine.yaml\n  How loud it is."


def test_keys_are_found_by_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["keys", "FILE_MB", "mib"])
    assert keys.main() == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "sandbox.file_mb" and rest[-1] == "  The largest file that a process may write, in MiB."
    assert any(line.endswith(" in sandbox/local.yaml") for line in rest)
    monkeypatch.setattr(sys, "argv", ["keys", "no such words"])
    assert keys.main() == 1 and "no key" in capsys.readouterr().out


def test_the_index_leads_to_every_key() -> None:
    text = keys.reference()
    index = next(line for line in text.splitlines() if line.startswith("- `sandbox.file_mb`: "))
    for kind in KINDS:
        assert f"[sandbox/{kind}.yaml](#sandbox{kind}yaml)" in index
    assert "\n## sandbox/docker.yaml\n" in text
    for some in keys.everything().values():
        assert all(f"\n- `{key.name}`: [" in text for key in some)


def test_every_key_of_every_file_is_there() -> None:
    text = keys.reference()
    for path in keys.files().values():
        content = yaml.safe_load(path.read_text()) or {}
        for key in set(content) - {"defaults"}:
            assert f"{key}." in text or f"{key}`" in text, (path, key)
