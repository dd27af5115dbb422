"""Make a task file from commits that fix a bug and bring tests: see README.md beside this file."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rewards.task import Task

TEST_FILE = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|[^/]*_test\.py$|conftest\.py$)")
EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
git apply -v - <<'END_OF_HIDDEN_TESTS'
{tests}END_OF_HIDDEN_TESTS
: '>>>>> Start Test Output'
python3 -m pytest -rA --tb=short -p no:cacheprovider {files}
: '>>>>> End Test Output'
"""


def git(repository: Path, *arguments: str, stdin: str | None = None) -> str:
    """Run git in a repository and return its output."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout


def snapshot(repository: Path, commit: str, directory: Path) -> str:
    """Write the tree of a commit as a repository with a single commit, whose id is returned: no history, no answer."""
    directory.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", repository, "archive", commit], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
    git(directory, "init", "--quiet", "--template=")
    git(directory, "add", "--all", "--force")
    author = ("-c", "user.name=tasks", "-c", "user.email=tasks@example.com")
    git(directory, *author, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message=Snapshot")
    return git(directory, "rev-parse", "HEAD").strip()


def passing(snapshot: Path, patches: list[str], files: list[str]) -> set[str]:
    """Return the names of the tests that pass in a copy of the snapshot with these patches."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        git(snapshot, "clone", "--quiet", str(snapshot), str(copy))
        for patch in patches:
            git(copy, "apply", "-", stdin=patch)
        command = [sys.executable, "-m", "pytest", "-rA", "--tb=no", "-p", "no:cacheprovider", *files]
        environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        output = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return set(re.findall(r"^PASSED (\S+)", output, re.MULTILINE))


def make_task(repository: Path, commit: str, statement: str | None, out: Path) -> Task:
    """Write the snapshot of one task and return the task. SystemExit says why a commit makes none."""
    commit = git(repository, "rev-parse", "--short=12", commit).strip()
    changed = git(repository, "diff", "--name-only", "--no-renames", f"{commit}^", commit).splitlines()
    tests = [path for path in changed if TEST_FILE.search(path)]
    code = [path for path in changed if path not in tests]
    if not tests or not code:
        sys.exit(f"{commit}: a commit must change code and tests; it changes {', '.join(changed) or 'nothing'}")
    gold, hidden = (
        git(repository, "diff", "--no-renames", "--binary", f"{commit}^", commit, "--", *paths)
        for paths in (code, tests)
    )
    name = f"{repository.resolve().name}-{commit}"
    base = snapshot(repository, f"{commit}^", out / "repos" / name)
    left = git(repository, "diff", "--name-only", "--no-renames", "--diff-filter=d", f"{commit}^", commit).splitlines()
    files = [path for path in tests if path in left and re.search(r"(^|/)test_[^/]*\.py$|_test\.py$", path)]
    before, after = (passing(out / "repos" / name, patches, files) for patches in ([hidden], [hidden, gold]))
    if not after - before:
        sys.exit(f"{commit}: no test fails without the fix and passes with it")
    row = {
        "instance_id": name,
        "image": f"dir:repos/{name}",
        "repo": repository.resolve().name,
        "version": "1",
        "base_commit": base,
        "problem_statement": statement or git(repository, "log", "-1", "--format=%B", commit).strip(),
        "FAIL_TO_PASS": sorted(after - before),
        "PASS_TO_PASS": sorted(after & before),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVAL_SCRIPT.format(tests=hidden, files=" ".join(files)),
        "patch": gold,
    }
    return Task.from_row(row, out)


def main() -> None:
    """Write OUT/tasks.parquet and OUT/repos/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("commits", nargs="+", metavar="commit", help="fixes a bug and brings tests")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--statement", type=Path, help="the problem statement, with a single commit")
    options = parser.parse_args()
    if options.statement and len(options.commits) > 1:
        parser.error("--statement is for a single commit")
    statement = options.statement.read_text() if options.statement else None
    tasks = [make_task(options.repository, commit, statement, options.out) for commit in options.commits]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([task.to_row() for task in tasks]), options.out / "tasks.parquet"
    )
    for task in tasks:
        print(f"{task.instance_id}: {len(task.FAIL_TO_PASS)} tests to fix, {len(task.PASS_TO_PASS)} to keep")


if __name__ == "__main__":
    main()
