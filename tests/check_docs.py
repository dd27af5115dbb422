"""This program of `make lint` finds what documents name and what does not exist: files, modules and tests.

Where links lead is checked when the site is built (mkdocs.yml).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rl import keys

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl", "rollout", "rewards")
TOPS = (*PACKAGES, "configs", "constraints", "docs", "examples", "packaging", "scripts", "tests")
OTHERS = tuple(f"{folder}/**/*.md" for folder in ("examples", "packaging", ".github"))
DOCUMENTS = [
    path for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", *OTHERS) for path in sorted(ROOT.glob(pattern))
]
ELSEWHERE = {"test_spec.py", "pkg/test_utils.py", "polite/test_polite.py"}  # files of other projects
README_LINES = 120


def wrong_paths(document: Path) -> Iterator[str]:
    """Yield what looks like a file or folder and is none. A word in capitals or in <> stands for something else."""
    text = document.read_text()
    for path in re.findall(rf"(?<![\w/.~$-])((?:{'|'.join(TOPS)})/[\w./*<>-]*)", text):
        path = path.rstrip(".")
        named = path.endswith("/") or "." in path.rpartition("/")[2]
        if not named or re.search(r"<|\b[A-Z]{2,}\b", path.removesuffix("README.md")):
            continue
        if not any(ROOT.glob(path)) and not any(document.parent.glob(path)):
            yield f"{path}: no such file"
    tests = [f"/{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("*.py")]
    for name in re.findall(r"(?<![\w/.])((?:\w+/)*(?:test_\w+|\w+_kit)\.py)", text):
        if not any(path.endswith(f"/{name}") for path in tests) and name not in ELSEWHERE:
            yield f"{name}: no such file of tests"


def wrong_modules(document: Path) -> Iterator[str]:
    """Yield the modules, and names in them, that do not exist."""
    text = document.read_text()
    names = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    yield from (f"{name}: no such module" for name in re.findall(rf"-m ({names})", text) if not source(name.split(".")))
    for name in re.findall(rf"`({names})`", text):
        parts = name.split(".")
        if parts[0] == "rollout" and (f"actor_rollout_ref.{name}" in set_keys() or not source(parts[:2])):
            continue  # a key of verl's group of this name
        depth = max((n for n in range(2, len(parts) + 1) if source(parts[:n])), default=0)
        if not depth or (depth < len(parts) and not re.search(rf"\b{parts[depth]}\b", source(parts[:depth]))):
            yield f"{name}: no such module, or no such name in it"


@functools.cache
def set_keys() -> set[str]:
    """Return the keys that configs set."""
    return {key.name for some in keys.everything().values() for key in some}


def source(parts: list[str]) -> str:
    """Return the text of a module, "" if there is none."""
    path = ROOT.joinpath(*parts)
    found = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()]
    return found[0].read_text() or " " if found else ""


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    wrong = [
        f"{document.relative_to(ROOT)}: {words}"
        for document in DOCUMENTS
        for check in (wrong_paths, wrong_modules)
        for words in check(document)
    ]
    if len((ROOT / "README.md").read_text().splitlines()) > README_LINES:
        wrong.append(f"README.md: more than {README_LINES} lines")
    print("\n".join(wrong), end="\n" * bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
