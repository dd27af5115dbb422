"""This module tests sealing: what boxes that are made from a task's image show of its history, and what is said while
images are made.
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.sandbox import SandboxError, sealing
from rollout.sandbox.sealing import Source, Wanted
from tests.boxes.kinds import BoxKit, Kubernetes, Podman, kinds
from tests.sandboxes import sh

BASE = "0123456789abcdef0123456789abcdef01234567"
FROM_IMAGES = kinds("docker", "podman", "apptainer", "kubernetes")


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
    hide, outside = ("pkg", "no such"), ("/etc/passwd",)
    if isinstance(kind, Kubernetes):
        with pytest.raises(SandboxError, match="cannot hide"):
            await kind.boot(source=Source(kind.image, hide=outside))
        outside = ()
    box = await kind.boot(source=Source(kind.image, setup_patch=patch, hide=(*hide, *outside)))
    try:
        assert await box.get("README.md") == b"bug\n" and await box.diff() == b""
        look = "ls; git status --short; git log -p | grep -c hello; ls /setup.diff /etc/passwd"
        # Podman writes an /etc/passwd of its own into a container whose image has none.
        own = [b"/etc/passwd"] if isinstance(kind, Podman) or not outside else []
        there = [b"README.md", b"built.log", b"link", b"run.sh", b"tracked.log"]
        assert (await sh(box, look)).stdout.split() == [*there, b"0", *own]
        await box.put("README.md", b"hello\n")
        assert b"-bug\n+hello\n" in await box.diff()
    finally:
        await box.close()


@kinds("docker")
async def test_what_may_hold_the_solution_is_removed_or_reported(kind: BoxKit) -> None:
    """The script runs here a second time, in a box, which is no image: it shows what it finds, and what it leaves."""
    prepare = """
        mkdir -p /root/.cache/pip /opt/site-packages/pkg packages/site-packages/pkg
        touch pkg/__init__.py /opt/site-packages/pkg/__init__.py packages/site-packages/pkg/__init__.py
        for at in /opt/other/_vendor /opt/pkg-1.egg /opt build/lib; do
          mkdir -p $at/pkg; touch $at/pkg/__init__.py
        done
        mkdir my_data.egg-info
        touch my_data.egg-info/PKG-INFO /opt/pkg-2-py3-none-any.whl /opt/My.Data-3.tar.gz pkg-4.zip /opt/pkgs-5.zip
        touch /root/.cache/pip/wheel /opt/past.bundle /opt/x.pack fix.orig
        echo 'x = 1' >pkg/good.py; echo 'x = 2' >pkg/bad.py; touch -d @1700000000 pkg/*.py
        git add -f pkg/__init__.py pkg/tracked.pyc
    """
    box = await kind.boot()
    try:
        good, bad = (struct.pack("<4I", 0, 0, 1_700_000_000, size) + b"code" for size in (6, 7))
        names = (
            "__pycache__/good.cpython-311.pyc",
            "__pycache__/bad.cpython-311-pytest-8.1.pyc",
            "gone.pyc",
            "tracked.pyc",
        )
        for name, data in zip(names, (good, bad, good, good), strict=True):
            await box.put(f"pkg/{name}", data)
        assert (await sh(box, prepare)).returncode == 0
        done = await box.exec(
            ["bash", "-c", sealing.SCRIPT, "seal", box.workdir, box.home, "0", ""], env={}, timeout_s=60
        )
        assert done.returncode == 0, done.stderr
        seen = ("stale", "cache", "leftover", "repository", "copy", "archive")
        facts = done.stdout.decode().splitlines()
        assert {line for line in facts if line.split()[0] in seen} == {
            f"stale pkg/{names[1]}",
            f"stale pkg/{names[2]}",
            "cache /root/.cache/pip",
            "leftover ./fix.orig",
            "repository /opt/past.bundle",
            "repository /opt/x.pack",
            "copy /opt/site-packages/pkg",
            "copy /opt/other/_vendor/pkg",
            "copy /opt/pkg-1.egg/pkg",
            f"copy {box.workdir}/build/lib/pkg",
            "archive /opt/pkg-2-py3-none-any.whl",
            "archive /opt/My.Data-3.tar.gz",
            f"archive {box.workdir}/pkg-4.zip",
        }
        left = await sh(box, "find pkg -name '*.pyc' | sort; ls -d /root/.cache/pip")
        assert left.stdout.split() == [b"pkg/__pycache__/good.cpython-311.pyc", b"pkg/tracked.pyc"]
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
