"""How much is served at once to those who are behind: records and states.

Each upload holds an open file and a chunk. Who asks for too many, or does not take what it asked
for, must keep nobody else from being served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from dilocox.peer.transport import STALL_S

AT_ONCE = 8
OF_ONE_PEER = 3


class UploadRefused(Exception):
    """As many uploads run as there may be."""


class Uploads:
    """Counts what runs. All calls belong to one event loop."""

    def __init__(self, at_once: int = AT_ONCE, *, stall_s: float = STALL_S):
        """stall_s: who takes no chunk for so long is not served any more."""
        self._at_once = at_once
        self._stall_s = stall_s
        self._running: Counter[str] = Counter()

    @contextmanager
    def begin(self, peer: str, file: BinaryIO, *, urgent: bool) -> Generator[Upload]:
        """An upload to this peer. UploadRefused: there may be no more now.

        urgent: always served, and not counted; for what an exchange waits for, and for what is few
            bytes.
        """
        if not urgent:
            self._take_place(peer)
        on_end = (lambda: None) if urgent else partial(self._give_back, peer)
        upload = Upload(file, self._stall_s, on_end)
        try:
            yield upload
        finally:
            upload.end()

    def _take_place(self, peer: str) -> None:
        if self._running.total() >= self._at_once:
            raise UploadRefused(f"{self._at_once} downloads are served at once")
        if self._running[peer] >= OF_ONE_PEER:
            raise UploadRefused(f"{OF_ONE_PEER} downloads of one peer are served at once")
        self._running[peer] += 1

    def _give_back(self, peer: str) -> None:
        self._running[peer] -= 1
        self._running += Counter()  # without those who have none


class Upload:
    """One that runs."""

    def __init__(self, file: BinaryIO, stall_s: float, on_end: Callable[[], None]):
        self._file = file
        self._stall_s = stall_s
        self._on_end = on_end
        self._ended = False

    def read(self, count: int) -> bytes:
        """The next bytes; none at the end of the file, or once the upload has stalled."""
        return b"" if self._ended else self._file.read(count)

    @contextmanager
    def being_taken(self) -> Generator[None]:
        """While the peer takes a chunk: if that lasts too long, the upload ends."""
        timer = asyncio.get_running_loop().call_later(self._stall_s, self.end)
        try:
            yield
        finally:
            timer.cancel()

    def end(self) -> None:
        """Hold nothing any more."""
        if not self._ended:
            self._ended = True
            self._file.close()
            self._on_end()
