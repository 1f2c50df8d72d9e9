"""How much is served at once to those who are behind: records and states.

Each upload holds an open file and a chunk. Who asks for too many, or does not take what it asked
for, must keep nobody else from being served; who takes it by drops keeps its place only while
nobody else wants it, and who has several keeps the slowest only while nobody without one does.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import Any, BinaryIO

from dilocox.dht.rpc import CHUNK_BYTES, STALL_S, reply
from dilocox.peer.chain.catchup import Source

AT_ONCE = 8
OF_ONE_PEER = 3
# An honest asker takes 15 kB/s even where eight share an uplink of 1 Mbit/s.
LEAST_BYTES_PER_S = 4096.0
LEAST_OVER_S = 60.0  # that an asker was waited for


class UploadRefused(Exception):
    """As many uploads run as there may be."""


class Uploads:
    """Counts what runs. All calls belong to one event loop."""

    def __init__(
        self,
        at_once: int = AT_ONCE,
        *,
        stall_s: float = STALL_S,
        on_refusal: Callable[[], None] = lambda: None,
    ):
        """stall_s: who takes no chunk for so long is not served any more."""
        self._at_once = at_once
        self._stall_s = stall_s
        self._on_refusal = on_refusal
        self._running: list[Upload] = []

    async def serve(
        self,
        peer: str,
        source: Source,
        *,
        urgent: bool = False,
        before_chunk: Callable[[int], Awaitable[None]],
    ) -> AsyncGenerator[Any, None]:
        """The frames of an answer: facts and chunks, or that all places are taken.

        urgent: always served, and not counted; for what an exchange waits for. So is what is few
            bytes. before_chunk: counts, or waits until so many bytes may leave.
        """
        urgent = urgent or source.facts["bytes"] <= CHUNK_BYTES
        with source:
            try:
                with self.begin(peer, source.file, urgent=urgent) as upload:
                    with upload.being_taken(0):
                        yield reply(source.facts)
                    while chunk := upload.read(CHUNK_BYTES):
                        await before_chunk(len(chunk))
                        with upload.being_taken(len(chunk)):
                            yield reply({}, chunk)
            except UploadRefused as error:
                self._on_refusal()
                yield reply({"busy": str(error)})

    @contextmanager
    def begin(self, peer: str, file: BinaryIO, *, urgent: bool) -> Generator[Upload]:
        """An upload to this peer. UploadRefused: there may be no more now."""
        upload = Upload(peer, file, self._stall_s, self._running)
        if not urgent:
            self._make_place(peer)
            self._running.append(upload)
        try:
            yield upload
        finally:
            upload.end()

    def _make_place(self, peer: str) -> None:
        places = Counter(upload.peer for upload in self._running)
        if places[peer] >= OF_ONE_PEER:
            raise UploadRefused(f"{OF_ONE_PEER} downloads of one peer are served at once")
        if len(self._running) < self._at_once:
            return
        ending = [upload for upload in self._running if upload.drips]
        most = max(places.values(), default=0)
        if not ending and not places[peer] and most > 1:
            ending = [upload for upload in self._running if places[upload.peer] == most]
        if not ending:
            raise UploadRefused(f"{self._at_once} downloads are served at once")
        min(ending, key=lambda upload: upload.bytes_per_s).end()


class Upload:
    """One that runs; in this list while it has a place."""

    def __init__(self, peer: str, file: BinaryIO, stall_s: float, running: list[Upload]):
        self.peer = peer
        self._file = file
        self._stall_s = stall_s
        self._running = running
        self._ended = False
        self._taken, self._waited_s = 0, 0.0  # since it last was fast enough
        self._waits_since: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """How fast the peer takes what it is given."""
        return self._taken / max(1e-6, self._all_waited_s)

    @property
    def drips(self) -> bool:
        """Whether the peer takes it too slowly to keep the place from another one."""
        return self._all_waited_s >= LEAST_OVER_S and self.bytes_per_s < LEAST_BYTES_PER_S

    @property
    def _all_waited_s(self) -> float:
        """For the peer; the waits for our own limit are not its fault."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else monotonic() - since)

    def read(self, count: int) -> bytes:
        """The next bytes; none at the end of the file, or once the upload was ended."""
        return b"" if self._ended else self._file.read(count)

    @contextmanager
    def being_taken(self, count: int) -> Generator[None]:
        """While the peer takes a chunk of so many bytes: if that lasts too long, the task that
        writes it into the peer's stream is cancelled, or it would hold both for ever.
        """
        taker = asyncio.current_task()
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._stalled, taker)
        self._waits_since = monotonic()
        try:
            yield
        finally:
            timer.cancel()
            self._waited_s, self._waits_since = self._all_waited_s, None
        self._taken += count
        if self._waited_s >= LEAST_OVER_S and not self.drips:
            self._taken, self._waited_s = 0, 0.0

    def _stalled(self, taker: asyncio.Task[Any] | None) -> None:
        self.end()
        if taker is not None:
            taker.cancel()

    def end(self) -> None:
        """Hold nothing any more."""
        if not self._ended:
            self._ended = True
            self._file.close()
            if self in self._running:
                self._running.remove(self)
