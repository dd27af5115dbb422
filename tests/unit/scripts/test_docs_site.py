"""The documents' links lead within the site, and what leads nowhere stays for MkDocs to report."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("docs_site", Path(__file__).parents[3] / "scripts" / "docs_site.py")
docs_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs_site)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "README.md",
        "docs/README.md",
        "docs/recipe.md",
        "docs/a.png",
        "configs/a.yaml",
        "examples/own/README.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "link", "on_site"),
    [
        ("README.md", "docs/recipe.md#the-recipe", "recipe.md#the-recipe"),
        ("README.md", "docs/README.md", "order.md"),
        ("README.md", "docs/a.png", "a.png"),
        ("docs/recipe.md", "../README.md", "index.md"),
        ("docs/recipe.md", "../configs/a.yaml", "files/configs/a.yaml.md"),
        ("docs/recipe.md", "../examples/own/README.md", "examples/own/README.md"),
        ("examples/own/README.md", "../../docs/recipe.md", "../../recipe.md"),
        ("examples/own/README.md", "../../configs/a.yaml", "../../files/configs/a.yaml.md"),
        # As they are:
        ("docs/recipe.md", "#the-recipe", "#the-recipe"),
        ("docs/recipe.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/recipe.md", "../configs/none.yaml", "../configs/none.yaml"),
        ("docs/recipe.md", "../configs", "../configs"),
    ],
)
def test_a_link_leads_within_the_site(repository: Path, path: str, link: str, on_site: str) -> None:
    text, files = docs_site.relinked(f"See [this]({link}), too.", path, docs_site.documents())
    assert text == f"See [this]({on_site}), too."
    assert files == ({"configs/a.yaml"} if on_site.endswith(".yaml.md") else set())


def test_the_pages_are_in_the_order_of_the_readme_of_docs(repository: Path) -> None:
    (repository / "docs" / "README.md").write_text(
        "1. [b.md](b.md): b\n2. [a.md](a.md): a\n\n- [c.md](c.md): c\n\nSee [d](d.md)."
    )
    _, first, then, extend = docs_site.order()
    assert first == {"In this order": ["b.md", "a.md"]}
    assert then == {"By need": ["c.md", "config.md"]}
    assert extend == {"Extend": ["contributing.md", "examples/own/README.md", "changelog.md"]}


def test_a_file_that_is_no_document_is_a_page(repository: Path) -> None:
    assert "# configs/a.yaml\n\n````yaml\ntext of configs/a.yaml\n````" in docs_site.as_page("configs/a.yaml")
