"""Sealing: what boxes that are made from a task's image show of its history, and what is said while images are made."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.sandbox import SandboxError, sealing
from rollout.sandbox.sealing import Source, Wanted
from tests.boxes.kinds import BoxKit, Podman, kinds
from tests.sandboxes import sh

BASE = "0123456789abcdef0123456789abcdef01234567"
FROM_IMAGES = kinds("docker", "podman", "apptainer")


@FROM_IMAGES
async def test_a_sealed_history_is_one_commit(kind: BoxKit) -> None:
    box = await kind.boot(source=Source(kind.image, BASE))
    try:
        look = (
            "git log --all --format='%an %ad %s' --date=iso; echo -; git status --short; echo -;"
            "git for-each-ref --format='%(refname)'; git remote; git stash list; git reflog; echo -;"
            "git --no-replace-objects cat-file --batch-all-objects --batch-check='%(objecttype)' | sort | uniq -c;"
            "ls .git; find .git -name '*hook*' -o -name alternates -o -name ORIG_HEAD -o -name FETCH_HEAD"
        )
        log, dirty, refs, rest = (await sh(box, look)).stdout.decode().split("-\n")
        assert log == "task 2025-01-01 00:00:00 +0000 The task\n"
        assert (dirty, refs.split()) == ("", ["refs/heads/main", f"refs/replace/{BASE}"])
        assert rest.split() == [
            *(["6", "blob", "1", "commit", "2", "tree"]),
            *(["HEAD", "config", "index", "info", "objects", "refs"]),
        ]
        # What eval scripts do with the commit that they know; a file that is tracked though it is ignored.
        await sh(box, "echo changed > README.md; rm tracked.log")
        done = await sh(
            box, f"git -c core.fileMode=false diff {BASE} --stat; git checkout {BASE} README.md tracked.log"
        )
        assert done.returncode == 0 and b"2 files changed" in done.stdout, done
        assert await box.get("README.md") == b"hello\n"
        for lost in ("the fix", "stashed", "v2"):
            assert (await sh(box, f"git log --all -p | grep -q '{lost}'; echo $?")).stdout == b"1\n"
    finally:
        await box.close()


@FROM_IMAGES
async def test_a_patch_comes_first_and_hidden_paths_are_gone(kind: BoxKit) -> None:
    patch = "diff --git a/README.md b/README.md\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-hello\n+bug\n"
    box = await kind.boot(source=Source(kind.image, setup_patch=patch, hide=("pkg", "/etc/passwd", "no such")))
    try:
        assert await box.get("README.md") == b"bug\n" and await box.diff() == b""
        look = "ls; git status --short; git log -p | grep -c hello; ls /setup.diff /etc/passwd"
        # Podman writes an /etc/passwd of its own into a container whose image has none.
        own = [b"/etc/passwd"] if isinstance(kind, Podman) else []
        assert (await sh(box, look)).stdout.split() == [b"README.md", b"link", b"run.sh", b"tracked.log", b"0", *own]
        await box.put("README.md", b"hello\n")
        assert b"-bug\n+hello\n" in await box.diff()
    finally:
        await box.close()


@FROM_IMAGES
async def test_images_that_cannot_be_had_or_sealed(kind: BoxKit, tmp_path: Path) -> None:
    for source, cause in (
        (Source("localhost:1/no/such:1"), "missing_image"),
        (Source("/no/such.sif"), "missing_image"),
        (Source("dir:snapshot"), "missing_image"),
        (Source("dir:/some/snapshot"), "missing_image"),
        (Source(kind.image, "main"), "seal_failed"),
        (Source(kind.image, setup_patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"), "seal_failed"),
        (Source(kind.image, setup_patch="no patch"), "seal_failed"),
    ):
        with pytest.raises(SandboxError) as failure:
            await kind.boot(source=source)
        assert failure.value.cause == cause and "\n" not in str(failure.value)
    with pytest.raises(SandboxError) as failure:
        await kind.boot(tmp_path, source=Source("localhost:1/no/such:1"))
    assert failure.value.cause == "missing_image"


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [(1, ["3 of 3"]), (6, ["1 of 3", "2 of 3", "3 of 3"])],  # between two images
)
async def test_each_line_is_said_once(monkeypatch: pytest.MonkeyPatch, seconds: int, lines: list[str]) -> None:
    monkeypatch.setattr(sealing, "time", SimpleNamespace(monotonic=itertools.count(step=seconds).__next__))
    said: list[str] = []

    async def make(wanted: Wanted) -> tuple[str, tuple, tuple]:
        return "", (), ()

    wanted = [Wanted(name, Source("image")) for name in "abc"]
    await sealing.ahead(wanted, make, parallel=1, say=said.append, count=None)
    assert said == [f"images: {line} ready" for line in lines]
