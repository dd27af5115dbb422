"""This module tests `diff`: the same patch from every kind of box, whatever the agent did to its repository.

A box of plain processes is the measure: its patch must make the work tree of what the box was booted from. All other
kinds must give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rollout.sandbox import LEFT_OUT, PATCH_CAP, PatchTooLarge, Sandbox, treediff
from rollout.sandbox.local.box import boot_local
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import sh

CHANGES = {
    "some of all": "echo more >> README.md; rm pkg/mod.py; chmod -x run.sh; ln -sf /etc/passwd link; mkdir -p new/deep;"
    r"printf '\0\1\377%.0s' {1..300} > new/deep/bin; touch empty 'sp ace' $'tab\tname'; echo x > debug.log",
    "a directory becomes a link": "mv pkg lib; ln -s lib pkg",
    "a directory becomes a file": "rm -r pkg; echo file > pkg",
    "a directory becomes a fifo": "rm -r pkg; mkfifo pkg",
    "a file becomes a directory": "rm README.md; mkdir -p README.md/x; echo 1 > README.md/x/y",
    "a link becomes a directory": "rm link; mkdir link; echo 1 > link/passwd; echo 2 > link/README.md",
    "a directory is made again": "rm -r pkg; mkdir pkg; echo 1 > pkg/other.py",
    "a directory that cannot be read": "mkdir new; echo 1 > new/x; chmod 000 new",
    "hard links": "ln README.md pkg/again; ln pkg/mod.py one; ln one two",
    "names": r"echo 1 > é; echo 2 > $'\xff\xfe'; echo 3 > $'new\nline'; mkdir -p a/b/c; echo 4 > a/b/c/-x",
    "junk and more": "mkdir -p pkg/__pycache__ .pytest_cache n/.git; touch pkg/__pycache__/a.pyc b.pyc n/.git/x;"
    "touch .pytest_cache/v; ln -s x c.pyc; mkfifo p; echo 1 > __pycache__",
    "much": "for i in $(seq 60); do mkdir -p m/$i; echo $i > m/$i/f; done; rm -r pkg; ln README.md m/1/n; mkfifo m/p",
    "much, and a directory becomes a file": "for i in $(seq 60); do echo $i > m$i; done; rm -r pkg; echo 1 > pkg",
    "all gone": "rm -rf ./* .gitignore",
    "history": "rm -rf .git; ln -s / .git; echo 'X = 1' >> pkg/mod.py",
    # Only the snapshot's rules count, for files that its commit lacks: `*.log`, but not tracked.log.
    "ignored": "head -c 9000000 /dev/zero > big.log; mkdir a; echo 1 | tee a/b.log > a/c; echo more >> tracked.log;"
    "echo '*' > pkg/.gitignore; echo '!*.log' > .gitignore; echo 1 > pkg/new",
    "ignored, and in the snapshot": "echo 2 > built.log; echo 'X = 1' >> pkg/mod.py; chmod +x built.log",
    "ignored, and much": "for i in $(seq 60); do echo $i > $i.log; done; echo 1 > x; rm built.log",
    "ignored, and names": r"for i in $(seq 5); do head -c 2000000 /dev/zero > $i$'\xff.log'; done; echo 1 > $'\xff'",
    "attributes": "echo '*.py -diff -text filter=x diff=x' > .gitattributes; git config filter.x.clean 'echo no';"
    "git config diff.external 'echo no'; git config core.fsmonitor 'echo no'; echo 'X = 1' >> pkg/mod.py",
}
NO_CHANGES = {
    "nothing": "true",
    "only times and modes that do not count": "touch README.md pkg; chmod 600 README.md; cp -a run.sh x; mv x run.sh",
    "only what is ignored": "echo 2 | tee built.log > new.log",
    "only junk": "mkdir -p pkg/__pycache__ .pytest_cache; touch pkg/__pycache__/a.pyc b.pyc .pytest_cache/v; mkfifo p",
}
# Against a change that must be in the patch all the same.
HOSTILE = [
    "rm -rf .git",
    "rm -rf .git; echo 'gitdir: /etc' > .git",
    "rm -rf .git; ln -s / .git",
    "git add -A; git -c user.name=a -c user.email=a commit -qm hidden",
    "git init -q pkg",
    "echo '*' >> .gitignore",
    "echo '*.py -diff -text filter=x diff=x' > .gitattributes; git config filter.x.clean 'echo no';"
    "git config diff.x.textconv 'echo no'; git config diff.external 'echo no'; git config diff.noprefix 1",
    "git update-index --assume-unchanged pkg/mod.py; git config core.worktree /; touch .git/index.lock",
    "git config core.fsmonitor 'echo no'; git config core.hooksPath /tmp; git config core.excludesFile /x",
    "git config core.autocrlf true; echo '*.py filter=x' > .git/info/attributes",
]


def tree_of(root: Path) -> dict[str, object]:
    """Return what a patch has to carry: each link's target, and each other file's content and whether it is
    executable. Left out: git's own files, those that Python and pytest leave behind, and those that are ignored."""
    found: dict[str, object] = {}
    for base, directories, names in os.walk(root):
        links = [name for name in directories if os.path.islink(os.path.join(base, name))]
        directories[:] = [name for name in directories if name not in (".git", "__pycache__", ".pytest_cache")]
        for path in (Path(base, name) for name in [*names, *links] if name != ".git"):
            if path.suffix == ".log" and path.name != "tracked.log":
                continue
            if path.is_symlink():
                found[str(path.relative_to(root))] = os.readlink(path)
            elif path.is_file() and path.suffix != ".pyc":
                found[str(path.relative_to(root))] = os.access(path, os.X_OK), path.read_bytes()
    return found


