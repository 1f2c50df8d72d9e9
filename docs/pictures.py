"""Draws the status page in each of its states, with made-up figures, into docs/pictures/.

    python docs/pictures.py [STATE ...]

Each state at 1280 and 390 pixels, light and dark, side by side in one picture. It needs Chromium.
Whoever changes the page runs it and looks at what it has drawn. docs/showcase.png is not of these:
it is the page of a real run (benchmarks/showcase.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox.peer.http_pages import Page, PageServer
from dilocox.peer.monitor.monitor import MonitorPages
from tests.peer.told_pages import STATES
from tests.swarm.browser import DARK, chromium, cropped, screenshot

DOCS = Path(__file__).parent
WIDTHS = {1280: 3200, 390: 7000}  # and how high a page may be
NARROW = 560
COLORS = 255


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("states", nargs="*", metavar="STATE", help=", ".join(STATES))
    parser.add_argument("--folder", type=Path, default=DOCS / "pictures")
    parser.add_argument("--parts", type=Path, help="also keep each picture alone, there")
    arguments = parser.parse_args()
    if chromium() is None:
        raise SystemExit("chromium is not installed (Debian's package is called chromium)")
    with tempfile.TemporaryDirectory() as temporary:
        parts = arguments.parts or Path(temporary)
        parts.mkdir(parents=True, exist_ok=True)
        for state in arguments.states or STATES:
            file = arguments.folder / f"{state}.png"
            beside(draw(state, STATES[state](), parts)).save(file, optimize=True)
            sys.stdout.write(f"{file}: {file.stat().st_size / 1e3:.0f} kB\n")


def draw(state: str, status: dict[str, Any], folder: Path) -> list[Image.Image]:
    """The page at each width, light and dark."""
    pages, drawn = MonitorPages(lambda: True), list[Image.Image]()
    pages.show(status, Page(body=b""))
    rows = status["contributions"]
    you = f"?peer={rows[2]['id']}" if len(rows) > 2 else ""
    with PageServer("127.0.0.1", 0, pages.pages(), option="") as server:
        for width, height in WIDTHS.items():
            for name, flags in (("light", ()), ("dark", (DARK,))):
                file = folder / f"{state}-{width}-{name}.png"
                url = f"http://127.0.0.1:{server.port}/{you}"
                said = screenshot(url, file, *flags, width=width, height=height)
                if said:
                    raise SystemExit(f"{state} at {width}: {said}")
                drawn.append(cropped(file))
    return drawn


def beside(images: list[Image.Image], gap: int = 24) -> Image.Image:
    """All in one, at half their size; what is high and narrow is cut into two columns."""
    high = max(each.height for each in images if each.width > NARROW)
    parts = [
        each.crop((0, top, each.width, min(each.height, top + high)))
        for each in images
        for top in range(0, each.height, high)
    ]
    width = sum(each.width for each in parts) + gap * (len(parts) + 1)
    sheet = Image.new("RGB", (width, high + 2 * gap), (128, 134, 142))
    left = gap
    for each in parts:
        sheet.paste(each, (left, gap))
        left += each.width + gap
    half = sheet.resize((sheet.width // 2, sheet.height // 2), Image.Resampling.LANCZOS)
    return few_colors(half)


def few_colors(image: Image.Image) -> Image.Image:
    """For a modest file; the palette has the rare colours of lines and dots, too."""
    return image.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)


if __name__ == "__main__":
    main()
