"""Write made tasks as directories in Harbor's format, so that other systems can train on them.

    python -m rl.data.export tasks.parquet --base IMAGE --out DIR

The tasks are those of rl.data.make, rl.data.functions and the quickstart, whose snapshots are directories. Each becomes
DIR/NAME: environment/ has the snapshot and a Dockerfile that puts it into /testbed of IMAGE, which has git and the
Python of the tasks' environments; tests/ has the hidden tests and what judges their log; solution/ has the gold patch.
Nothing is built or run. rl.data.convert harbor DIR reads them back. Exit status: 0 tasks were written, 1 none was, or
the disk failed, 2 the input is wrong.
"""

from __future__ import annotations

import gzip
import inspect
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from rewards import contradiction, graders, statuses
from rewards.task import MARKERS, Task, TaskError, load_tasks
from rl.data.make.environment import VENV
from rollout import files, program
from rollout.sandbox import WORKDIR
from rollout.sandbox.files import unowned

_ABOUT = ("difficulty", "repo", "version", "maker", "licence", "base_commit", "resolve_rate")
"""Columns of a row that become metadata."""

# The verifier's box is a fresh one, whose work tree is replaced by what the agent has made of it. History and
# environment are not the agent's, so the image keeps them elsewhere, too.
_TOML = """\
schema_version = "1.4"
artifacts = [{{ source = "{workdir}", exclude = [".git", "{venv}"] }}]

[task]
name = {name}

[metadata]
{about}
[verifier]
environment_mode = "separate"

[environment]
network_mode = "no-network"
workdir = "{workdir}"
"""
_DOCKERFILE = """\
FROM {base}
USER root
ADD snapshot.tar.gz {workdir}/
WORKDIR {workdir}
{links}RUN tar -cf /kept.tar {kept}
"""
# A virtual environment names the Python of the machine on which it was made.
_LINKS = """\
RUN python=$(readlink -f "$(command -v {python})") && test -n "$python" && \\
    for name in python python3 {python}; do ln -sfn "$python" {venv}/bin/$name; done && \\
    sed -i "s|^home = .*|home = $(dirname "$python")|" {venv}/pyvenv.cfg
"""
# The script is read as a whole before it runs, and its output is kept by the shell, not in a file.
_TEST = f"""\
#!/bin/bash
cd {WORKDIR} && rm -rf .git {VENV} && tar -xf /kept.tar || exit
script=$(cat /tests/eval.sh)
log=$(bash <(printf '%s\\n' "$script") 2>&1 </dev/null)
status=$?
printf '%s\\n' "$log"
python=$(command -v python3 || echo {VENV}/bin/python)
reward=$(printf '%s\\n' "$log" | "$python" -I -B /tests/judge.py $status) && echo "$reward" >/logs/verifier/reward.txt
"""
_SOLVE = f"""\
#!/bin/bash
cd {WORKDIR} && git apply --whitespace=nowarn /solution/gold.patch
"""
_JUDGE = f'''\
"""Prints 1 if a log, read from the standard input, says that the task is resolved, else 0. Argument: the exit status.

The other modules here are copies: of swebench's parsers, and of what reads their results where the task was made.
"""

import json
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here))

import parsers
from rewards.contradiction import contradicted, readable
from rewards.statuses import without_skipped

task = json.loads((here / "task.json").read_text())
whole, started, ended = sys.stdin.buffer.read().decode(errors="replace"), *{MARKERS!r}
parse = lambda text: getattr(parsers, task["log_parser"])(text, None)
log = readable(whole.partition(started)[2].rpartition(ended)[0], parse)
found = parse(log) if log else {{}}
bad = {{test for test, status in found.items() if status in ("FAILED", "ERROR")}}
tests = {{}}
for kind in ("FAIL_TO_PASS", "PASS_TO_PASS"):
    tests[kind] = {{"success": [test for test in task[kind] if test in found and test not in bad]}}
    tests[kind]["failure"] = [test for test in task[kind] if test not in tests[kind]["success"]]
passed = {{test for test, status in found.items() if status == "PASSED"}}
tests, _ = without_skipped(tests, passed, task["not_passing"])
once = whole.count(started) == 1 == whole.count(ended)
torn = contradicted(whole, [*task["FAIL_TO_PASS"], *task["PASS_TO_PASS"]], parse)
print(int(once and not torn and int(sys.argv[1]) <= 128 and not any(kind["failure"] for kind in tests.values())))
'''


