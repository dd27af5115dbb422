"""A box of which a program has taken all processes ends that program, and is no failure of the infrastructure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.sandbox import SandboxError
from rollout.sandbox.docker import box as docker_box
from rollout.sandbox.docker.box import DockerSandbox


@pytest.mark.parametrize("listed", [["first", "other"], None])
async def test_a_box_in_which_no_program_can_be_started(listed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has killed the shell that was to end it. Only what the engine does not tell is its failure."""
    monkeypatch.setattr(docker_box, "_GRACE_S", 0.05)
    killed: list[str] = []

    async def call(what: str, *_: Any, **__: Any) -> Any:
        if what in ("exec_create", "processes") and (what != "processes" or listed is None):
            raise SandboxError("docker_failed", "read init-p: connection reset by peer")
        killed.extend(["kill"] * (what == "kill"))
        return {"processes": listed, "state": {"Running": True}, "kill": None}[what]

    names = {name: name for name in ("processes", "state", "kill")}
    client = SimpleNamespace(exec_create="exec_create", exec_start="exec_start")
    box: Any = object.__new__(DockerSandbox)
    box.container, box._up, box._call, box._engine = "box", True, call, SimpleNamespace(**names, client=client)
    if listed is None:
        with pytest.raises(SandboxError, match="does not tell which processes"):
            await box._settle(137)
        return
    assert await box._settle(137) == 137 and killed == ["kill"]
