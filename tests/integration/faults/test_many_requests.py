"""Thousands of hostile HTTP requests to the proxy, each of them answered."""

from __future__ import annotations

import pytest

from tests.property.test_http_fuzz import Range, fire, shooting

__all__ = ["shooting"]


def test_every_request_is_answered(shooting: Range, caplog: pytest.LogCaptureFixture) -> None:
    fire(shooting, 420, caplog)
