"""This module tests `put` and `get`, on every kind of box."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.sandbox import RENEWED_CAP, Sandbox, SandboxError
from tests.boxes.kinds import BoxKit
from tests.sandboxes import sh

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_put_and_get(shared: Sandbox) -> None:
    data = os.urandom(200_000)
    below = [f"{shared.home}/a/b", f"{shared.tmpdir}/c", f"{shared.workdir}/README.md"]
    for path in ("new/dir/file", *below, "pkg/é\n"):
        await shared.put(path, b"replaced")
        await shared.put(path, data)
        assert await shared.get(path) == data
        # An ordinary file of the box's own user, who may write to it.
        look = 'stat -c %a "$0" && [ -O "$0" ] && cmp - "$0" && echo x >> "$0"'
        seen = await shared.exec(["bash", "-c", look, path], env={}, timeout_s=60, stdin=data)
        assert (seen.stdout, seen.returncode) == (b"644\n", 0), seen
    done = await sh(shared, "stat -c %a new new/dir; ls -A new/dir . pkg | grep put-")
    assert done.stdout == b"755\n755\n"  # and no file that was only on the way


async def test_put_and_get_do_not_follow_links(shared: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the machine's")
    links = {"file": secret, "dir": tmp_path, "etc": "/etc", "passwd": "/etc/passwd", "nowhere": "/none"}
    await sh(shared, ";".join(f"ln -s {target} {name}" for name, target in links.items()) + "; mkfifo fifo; mkdir real")
    before = (await sh(shared, "cat /etc/passwd")).stdout
    nested = ("dir/secret", "etc/passwd", "README.md/x", "missing/x", "nowhere/x")
    for path in ("file", "passwd", "fifo", "real", "missing", "nowhere", *nested):
        with pytest.raises(FileNotFoundError):
            await shared.get(path)
    for path in ("dir/secret", "dir/new/x", "etc/passwd", "file/x", "README.md/x", "nowhere/x"):
        with pytest.raises(SandboxError, match="put_failed"):
            await shared.put(path, b"changed")
    for path in ("file", "passwd"):
        await shared.put(path, b"own")  # replaces the link itself
        assert await shared.get(path) == b"own"
    assert secret.read_text() == "the machine's" and os.listdir(tmp_path) == ["secret"]
    assert before and (await sh(shared, "cat /etc/passwd")).stdout == before


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".", ""])
async def test_paths_outside_the_box_are_refused(shared: Sandbox, path: str) -> None:
    with pytest.raises(ValueError):
        await shared.put(path, b"")
    with pytest.raises(ValueError):
        await shared.get(path)


async def test_a_directory_at_the_root_is_made_anew(kind: BoxKit, shared: Sandbox) -> None:
    files = {"run.sh": b"#!/bin/sh\necho ran\n", "deep/down/x": b"2", "empty/": b""}
    if not kind.renews:
        with pytest.raises(SandboxError, match="put_failed"):
            await shared.renew("/new", files)
        return
    with pytest.raises(ValueError):
        await shared.get("/new/run.sh")
    before = (await sh(shared, "ls -A /etc")).stdout
    for there in ("mkdir -p /new/old; touch /new/old/x", "ln -s /etc /new", "touch /new", "mkfifo /new", "true"):
        await sh(shared, f"rm -rf /new; {there}")
        await shared.renew("/new", files)
        seen = await sh(shared, "cd /new; find . | sort; ./run.sh; [ -O deep/down/x ] && echo own")
        assert seen.stdout.decode().split() == [
            *(".", "./deep", "./deep/down", "./deep/down/x", "./empty", "./run.sh", "ran", "own")
        ], (there, seen)
    assert before == (await sh(shared, "ls -A /etc")).stdout
    assert await shared.get("/new/deep/down/x") == b"2"
    await sh(shared, "cd /new; truncate -s 1G huge; ln -s /etc/passwd link; mkfifo pipe; rm -r deep; ln -s /etc deep")
    assert await shared.get("/new/huge") == bytes(RENEWED_CAP)
    for name in ("link", "pipe", "deep/passwd", "empty", "gone"):
        with pytest.raises(FileNotFoundError):
            await shared.get(f"/new/{name}")
    await sh(shared, "rm -rf /new")