async def plain_diff(repository: Path, script: str) -> bytes:
    """Return the patch of a plain box after the script, once it is known to make the box's work tree."""
    box = await boot_local(repository, isolation="none")
    try:
        assert (await sh(box, script)).returncode == 0
        patch = await box.diff()
        copy = box.root / "applied"
        shutil.copytree(repository, copy, symlinks=True)
        if patch:
            subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=copy, input=patch, check=True)
        assert tree_of(copy) == tree_of(box.root / "tree")
        return patch
    finally:
        await box.close()


@pytest.fixture(scope="session")
def expected() -> dict[str, bytes]:
    """The patches of plain boxes by name, each made once."""
    return {}


@kinds("plain", "bwrap", "docker", "podman", "apptainer", "kubernetes")
@pytest.mark.parametrize("name", [*CHANGES, *NO_CHANGES])
async def test_every_change_is_in_the_patch(kind: BoxKit, box: Sandbox, name: str, expected: dict[str, bytes]) -> None:
    script = (CHANGES | NO_CHANGES)[name]
    if name not in expected:
        expected[name] = await plain_diff(kind.repository, script)
        assert bool(expected[name]) == (name in CHANGES)
        assert expected[name].count(LEFT_OUT) == (
            "in the snapshot" in name or name in ("ignored, and much", "all gone")
        )
    assert (await sh(box, script)).returncode == 0
    assert await box.diff() == expected[name]


@kinds("plain", "bwrap", "apptainer")
@pytest.mark.parametrize("attack", HOSTILE)
async def test_the_diff_is_out_of_the_agents_reach(kind: BoxKit, box: Sandbox, tmp_path: Path, attack: str) -> None:
    await sh(box, f"echo 'X = 1' >> pkg/mod.py; echo new > pkg/new.py; {attack}")
    tree = tmp_path / "tree"
    shutil.copytree(kind.repository, tree, symlinks=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=tree, input=await box.diff(), check=True)
    assert (tree / "pkg/mod.py").read_text().endswith("X = 1\n")
    assert (tree / "pkg/new.py").read_text() == "new\n"


@kinds("plain", "docker", "podman", "kubernetes")
async def test_too_large_a_diff_is_refused(box: Sandbox) -> None:
    await sh(box, f"head -c {PATCH_CAP + 1} /dev/zero > big")
    with pytest.raises(PatchTooLarge):
        await box.diff()
    await sh(box, f"rm big; truncate -s {PATCH_CAP // 30} m; for i in $(seq 40); do cp m m$i; done")
    with pytest.raises(PatchTooLarge):
        await box.diff()


@pytest.mark.parametrize(("limit", "value"), [("_MOST_FILES", 3), ("_GIT_S", 0)])
def test_a_diff_that_is_hard_to_make_is_the_policys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    for number in range(4):
        (tmp_path / "new" / f"{number}").touch()
    old, new = (treediff.Directory(os.fsencode(tmp_path / name)) for name in ("old", "new"))
    assert treediff.patch_between(old, new, tmp_path / "scratch", 1000)
    monkeypatch.setattr(treediff, limit, value)
    with pytest.raises(PatchTooLarge):
        treediff.patch_between(old, new, tmp_path / "again", 1000)


@kinds("docker", "kubernetes")
@pytest.mark.parametrize("name", ["some of all", "nothing", "gone"])
async def test_a_snapshot_in_a_container(kind: BoxKit, name: str) -> None:
    """The boxes of local tasks: the image has only the tools, and the work tree is a copy of the snapshot."""
    gone = name == "gone"
    script = "chmod u+w /; cd /; rm -r /testbed" if gone else (CHANGES | NO_CHANGES)[name]
    box, plain = await kind.boot(kind.repository), await boot_local(kind.repository, isolation="none")
    try:
        await box.put(f"{box.home}/x", b"1")
        await sh(box, script)
        await sh(plain, "rm -rf ./* .gitignore" if gone else script)
        assert await box.diff() == await plain.diff()
    finally:
        await box.close()
        await plain.close()


@kinds("docker", "podman")
async def test_a_work_tree_that_is_gone(box: Sandbox) -> None:
    await sh(box, "chmod u+w /; cd /; rm -rf /testbed; ln -s /etc /testbed")
    patch = (await box.diff()).decode()
    assert patch.count("deleted file mode") == 6 and "new file" not in patch and "passwd" not in patch
