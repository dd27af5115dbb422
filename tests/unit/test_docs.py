"""The documents name files, headings, modules and tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl", "rollout", "rewards")
TOPS = (*PACKAGES, "configs", "constraints", "docs", "examples", "packaging", "scripts", "tests")
DOCUMENTS = [
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
ELSEWHERE = {"test_spec.py"}  # files of other projects
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{document.name}: {link}: no such heading"


@documents
def test_paths_exist(document: Path) -> None:
    text = document.read_text()
    for path in paths(text):
        assert any(ROOT.glob(path)) or any(document.parent.glob(path)), f"{document.name} names {path}"
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for name in re.findall(r"(?<![\w/])((?:test_\w+|\w+_kit)\.py)", text):
        assert name in tests or name in ELSEWHERE, f"{document.name} names {name}"


def paths(text: str) -> Iterator[str]:
    """What looks like a file or folder of the repository. A word in capitals or in <> stands for something else."""
    for path in re.findall(rf"(?<![\w/.~$-])((?:{'|'.join(TOPS)})/[\w./*<>-]*)", text):
        path = path.rstrip(".")
        named = path.endswith("/") or "." in path.rpartition("/")[2]
        if named and not re.search(r"<|\b[A-Z]{2,}\b", path.removesuffix("README.md")):
            yield path


@documents
def test_modules_exist(document: Path) -> None:
    text = document.read_text()
    names = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    for module in re.findall(rf"-m ({names})", text):
        assert is_module(module.split(".")), f"{document.name} names {module}"
    for name in re.findall(rf"`({names})`", text):
        parts = name.split(".")
        if parts[0] == "rollout" and (document.name == "tuning.md" or not is_module(parts[:2])):
            continue  # a key of verl's group of this name
        depth = max((n for n in range(2, len(parts) + 1) if is_module(parts[:n])), default=0)
        assert depth, f"{document.name} names {name}"
        if depth < len(parts):  # a name in that module
            assert re.search(rf"\b{parts[depth]}\b", source(parts[:depth])), f"{document.name} names {name}"


def source(parts: list[str]) -> str:
    path = ROOT.joinpath(*parts)
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def is_module(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_every_document_is_in_the_reading_order() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    missing = [
        path.name for path in (ROOT / "docs").glob("*.md") if path.name not in ("README.md", "quickstart-seeds.md")
    ]
    assert [name for name in missing if f"]({name})" not in text] == []


def test_the_readme_fits_on_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
