"""What the monitor answers over HTTP: the status page, its figures, metrics, health.

The monitor's thread makes the figures after each look and leaves them here as bytes; who asks gets
the newest, however busy that thread is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from dilocox.peer.metrics_server import Page, Pages, health_page, readiness_page
from dilocox.peer.monitor_metrics import CONTENT_TYPE

LOOKS_LATE_S = 60.0  # a monitor that has not looked for so long hangs
STATUS_FILE = "status.html"

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class MonitorPages:
    """The newest figures, and the pages that show them. alive: whether the monitor's parts live."""

    def __init__(self, alive: Callable[[], bool]):
        self._alive = alive
        self._status = b"{}"
        self._metrics = b""
        self._looked_at: float | None = None
        self._html = (files("dilocox.peer") / "page" / STATUS_FILE).read_bytes()
        policy = content_policy(self._html.decode())
        self._headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}

    def show(self, status: dict[str, Any], metrics: bytes) -> None:
        """The figures after a look."""
        text = json.dumps(status, allow_nan=False, separators=(",", ":"))
        self._status, self._metrics = text.encode(), metrics
        self._looked_at = time.monotonic()

    def pages(self) -> Pages:
        """By path."""
        return {
            "/": self._page,
            "/status.json": lambda: Page(body=self._status, content_type="application/json"),
            "/metrics": lambda: Page(body=self._metrics, content_type=CONTENT_TYPE),
            "/healthz": lambda: health_page({"monitor": self._alive, "looks": self._looks}),
            "/readyz": lambda: readiness_page("" if self._looked_at else "it has not looked yet"),
        }

    def _page(self) -> Page:
        return Page(body=self._html, content_type="text/html; charset=utf-8", headers=self._headers)

    def _looks(self) -> bool:
        return self._looked_at is None or time.monotonic() - self._looked_at < LOOKS_LATE_S


def content_policy(html: str) -> str:
    """Only the page's own script and style may run, named by their hashes, and nothing is loaded
    from anywhere but this server.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for match in _INLINE.finditer(html):
        digest = hashlib.sha256(match[2].encode()).digest()
        hashes[match[1]].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
