"""Docstrings open with a sentence: those of functions with a verb, those of modules and classes with a subject."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for top in ("rl", "rollout", "rewards") for path in sorted((ROOT / top).rglob("*.py"))]
NEVER = {
    "and",
    "as",
    "from",
    "how",
    "less",
    "of",
    "than",
    "that",
    "those",
    "what",
    "where",
    "whether",
    "which",
    "whose",
    "with",
    "without",
}
NOT_A_VERB = NEVER | {"a", "all", "an", "and", "as", "each", "for", "in", "it", "no", "not", "the", "this", "two"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_a_sentence(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = (ast.get_docstring(node) or " ").split("\n")[0]
        fragments = NOT_A_VERB if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else NEVER
        if first.split(" ")[0].rstrip(":,").lower() in fragments:
            found.append(f"{getattr(node, 'name', 'module')}: {first}")
    assert found == []
