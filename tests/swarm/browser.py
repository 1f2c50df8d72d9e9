"""Headless Chromium for our pages: what one shows after a while, and what its console said; or a
window that stays open, in which a test types.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

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


def screenshot(
    url: str, file: Path, *flags: str, width: int, height: int, within: Sequence[str] = ()
) -> tuple[str, ...]:
    """Draw a page into a PNG file; the lines of its console. `within` as for `show`."""
    size = f"--window-size={width},{height}"
    return _run(url, f"--screenshot={file}", size, *flags, within=within)[1]


def cropped(file: Path, margin: int = 24) -> Image.Image:
    """A drawn page without the empty rows at its end; the file, too, has them no more."""
    image = Image.open(file).convert("RGB")
    back = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))  # type: ignore[arg-type]
    box = ImageChops.difference(image, back).getbbox()
    bottom = image.height if box is None else min(image.height, box[3] + margin)
    image = image.crop((0, 0, image.width, bottom))
    image.save(file)
    return image


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


class Window:
    """A page in a browser that stays open: a context in which scripts run in it.

    `console` has what it complained of: errors, warnings, what its policy forbade.
    """

    def __init__(self, url: str = "", *flags: str, width: int = 1280, height: int = 1000):
        self.console: list[str] = []
        self._url = url
        self._flags = (*flags, f"--window-size={width},{height}", "--remote-debugging-pipe")
        self._closing = ExitStack()
        self._asked, self._session, self._held, self._expired = 0, "", b"", False

    def __enter__(self) -> Window:
        browser = chromium()
        assert browser is not None
        with self._closing as closing:
            profile = closing.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            theirs, self._to = os.pipe()
            self._from, they = os.pipe()
            # it takes requests on descriptor 3 and answers on 4
            command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{they}', "bash", browser]
            process = subprocess.Popen(
                [*command, *FLAGS, f"--user-data-dir={profile}", *self._flags, "about:blank"],
                pass_fds=(theirs, they),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            closing.callback(process.wait, LIMIT_S)
            closing.callback(process.kill)
            for descriptor in (theirs, they):
                os.close(descriptor)
            for descriptor in (self._to, self._from):
                closing.callback(os.close, descriptor)
            targets = self._ask("Target.getTargets")["targetInfos"]
            (page,) = [each["targetId"] for each in targets if each["type"] == "page"]
            attached = self._ask("Target.attachToTarget", targetId=page, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Runtime", "Log", "Page"):
                self._ask(f"{domain}.enable")
            if self._url:
                self._ask("Page.navigate", url=self._url)
                opened = "document.readyState === 'complete' && location.href !== 'about:blank'"
                self.wait_for(opened)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def show(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 1000) -> Shown:
        """As the function of this name, in this browser: its start is most of what that takes."""
        self._ask("Page.navigate", url="about:blank")
        self.console.clear()
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[colours])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._expired = False
        self._ask("Emulation.setVirtualTimePolicy", policy="pause")
        self._ask("Page.navigate", url=url)
        waits = {"policy": "pauseIfNetworkFetchesPending", "budget": PATIENCE_MS}
        self._ask("Emulation.setVirtualTimePolicy", **waits)
        deadline = time.monotonic() + LIMIT_S
        while not self._expired:
            message = self._read(deadline)
            self._note(message.get("method", ""), message.get("params", {}))
        dom = self.run("document.documentElement.outerHTML")
        return Shown(dom.replace("\n", " "), tuple(self.console))

    def run(self, script: str) -> Any:
        """Run a script in the page; the JSON value of its last expression."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, limit_s: float = LIMIT_S) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + limit_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {condition}"
            time.sleep(0.05)

    def screenshot(self, file: Path) -> None:
        """Draw what it shows now into a PNG file."""
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._asked += 1
        request: dict[str, Any] = {"id": self._asked, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            message = self._read(deadline)
            if message.get("id") == self._asked:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(str(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str(told["args"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Emulation.virtualTimeBudgetExpired":
            self._expired = True

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._from], [], [], left_s)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)
