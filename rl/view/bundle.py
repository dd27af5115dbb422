"""Write the viewer's pages as files that any web server shows, with nothing of ours running (``--bundle``).

A page is made by the handler that serves it, from the first page on along its links. The templates leave out what only
a server can do where ``Library.static`` says so: finding, searching, filters, labels, exports, comparisons of episodes.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
import tempfile
from pathlib import Path
from urllib.parse import parse_qsl

from rl.view import pages
from rl.view.library import Library
from rl.view.server import POLICY, STATIC
from rollout import files

_LINK = re.compile(r'="(/[^"]*)"')  # texts of episodes cannot have it: they are escaped
_HEAD = '<meta charset="utf-8">'


def write(library: Library, out: Path) -> int:
    """Write a directory, or a zip file if ``out`` ends with .zip, and return the number of pages. Raises OSError."""
    if out.suffix != ".zip":
        with files.making(out) as new:
            return _write(library, new)
    if out.exists():
        raise FileExistsError(f"{out}: is there already")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as place:
        count = _write(library, Path(place, out.stem))
        os.replace(shutil.make_archive(f"{place}/pages", "zip", place, out.stem), out)
    return count


def _write(library: Library, place: Path) -> int:
    shutil.copytree(STATIC, place / "static")
    # The browser ignores frame-ancestors here, and says so.
    policy = POLICY.partition("; frame-ancestors")[0]
    head = f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += '\n<meta name="referrer" content="no-referrer">'
    names, waiting = {"/": "index.html"}, ["/"]

    def link(found: re.Match[str]) -> str:
        address, mark, part = html.unescape(found[1]).partition("#")
        if address.startswith("/static/"):
            return f'="{address[1:]}"'
        if address not in names:
            names[address] = _name(address)
            waiting.append(address)
        return f'="{names[address]}{html.escape(mark + part)}"'

    while waiting:  # the last one first: the pages of an episode follow each other while it is in memory
        address = waiting.pop()
        page = _page(library, address)
        text = page.body
        if page.type == "text/html":
            text = _LINK.sub(link, text).replace(_HEAD, head, 1)
        (place / names[address]).write_text(text, errors="replace")
    return len(names)


def _page(library: Library, address: str) -> pages.Page:
    path, _, query = address.partition("?")
    page = pages.answer(library, path, dict(parse_qsl(query)))
    return _page(library, page.to) if page.to else page


def _name(address: str) -> str:
    """Return the file of a page: what it shows, and a hash that no other page has."""
    path, _, query = address.partition("?")
    asked = dict(parse_qsl(query))
    stem, _, suffix = path[1:].partition(".")
    shown = re.sub(r"[^A-Za-z0-9-]+", "_", asked.get("id", ""))[:60]
    digest = hashlib.sha256(address.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{'-'.join(filter(None, (stem, shown, digest)))}.{suffix or 'html'}"
