"""This module lets pip install pytest without an index."""

from __future__ import annotations

import pytest

from tests.integration.make_kit import write_wheels
from tests.integration.vllm_kit import vllm

__all__ = ["vllm"]


@pytest.fixture
def offline_pip(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip install pytest from wheels of what is installed here: no test needs a package index."""
    directory = tmp_path_factory.mktemp("wheels")
    write_wheels(directory)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
