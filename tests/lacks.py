"""This module says what tests do that need a program which the machine does not have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

LACKS = "this machine lacks: "


def lacks(words: str) -> NoReturn:
    """Skip the test; fail it in continuous integration, which installs what tests need."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{LACKS}{words}")
