"""This module tests podman where it differs from Docker."""

from __future__ import annotations

import pytest
from docker.errors import APIError

from rollout.sandbox import Limits
from rollout.sandbox.docker.engine import get_engine
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import sh


@kinds("podman")
async def test_a_box_does_not_hide_its_size(kind: BoxKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman cannot tell the size of a box while its files change; then the box is paused for a moment."""
    box = await kind.boot(limits=Limits(disk_bytes=32 * 2**20))
    client, seen = get_engine().client, []
    ask = client.containers

    def containers(**options: object) -> list[dict]:
        found = ask(**options)
        if options.get("size"):
            seen.append(found[0]["State"])
            if seen[-1] != "paused":
                raise APIError("lstat: no such file or directory")
        return found

    monkeypatch.setattr(client, "containers", containers)
    try:
        assert (await sh(box, "sleep 1; echo here")).stdout == b"here\n"
        done = await sh(box, "for n in 1 2 3; do head -c 20M /dev/zero >$n; done; sleep 60; echo here")
        assert (done.returncode, done.stdout) == (137, b"") and {*seen} == {"running", "paused"}
    finally:
        await box.close()
