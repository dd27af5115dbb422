"""Print how much Python there is. The exit status is 1 if a limit is exceeded or a file is too long.

A line of code is one that is neither blank nor a comment nor part of a docstring. The limits leave 5 % free: who needs
more takes something away first, or says in the commit what the project gets for it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parents[1]

# Lines of code of rl, rollout, rewards, packaging and scripts together, and of the way of one task.
EVERYTHING = 41_350
ONE_TASK = 7_950

# What happens to one task, from its row to the rows that are trained on, in the simplest kind of box: these files of
# the trainer's side, and everything in rollout/ and rewards/ that these modules import. Pulls, seals, registries and
# leases belong to boxes from images and do not count; neither does another agent or kind of box that is added.
ONE_TASK_TRAINER = ("rl/train/agent_loop.py", "rl/train/engine.py", "rl/train/trainer.py", "rl/train/groups.py")
ONE_TASK_MODULES = (
    "rollout.episode",
    "rollout.records",
    "rollout.agent.claude_code",
    "rollout.sandbox.local.box",
    "rollout.proxy.server",
    "rollout.proxy.render",
    "rollout.proxy.parsers",
    "rewards.grade",
    "rewards.swebench",
    "rewards.second",
    "rewards.shape",
    "rewards.falsify",
)
LONGEST_FILE = 500

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


class Size(NamedTuple):
    """A size is the number of a file's lines: of code, of code and docstrings, and all."""

    code: int
    documented: int
    all: int


def measure(path: Path) -> Size:
    """Count the lines of a Python file."""
    text = path.read_text()
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            documents.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    filled = {number for number in code if number <= len(lines) and lines[number - 1].strip()}
    return Size(len(filled - documents), len(filled), len(lines))


def part(path: str) -> str:
    """Return the part of the project that a file belongs to: the folder below rl or rollout, or the top one."""
    top, *folders, _ = path.split("/")
    return f"{top}/{folders[0]}" if folders else top


def one_task() -> set[str]:
    """Return the files on the way of one task."""
    sys.path.insert(0, str(ROOT))  # before a copy of the packages that is installed
    graph = grimp.build_graph("rollout", "rewards", exclude_type_checking_imports=True, cache_dir=None)
    found: set[str] = set()
    waiting = list(ONE_TASK_MODULES)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph.find_modules_directly_imported_by(module)
    places = [ROOT / module.replace(".", "/") for module in found]
    files = [place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places]
    return {str(file.relative_to(ROOT)) for file in files} | set(ONE_TASK_TRAINER)


def main() -> int:
    """Print the table; return 1 if a limit is exceeded or a file is too long, else 0."""
    sizes = {
        str(path.relative_to(ROOT)): measure(path)
        for top in ("rl", "rollout", "rewards", "packaging", "scripts")
        for path in sorted((ROOT / top).rglob("*.py"))
    }
    parts = dict[str, list[Size]]()
    for path, size in sizes.items():
        parts.setdefault(part(path), []).append(size)
    limited = {
        "everything": (list(sizes.values()), EVERYTHING),
        "the way of one task": ([sizes[path] for path in sorted(one_task())], ONE_TASK),
    }

    failures: list[str] = []
    print(f"{'lines of':<20} {'files':>6} {'code':>7} {'limit':>7} {'with docstrings':>16}")
    for name, (counted, limit) in ({name: (each, None) for name, each in parts.items()} | limited).items():
        code = sum(size.code for size in counted)
        documented = sum(size.documented for size in counted)
        print(f"{name:<20} {len(counted):>6} {code:>7,} {f'{limit:,}' if limit else '':>7} {documented:>16,}")
        if limit and code > limit:
            failures.append(f"{name} has {code:,} lines of code; the limit is {limit:,}")
    tests = {str(path.relative_to(ROOT)): measure(path) for path in sorted((ROOT / "tests").rglob("*.py"))}
    for path, size in {**sizes, **tests}.items():
        if size.all > LONGEST_FILE:
            failures.append(f"{path} has {size.all} lines; split it")
    for failure in failures:
        print(f"budget: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
