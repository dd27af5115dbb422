"""docs/config.md is made from the comments in configs/, and is up to date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

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


def test_the_reference_is_up_to_date() -> None:
    told = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


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


def test_every_key_of_every_file_is_there(script: ModuleType) -> None:
    text = script.reference()
    for path in script.files():
        content = yaml.safe_load(path.read_text()) or {}
        for key in set(content) - {"defaults"}:
            assert f"{key}." in text or f"{key}`" in text, (path, key)
