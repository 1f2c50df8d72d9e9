"""A card of one peer to be shown elsewhere: what it gave to the run, as an SVG image of fixed size.
Apart from the page, whose style it cannot use where it is shown.

Nothing in it is loaded from anywhere, and texts of strangers are escaped, and set smaller or cut
where a line has no room for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from html import escape
from typing import Any
from unicodedata import east_asian_width

from dilocox.dht.names import cut

WIDTH, HEIGHT, EDGE = 640, 320, 36
INNER = WIDTH - 2 * EDGE
COLUMN = INNER // 4
FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
BACK, LINE, TEXT, SOFT, ACCENT = "#12161b", "#2c3540", "#e6eaef", "#98a4b2", "#6ea4ff"


def card_svg(run: str, row: Mapping[str, Any], contributors: int) -> bytes:
    """The image: the run's name, a row of `SwarmHistory.contributions`, and how many there are."""
    short, share, hours = row["id"][-6:], row["share"], row["hours"]
    day = datetime.fromtimestamp(row["since"] or 0, timezone.utc)
    seen = f"seen since {day.day} {day:%b %Y}" if row["since"] else ""
    figures = (
        (spoken(row["tokens"]), "tokens in", "committed rounds"),
        ("<0.1%" if share < 0.001 else f"{share:.1%}", "of all that", "peers gave"),
        (
            spoken(hours if hours >= 1 else 60 * hours),
            "hours of" if hours >= 1 else "minutes of",
            "training",
        ),
        (f"#{row['rank']:,}", f"of {contributors:,}", "contributors"),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}">',
        f"<title>{escape(row['name'] or short)} trains {escape(run)}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="18" fill="{BACK}" '
        f'stroke="{LINE}"/>',
        _text(EDGE, 50, f"trains {cut(run, 40)}", 17, SOFT, room=INNER - 110),
        _text(WIDTH - EDGE, 50, "dilocox", 17, ACCENT, anchor="end"),
        _text(EDGE, 104, row["name"] or f"peer {short}", 40, TEXT),
        _text(EDGE, 138, f"team {row['team']}" if row["team"] else "", 20, ACCENT),
        f'<path d="M{EDGE} 163h{INNER}" stroke="{LINE}" stroke-width="6"/>',
        f'<path d="M{EDGE} 163h{INNER * share:.0f}" stroke="{ACCENT}" stroke-width="6"/>',
        _text(EDGE, 292, f"peer …{short}", 14, SOFT),
        _text(WIDTH - EDGE, 292, seen, 14, SOFT, anchor="end"),
    ]
    for x, (figure, *words) in zip(range(EDGE, WIDTH, COLUMN), figures, strict=False):
        lines.append(_text(x, 212, figure, 30, TEXT, room=COLUMN - 12))
        lines += [_text(x, 235 + 17 * n, text, 13, SOFT) for n, text in enumerate(words)]
    return "\n".join([*lines, "</svg>"]).encode()


def spoken(number: float) -> str:
    """A number as people read it: 1.23 M."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.2g}" if number < 10 else f"{math.floor(number)}"


def _text(
    x: int, y: int, text: str, size: int, colour: str, *, anchor: str = "start", room: int = INNER
) -> str:
    """One line, smaller where it is too long; what is longer still ends where its room does."""
    fitting = min(size, math.floor(room / max(0.6, sum(map(_width, text)))))
    left, at = (x, 0) if anchor == "start" else (x - room, room)
    weight = 400 if colour == SOFT else 600
    return (
        f'<svg x="{left}" y="{y - size}" width="{room}" height="{round(1.35 * size)}">'
        f'<text x="{at}" y="{size}" font-size="{fitting}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text></svg>'
    )


def _width(letter: str) -> float:
    """In parts of the font's size, in bold: of DejaVu Sans, the widest of the fonts."""
    if letter in "MWmw%@…" or east_asian_width(letter) in "WF":
        return 1.11
    if letter in " .,:;'!|()ijlf-":
        return 0.46
    return 0.85 if letter.isupper() or letter in "&+=<>~#" else 0.72
