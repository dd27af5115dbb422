"""Make the pictures of the viewer in the documents, from a made-up run (tests/view_demo.py), in headless Chromium.

    python -m tests.view_pictures [--out docs]

A picture is a whole page, in 256 colours. Look at them before they are committed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests import browser_kit, view_demo, view_kit

ROOT = Path(__file__).resolve().parents[1]
_WIDTH = 1200
_EPISODE = f"id=train-{view_demo.STEPS}-{view_demo.TASK}-0"
_TURN = "document.querySelector('.turn')"
# Tokens are loaded when they come into view.
_ALL_TOKENS = "[...document.querySelectorAll('.strip')].every((one) => one.querySelector('.t'))"
# The page, and what must hold before the picture is taken.
PAGES = {
    "run": ("/run", "document.querySelectorAll('.chart canvas').length >= 4"),
    "episodes": (f"/episodes?step={view_demo.STEPS}&sort=-turns", "document.querySelector('tbody tr')"),
    "task": (f"/task?id={view_demo.TASK}", "document.querySelector('.card')"),
    "episode": (f"/episode?{_EPISODE}", _TURN),
    "tokens": (f"/tokens?{_EPISODE}", "document.querySelectorAll('.node.trained .t').length > 100"),
}


def shrink(path: Path) -> None:
    """Leave a picture its 256 most frequent colours: areas stay as they are, and edges of letters hardly change."""
    picture = Image.open(path).convert("RGB")
    found = sorted(picture.getcolors(1 << 24) or [], reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for _, color in found for value in color])  # ty: ignore
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


async def pictures(out: Path) -> None:
    """Write a picture of each page."""
    with tempfile.TemporaryDirectory(prefix="view-pictures-") as name, browser_kit.browser() as driven:
        run = await view_demo.Demo().run(Path(name, "ledger", "2026-11-24_09-00-00"))
        async with view_kit.served(run) as address, browser_kit.tab(driven) as page:
            for title, (path, ready) in PAGES.items():
                await page.size(_WIDTH, 900)
                await page.goto(address + path)
                await page.until(ready)
                await page.size(_WIDTH, await page.js("document.documentElement.scrollHeight"))
                await page.until(ready)
                await page.until(_ALL_TOKENS)
                place = out / f"view-{title}.png"
                await page.picture(place)
                shrink(place)
                print(f"{place}  {place.stat().st_size / 1000:.0f} kB")


def main() -> int:
    """Make the pictures; return the exit status, 1 if there is no Chromium."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of the pictures (default: docs)")
    args = options.parse_args()
    if why := browser_kit.problem():
        print(f"no Chromium: {why}", file=sys.stderr)
        return 1
    asyncio.run(pictures(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
