"""Say which documents the site has: a hook of MkDocs (mkdocs.yml).

The pages are the repository's Markdown files as they are, the reference of all config keys, and the files of other
kinds that a document links to. Links are written anew, so that they lead to these pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rl import keys

ROOT = Path(__file__).resolve().parents[1]
START, ORDER, KEYS = "index.md", "order.md", "config.md"
# Documents whose places on the site are not those that they have in docs/.
ELSEWHERE = {
    "README.md": START,
    "docs/README.md": ORDER,
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FILES = "files/"  # pages that no list names


def documents() -> dict[str, str]:
    """Return the place of each document on the site by its place in the repository."""
    found = dict(ELSEWHERE)
    places = {"docs/": "", "examples/": "examples/", "packaging/": "packaging/", ".github/": f"{FILES}github/"}
    for folder, place in places.items():
        for file in sorted((ROOT / folder).rglob("*.md")):
            path = file.relative_to(ROOT).as_posix()
            if file.name != "instruction.md":  # a task's
                found.setdefault(path, place + path.removeprefix(folder))
    return found


def order() -> list[dict[str, list[Any]]]:
    """Return the site's navigation: the two lists of docs/README.md, and what is not in docs/."""
    text = (ROOT / "docs" / "README.md").read_text()
    first = re.findall(r"^\d+\. \[[^]]*\]\(([^)]+)\)", text, re.MULTILINE)
    then = re.findall(r"^- \[[^]]*\]\(([^)]+)\)", text, re.MULTILINE)
    others = sorted(place for place in documents().values() if place.startswith(("examples/", "packaging/")))
    return [
        {"Start": [{"What it is": START}, {"All pages": ORDER}]},
        {"In this order": first},
        {"By need": [*then, KEYS]},
        {"Extend": ["contributing.md", *others, "changelog.md"]},
    ]


def relinked(text: str, path: str, shown: dict[str, str]) -> tuple[str, set[str]]:
    """Return a document's text with links for the site, and the files that are no documents to which it links.

    A link that leads nowhere stays as it is: MkDocs reports it.
    """
    shown, files = dict(shown), set()

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if "://" in target or not (ROOT / full).is_file():
            return match[0]
        if full not in shown:
            if full.startswith("docs/"):
                shown[full] = full.removeprefix("docs/")
            else:
                shown[full] = f"{FILES}{full}.md"
                files.add(full)
        return f"]({posixpath.relpath(shown[full], posixpath.dirname(shown[path]))}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text), files


def as_page(path: str) -> str:
    """Return a file that is no document as a page that the search leaves out."""
    file = ROOT / path
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{file.suffix[1:]}\n{file.read_text()}\n````\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = order()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages in the place of the documents in docs/."""
    for file in files.documentation_pages():
        files.remove(file)
    shown, linked = documents(), set()
    for path, place in shown.items():
        text, more = relinked((ROOT / path).read_text(), path, shown)
        linked |= more
        files.append(File.generated(config, place, content=text))
    for path in sorted(linked):
        files.append(File.generated(config, f"{FILES}{path}.md", content=as_page(path)))
    files.append(File.generated(config, KEYS, content=keys.reference()))
    return files
