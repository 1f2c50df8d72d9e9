"""Headless Chromium for the status page: what it shows after a while, and what its console said."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
)
DARK = "--blink-settings=preferredColorScheme=0"
PATIENCE_MS = 2500  # of the page's own time, for its first look and the drawing
LIMIT_S = 60.0

_TAG = re.compile(r"<[^>]*>")


def chromium() -> str | None:
    """The installed browser, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(frozen=True)
class Shown:
    """A page as the browser had it: its document as text, and the lines of its console."""

    dom: str
    console: tuple[str, ...]

    def text(self, element: str) -> str:
        """The text of the element with this id, which has none of its own kind within."""
        found = re.search(rf'<(\w+) [^>]*id="{element}"[^>]*>(.*?)</\1>', self.dom)
        assert found is not None, f"no element {element} in {self.dom[:400]}"
        return unescape(_TAG.sub(" ", found[2])).strip()

    def count(self, markup: str) -> int:
        """How often a piece of markup stands in the document."""
        return self.dom.count(markup)


def show(
    url: str, *flags: str, width: int = 1280, height: int = 1000, within: Sequence[str] = ()
) -> Shown:
    """Open a page and read it once it is drawn; `within` starts the browser on another host."""
    size = f"--window-size={width},{height}"
    dom, console = _run(url, "--dump-dom", size, *flags, within=within)
    return Shown(dom, console)


def screenshot(url: str, file: Path, *flags: str, width: int, height: int) -> tuple[str, ...]:
    """Draw a page into a PNG file; the lines of its console."""
    size = f"--window-size={width},{height}"
    return _run(url, f"--screenshot={file}", size, *flags)[1]


def _run(url: str, *flags: str, within: Sequence[str] = ()) -> tuple[str, tuple[str, ...]]:
    browser = chromium()
    assert browser is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                *within,
                browser,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={PATIENCE_MS}",
                *flags,
                url,
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    said = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout.replace("\n", " "), said
