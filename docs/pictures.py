"""Draws the status page in each of its states, with made-up figures, into docs/pictures/.

    python docs/pictures.py [--folder FOLDER]

Each state at 1280 and 390 pixels, light and dark, as a browser draws it. It needs Chromium. Whoever
changes the page runs it and looks at what it has drawn; a test fails until then.
docs/showcase.png is not of these: it is the page of a real run (benchmarks/showcase.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox.peer.http_pages import Page, PageServer
from dilocox.peer.monitor.monitor import MonitorPages
from tests.peer.told_pages import DRAWN, PICTURES, STATES, WIDTHS, drawn_from
from tests.swarm.browser import DARK, chromium, cropped, screenshot


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=PICTURES)
    folder = parser.parse_args().folder
    if chromium() is None:
        raise SystemExit("chromium is not installed (Debian's package is called chromium)")
    folder.mkdir(parents=True, exist_ok=True)
    for state, told in STATES.items():
        draw(state, told(), folder)
    (folder / DRAWN).write_text(drawn_from() + "\n")


def draw(state: str, status: dict[str, Any], folder: Path) -> None:
    """The page at each width, light and dark, without loss: a WebP is a quarter of a PNG."""
    pages, rows = MonitorPages(lambda: True), status["contributions"]
    pages.show(status, Page(body=b""), rows)
    you = f"?peer={rows[2]['id']}" if len(rows) > 2 else ""
    with (
        PageServer("127.0.0.1", 0, pages.pages(), answer=pages.answer, option="") as server,
        tempfile.TemporaryDirectory() as temporary,
    ):
        url = f"http://127.0.0.1:{server.port}/{you}"
        for width, height in WIDTHS.items():
            for name, flags in (("light", ()), ("dark", (DARK,))):
                shot = Path(temporary, "shot.png")
                said = screenshot(url, shot, *flags, width=width, height=height)
                if said:
                    raise SystemExit(f"{state} at {width}: {said}")
                file = folder / f"{state}-{width}-{name}.webp"
                cropped(shot).save(file, lossless=True, quality=100)
                sys.stdout.write(f"{file}: {file.stat().st_size / 1e3:.0f} kB\n")


if __name__ == "__main__":
    main()
