"""This module tests the pages as files: all links lead to files of the bundle, and nothing of an episode acts."""

from __future__ import annotations

import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl.data import labels
from rl.view.command import main
from tests.view_kit import HOSTILE, hostile, run

ADDRESSES = ("href", "src", "action", "data-here", "data-tokens", "data-up", "data-before", "data-after", "data-curves")


class Links(HTMLParser):
    """Collects addresses and places; refuses all that only an episode could have brought in, and all that needs a
    server."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.places: set[str] = set()
        self.metas: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert tag not in ("img", "iframe", "object", "base", "style", "input" if "radio" not in names.values() else "")
        assert not any(name.startswith("on") or name == "style" for name in names), attrs
        assert not {"data-find", "data-strip", "data-load", "data-state", "data-label", "data-json"} & set(names), attrs
        assert tag != "form" or names.get("method") == "dialog"
        assert all(not (value or "").startswith("/") for value in names.values()), attrs
        self.addresses += [names[name] or "" for name in ADDRESSES if name in names]
        if place := names.get("id"):
            self.places.add(place)
        if tag == "meta" and (kind := names.get("http-equiv") or names.get("name")):
            self.metas[kind] = names["content"] or ""


def unpack(out: Path) -> Path:
    """Return the directory of a bundle."""
    if out.suffix != ".zip":
        return out
    with zipfile.ZipFile(out) as archive:
        archive.extractall(out.parent / "unpacked")
    return out.parent / "unpacked" / out.stem


@pytest.mark.parametrize("name", ["out", "out.zip"])
async def test_every_link_of_a_bundle_leads_to_a_file_of_it(tmp_path: Path, name: str) -> None:
    runs = [await run(tmp_path / "a" / "one"), await hostile(tmp_path / "a" / "two", 1000)]
    labels.say(runs[0], labels.Label("train-1-fix-0", "good", HOSTILE, by="ann"))
    assert main([*map(str, runs), "--bundle", str(tmp_path / "new" / name)]) == 0
    assert [one.name for one in (tmp_path / "new").iterdir()] == [name]  # nothing else is left
    place = unpack(tmp_path / "new" / name)
    pages = {path.name: Links(path.read_text()) for path in place.glob("*.html")}
    kinds = {page.partition("-")[0].partition(".")[0] for page in pages}
    assert kinds == {"index", "run", "episodes", "task", "episode", "tokens", "compare_runs"}
    assert len([page for page in pages if page.startswith("episode-")]) == 8
    for page, links in pages.items():
        policy = links.metas["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors" not in policy
        for address in links.addresses:
            file, _, mark = address.partition("#")
            assert "?" not in address and ":" not in address and ".." not in address, (page, address)
            assert not file or (place / file).is_file(), (page, address)
            if mark and (file or page) in pages and not mark.startswith("n"):  # tokens have marks of their own
                assert mark in pages[file or page].places, (page, address)
    texts = {path.name: path.read_text() for path in place.iterdir() if path.is_file()}
    assert not any("<script>" in text or "\x1b" in text or "\u202e" in text for text in texts.values())
    shown = next(text for page, text in texts.items() if page.startswith("episode-train-1-fix-0-"))
    assert '<span class="chip">good</span>' in shown and "total 0" in shown and "Read in addition" in shown
    shown = next(text for page, text in texts.items() if page.startswith("tokens-train-1-fix-0-"))
    assert 'id="n1t3"' in shown and 'data-tp="' in shown
    assert any(page.startswith("curves-") and "Resolve rate" in text for page, text in texts.items())


async def test_a_bundle_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await run(tmp_path / "run")
    for name in ("out", "out.zip"):
        (tmp_path / name).mkdir()
        assert main([str(made), "--bundle", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith("is there already; nothing was written\n")
        (tmp_path / name).rmdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    for name in ("out", "out.zip"):
        assert main([str(made), "--bundle", str(tmp_path / name)]) == 2
        assert "No space left on device; nothing was written" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
