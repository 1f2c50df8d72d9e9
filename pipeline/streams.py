"""One libp2p stream to one peer, with frames on it, counted and timed.

Any byte is noted as a sign of life, not only a whole frame, or a large activation on a slow line
would look like silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

from dilocox.pipeline.frames import Frame, FrameLimits, read_frame

CHUNK_BYTES = 64 * 1024
MEASURED_BYTES = 32 * 1024  # a smaller payload says more about the delay than about the speed
SPEED_MEMORY = 0.8  # what a measurement weighs when the next one is there


@dataclass
class Traffic:
    """What all streams of this peer carried, and how many frames were refused, by kind."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


class Stream:
    """Frames over one libp2p stream.

    heard_at: when the last byte came (monotonic seconds).
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic
    ):
        self.heard_at = time.monotonic()
        self._reader = reader
        self._writer = writer
        self._traffic = traffic
        self._began: float | None = None
        self._speed_bytes = self._speed_s = 0.0

    @property
    def received_bytes_per_s(self) -> float | None:
        """How fast payloads came, smoothed; None before the first of some size."""
        return self._speed_bytes / self._speed_s if self._speed_s > 0 else None

    async def read(self, limits: FrameLimits) -> Frame:
        """The next frame; raises FrameRefused, EOFError or OSError."""
        self._began = None
        frame = await read_frame(self._take, limits, on_bytes=lambda _: None)
        if len(frame.payload) >= MEASURED_BYTES and self._began is not None:
            taken_s = time.monotonic() - self._began
            self._speed_bytes = SPEED_MEMORY * self._speed_bytes + len(frame.payload)
            self._speed_s = SPEED_MEMORY * self._speed_s + taken_s
        return frame

    async def write(self, head: bytes, payload: bytes = b"") -> None:
        """Send prefix and header, then the payload; raises OSError."""
        self._writer.write(head)
        self._traffic.sent_bytes += len(head)
        whole = memoryview(payload)
        for start in range(0, len(payload), CHUNK_BYTES):
            await self._writer.drain()
            chunk = whole[start : start + CHUNK_BYTES]
            self._writer.write(chunk)
            self._traffic.sent_bytes += len(chunk)
        await self._writer.drain()

    async def close(self, limit_s: float) -> None:
        """Let what was written leave, for so long, and end the stream."""
        try:
            self._writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.wait_closed(), limit_s)
        finally:
            self.abort()

    def abort(self) -> None:
        """End the stream now."""
        self._writer.transport.abort()

    async def _take(self, count: int) -> bytes:
        taken = bytearray()
        while len(taken) < count:
            piece = await self._reader.read(count - len(taken))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(taken), count)
            self.heard_at = time.monotonic()
            self._began = self._began or self.heard_at
            self._traffic.received_bytes += len(piece)
            taken += piece
        return bytes(taken)
