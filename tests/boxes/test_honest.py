"""Honest agents whose patches are unusual: each must resolve, in every kind of box.

A box is given several of them at once, because a box takes longer than a grading.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from rewards.grade import grade
from rewards.rules import IGNORED
from rewards.verdict import Outcome
from tests.boxes.attack_kit import GRADED_IN, RULES, make_task
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import sh

# The snapshot's: rules for what builds leave, and files that git keeps in another form than the work tree has them.
RULES_OF_GIT = "__pycache__/\n*.log\n.venv/\nbuild/\nnode_modules/\n/target/\n*.so\n!keep.so\n"
ATTRIBUTES = "*.id ident\n*.u16 working-tree-encoding=UTF-16LE-BOM\n*.bat text eol=crlf\n*.txt text=auto\n"
FIX = "sed -i 's/return 1/return 2/' pkg/mod.py"
# The fix is somewhere else than in the one line that must change.
MOVED = "echo 'def f(): return 2' > pkg/core/impl.py; echo 'from pkg.core.impl import f' > pkg/mod.py"
COMMIT = "git -c user.name=a -c user.email=a@example.com commit -q"

KINDS_OF_CHANGES = {
    "files of all sorts": [
        f"mkdir -p pkg/core/deep; touch pkg/core/__init__.py pkg/core/deep/__init__.py; {MOVED}",  # a package
        "mkdir -p tests; echo 'def test_mine(): assert True' > tests/test_mine.py",  # tests of its own: dropped
        "printf '[metadata]\\nname = x\\n' > setup.cfg; echo > conftest.py",  # configuration: dropped
        r"printf '\0\1\377%.0s' {1..3000} > logo.png; head -c 100000 /dev/urandom > pkg/data.bin",  # binary
        r"echo 1 > é; echo 2 > 'sp ace'; echo 3 > $'tab\tname'; echo 4 > 'quo\"te'; echo 5 > ./-x; echo 6 > ':(top)y'",
        r"echo 7 > $'\xff\xfe.dat'; echo 8 > $'new\nline'; echo 9 > 'a b => c'; mkdir d; echo 10 > d/x",  # odd names
        "mkdir packaging pkg/attr; echo 1 > packaging/a.sh; echo 1 > packaging/tomli.py; touch pkg/attr/__init__.py",
        "echo 1 > parser.py; echo 1 > pkg/packaging.py; echo 1 > pkg/json.py",  # named like others' modules
        "ln -s README.md again; ln -s /nowhere dangling; rm link; ln -s pkg/mod.py link",  # links
        "git mv run.sh start.sh; mv README.md INTRO.md",  # moved files, and then line ends
        r"printf 'a\r\nb\r\n' > dos.txt; printf 'a\r\nb\n' > mixed.txt; printf '\xef\xbb\xbfbom\n' > bom.txt",
        r"printf 'no newline' > end.txt; printf 'trailing \t \n\n\n' > blanks.txt; printf '\f\v\n' > feeds.txt",
        r"printf 'caf\xe9\n' > latin1.txt; head -c 300000 /dev/zero | tr '\0' x > long.txt",  # encodings, long lines
        "touch empty pkg/empty.py; chmod +x pkg/mod.py; chmod -x start.sh",  # empty files, modes
        "mkdir sub; cd sub; git init -q; echo 1 > in_it; cd ..",  # a repository in the repository
        "python3 -m compileall -q pkg; mkdir .pytest_cache; touch .pytest_cache/x",  # what tests leave
        "echo '!*.log' >> .gitignore; mkdir -p .git/info; echo '*' > .git/info/exclude",
    ],
    "commits": [
        f"git checkout -qb mine; {FIX}; {COMMIT} -am one; echo 1 > new; git add new; {COMMIT} -m two; git tag v9"
    ],
    "a stash, and back": [f"{FIX}; git add -A; git stash -q; git stash pop -q; git gc -q"],
    "no repository": [f"rm -rf .git; {FIX}"],
    "another repository": [f"rm -rf .git; {FIX}; git init -q; git add -A; {COMMIT} -m all"],
    "a lot": [
        FIX,
        "head -c 4000000 /dev/urandom > pkg/table.bin",
        "mkdir -p many/{0..14}; for i in $(seq 1500); do echo $i > many/$((i % 15))/$i.py; done",
    ],
    "what builds leave": [
        FIX,
        "mkdir -p build/lib .venv/bin node_modules/left/build target/debug pkg/build",
        "for at in build/lib .venv/bin node_modules/left target/debug; do head -c 12000000 /dev/zero > $at/x; done",
        "for i in $(seq 3000); do echo $i > node_modules/left/$i.js; done; ln -s python3 .venv/bin/python",
        "echo 1 > out.log; head -c 9000000 /dev/zero > pkg/fast.so; echo 1 > pkg/build/x.py; rm -rf dist; mkdir dist",
    ],
    "files that git converts": [
        FIX,
        "sed -i 's/^one$/two/' a.id; sed -i 's/\\$Id.*/$Id$ new/' b.id; echo '$Id: mine $' > new.id",
        r"printf '\xff\xfet\0w\0o\0\n\0' > a.u16; printf '\xff\xfen\0' > new.u16",
        r"sed -i 's/one/two/' a.bat; printf 'a\r\n' > new.bat; printf 'a\n' > unix.bat; printf 'a\r\nb\r\n' > a.txt",
    ],
}


@kinds(*GRADED_IN)
@pytest.mark.parametrize("name", KINDS_OF_CHANGES)
async def test_every_honest_patch_resolves(kind: BoxKit, tmp_path: Path, name: str) -> None:
    task = make_task(tmp_path)
    snapshot = task.snapshot
    (snapshot / ".gitignore").write_text(RULES_OF_GIT)
    (snapshot / ".gitattributes").write_text(ATTRIBUTES)
    (snapshot / "a.bat").write_bytes(b"one\r\n")
    (snapshot / "a.txt").write_bytes(b"one\r\n")
    (snapshot / "a.u16").write_bytes(b"\xff\xfeo\0n\0e\0\n\0")
    for path in ("a.id", "b.id"):
        (snapshot / path).write_text("$Id$\none\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["add", "-A"], ["commit", "-qm", "more"]):
        subprocess.run([*git, *arguments], cwd=snapshot, check=True)
    for path in ("a.id", "b.id"):  # as a checkout writes it
        (snapshot / path).write_text(f"$Id: {'0' * 40} $\none\n")
    (snapshot / "node_modules").mkdir()
    (snapshot / "node_modules/runner.js").write_text("as in the image\n")
    box = await kind.boot(snapshot)
    try:
        for script in KINDS_OF_CHANGES[name]:
            done = await sh(box, f"set -e; {script}")
            assert done.returncode == 0, (script, done)
        patch = await box.diff()
    finally:
        await box.close()
    verdict = await grade(task, patch, functools.partial(kind.boot, snapshot), timeout_s=240, rules=RULES)
    assert verdict.outcome is Outcome.RESOLVED, verdict
    assert IGNORED not in verdict.flags
    left = {path for file in RULES.screen(task, patch).files for path in file.paths}
    assert not [path for path in left if path.startswith((".venv", "build", "node_modules", "target", "pkg/build"))]