def write_task(task: Task, row: dict[str, Any], base: str, directory: Path) -> None:
    """Write a task's directory, which must not exist. row: what else the task's file says of it; base: the image.

    Raises ValueError, with the reason, if the task cannot be exported, and OSError.
    """
    if task.grader != graders.SWE_BENCH or task.eval_type != "pass_and_fail":
        raise ValueError(f"its tests are judged by {task.grader}, {task.eval_type or 'in its own way'}")
    if not task.image.startswith("dir:"):
        raise ValueError("it has an image, whose history has not been sealed, in place of a snapshot")
    if not re.search(rf"^(def )?{task.log_parser}(\(| = )", parsers := _parsers(), re.MULTILINE):
        raise ValueError(f"{task.log_parser} is none of swebench's parsers for Python")
    if any(task.eval_script.count(marker) != 1 for marker in MARKERS):
        raise ValueError("its eval script does not print each marker once")
    snapshot = task.snapshot
    if not (snapshot / ".git").is_dir():
        raise ValueError(f"{snapshot} is no repository")
    links, kept = "", ".git"
    if (snapshot / VENV).is_dir():
        python = next((snapshot / VENV / "bin").glob("python3.*")).name
        links, kept = _LINKS.format(python=python, venv=f"{WORKDIR}/{VENV}"), f".git {VENV}"
    about = {key: row[key] for key in _ABOUT if row.get(key) is not None}
    texts = {
        "task.toml": _TOML.format(
            workdir=WORKDIR,
            venv=VENV,
            name=_quoted(_name(directory.name)),
            about="".join(f"{key} = {_quoted(value)}\n" for key, value in about.items()),
        ),
        "instruction.md": task.problem_statement,
        "environment/Dockerfile": _DOCKERFILE.format(base=base, workdir=WORKDIR, links=links, kept=kept),
        "tests/test.sh": _TEST,
        "tests/eval.sh": task.eval_script,
        "tests/judge.py": _JUDGE,
        "tests/parsers.py": parsers,
        "tests/rewards/__init__.py": "",
        "tests/task.json": json.dumps(
            {key: getattr(task, key) for key in ("log_parser", "FAIL_TO_PASS", "PASS_TO_PASS", "not_passing")}
        ),
        **{f"tests/rewards/{one.__name__.rpartition('.')[2]}.py": inspect.getsource(one) for one in _COPIED},
    }
    if task.patch:
        texts |= {"solution/solve.sh": _SOLVE, "solution/gold.patch": task.patch}
    directory.mkdir()
    for path, text in texts.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, newline="")
        (directory / path).chmod(0o755 if path.endswith(".sh") else 0o644)
    _pack(snapshot, directory / "environment" / "snapshot.tar.gz")


_COPIED = (contradiction, statuses)


def _parsers() -> str:
    """Return the source of swebench's parsers for Python, without its imports of the rest of swebench."""
    from swebench.harness.constants import TestStatus  # takes seconds
    from swebench.harness.log_parsers import python

    text = inspect.getsource(python)
    status = f"from enum import Enum\n\n\n{inspect.getsource(TestStatus)}"
    text = text.replace("from swebench.harness.constants import TestStatus\n", status)
    return text.replace("from swebench.types import TestSpec\n", "TestSpec = None\n")


def _pack(snapshot: Path, archive: Path) -> None:
    """Pack a snapshot; the same snapshot makes the same bytes."""
    with (
        open(archive, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=False) as tar,
    ):
        tar.add(snapshot, ".", filter=unowned)


def _name(directory: str) -> str:
    """Return a directory's name as Harbor's org/name; each begins with a letter or a digit, and has no dot twice."""
    plain = re.sub(r"\.{2,}", ".", directory)
    owner, _, name = (part.lstrip("._-") for part in plain.rpartition("__"))
    return f"{owner}/{name}" if owner and name else f"claude-code-rl/{plain.lstrip('._-') or 'task'}"


def _quoted(value: Any) -> str:
    """Return a value of a row as TOML, in which JSON's texts and numbers mean the same."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.data.export", __doc__)
    parser.add_argument("tasks", type=Path, help="a task file with local snapshots")
    parser.add_argument("--base", metavar="IMAGE", required=True, help="what the tasks' Dockerfiles begin with")
    parser.add_argument("--out", type=Path, required=True, help="the directory to make")
    args = parser.parse_args(arguments)
    count, left = 0, []
    try:
        tasks = load_tasks(args.tasks)
        table = pyarrow.parquet.read_table(args.tasks)
        rows = table.select([name for name in _ABOUT if name in table.column_names]).to_pylist()
        with files.making(args.out) as place:
            for task, row in zip(tasks, rows, strict=True):
                try:
                    name = re.sub(r"[^\w.-]", "-", task.instance_id, flags=re.ASCII)
                    write_task(task, row, args.base, place / name)
                    count += 1
                except ValueError as error:  # a TaskError is one
                    left.append(f"left out: {task.instance_id}: {error}")
            if not count:
                raise OSError("no task can be exported")
    except (TaskError, FileExistsError) as error:
        return program.failed(f"error: {error}", 2)
    except OSError as error:
        return program.failed("\n".join([*left, f"stopped: {error}"]))
    print("\n".join([*left, f"{count} tasks in {args.out}, each with its snapshot in /testbed of {args.base}"]))
    return 0


if __name__ == "__main__":
    program.end(main)
