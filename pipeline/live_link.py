"""A link from the wish to have it to its end: frames both ways, heartbeats, the silence limit.

Why: a killed process closes its streams, a frozen one does not (20 s without an error were
measured), so each side of a link says every half second that it lives. Silence is counted in
*observed* time: a process that was itself frozen has observed nothing, and accuses nobody when it
thaws.

All of this runs in the network thread, but for `post` and `facts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from dilocox.pipeline.frames import (
    LINK_KINDS,
    Frame,
    FrameLimits,
    FrameRefused,
    encode_prefix_and_header,
    flag,
    number,
)
from dilocox.pipeline.links import Arrived, BrokenKind, Inbox, LinkFacts, LinkKey, Opened, Share
from dilocox.pipeline.streams import Stream, Traffic

logger = logging.getLogger(__name__)

LONGEST_TICK_S = 0.5
FLUSH_S = 1.0  # what was said just before a link is dropped may still leave
INBOX_BYTES = 64 * 1024 * 1024  # or four of the largest frames
ROUND_TRIPS_KEPT = 8
LONGEST_TIME_S = 1e15  # of a peer's monotonic clock


class Link:
    """One link of this peer, from the wish to have it to its end.

    expected: whether the neighbour dials. adopted: the network sets it to the stream then.
    share: how much of the link lies in the inbox.
    """

    def __init__(
        self,
        key: LinkKey,
        peer: str,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: FrameLimits,
        inbox: Inbox,
        traffic: Traffic,
        silence_s: float,
        opening_s: float,
        max_queued: int,
        expected: bool,
    ):
        self.key = key
        self.peer = peer
        self.adopted: asyncio.Future[Stream] = loop.create_future()
        self._expected = expected
        self._verdict: asyncio.Future[BrokenKind | Literal["dropped"]] = loop.create_future()
        self._loop = loop
        self._limits = limits
        self._inbox = inbox
        self._traffic = traffic
        self._silence_s = silence_s
        self._opening_s = opening_s
        self._tick_s = min(silence_s / 8, LONGEST_TICK_S)
        self._max_queued = max_queued
        self._wanted_at = time.monotonic()
        self._stream: Stream | None = None
        self._outgoing: deque[tuple[bytes, bytes]] = deque()
        self._wake = asyncio.Event()
        self._beat_due = True
        self._finishing = False
        self._heartbeat: tuple[float, float] | None = None  # its sender's time, and ours
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._room = asyncio.Event()
        self._room.set()
        self.share = Share(
            max_bytes=max(INBOX_BYTES, 4 * limits.max_payload), on_room=self._make_room
        )

    # ---- from any thread -------------------------------------------------------------------------
    def post(self, frame: Frame) -> None:
        """Queue a frame; raises ValueError for one that nobody would take."""
        head = encode_prefix_and_header(frame)
        if len(self._outgoing) >= self._max_queued:
            self._in_loop(lambda: self.end("stuck"))
        else:
            self._outgoing.append((head, frame.payload))
            self._in_loop(self._wake.set)

    def facts(self) -> LinkFacts | None:
        """What was measured; None before the link stands."""
        stream = self._stream
        if stream is None:
            return None
        return LinkFacts(
            round_trip_s=min(tuple(self._round_trips), default=None),
            received_bytes_per_s=stream.received_bytes_per_s,
        )

    def _make_room(self) -> None:
        self._in_loop(self._room.set)

    def _in_loop(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the network is closed
            self._loop.call_soon_threadsafe(act)

    # ---- in the network thread -------------------------------------------------------------------
    @property
    def unheard_s(self) -> float:
        """Seconds since the last byte, or since the link was wanted."""
        return time.monotonic() - (self._stream.heard_at if self._stream else self._wanted_at)

    @property
    def is_awaited(self) -> bool:
        """Whether the neighbour is to dial and has not yet."""
        over = self.adopted.done() or self._verdict.done() or self._finishing
        return self._expected and not over

    def end(self, kind: BrokenKind | Literal["dropped"]) -> None:
        """The link is over; only the first reason counts."""
        if not self._verdict.done():
            self._verdict.set_result(kind)

    def refuse(self, kind: str) -> None:
        """Count a frame that cannot be, and end the link."""
        self._traffic.refused[kind] += 1
        logger.warning("%s sent what cannot be (%s)", self.peer, kind)
        self.end("refused")

    def finish(self) -> None:
        """Say what is queued, but for tensors, and end.

        The stream is left for the neighbour to close: where one side closes while the other one
        writes, what came before is lost.
        """
        self._finishing = True
        small = [each for each in self._outgoing.copy() if not each[1]]
        self._outgoing.clear()
        self._outgoing.extend(small)
        if self._stream is None:
            self.end("dropped")
        else:
            self._wake.set()
            self._room.set()
            self._loop.call_later(FLUSH_S, self.end, "dropped")

    async def live(self, opening: Coroutine[Any, Any, Stream]) -> BrokenKind | None:
        """Open the link and serve it to its end, whose kind it returns; None if it was dropped."""
        opener = asyncio.create_task(opening)
        tasks: list[asyncio.Task[Any]] = [opener, asyncio.create_task(self._watch())]
        try:
            await asyncio.wait({opener, self._verdict}, return_when=asyncio.FIRST_COMPLETED)
            if not self._verdict.done():
                self._stream = opener.result()
                self._inbox.put(Opened(self.key), self.share)
                self._wake.set()
                tasks += [asyncio.create_task(self._read(self._stream))]
                tasks += [asyncio.create_task(self._write(self._stream))]
                await asyncio.wait({self._verdict})
            verdict = self._verdict.result()
            return None if verdict == "dropped" else verdict
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._abort(opener)

    def _abort(self, opener: asyncio.Task[Stream]) -> None:
        stream = self._stream
        if stream is None:  # it may have come in the moment in which the link ended
            for opened in (opener, self.adopted):
                if opened.done() and not opened.cancelled() and opened.exception() is None:
                    opened.result().abort()
        else:
            stream.abort()

    async def _watch(self) -> None:
        """Every tick: a heartbeat is due, and silence is counted."""
        unheard_s, heard_at, last = 0.0, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            unheard_s += min(now - last, 2 * self._tick_s)
            last = now
            if self._stream is not None and (
                self._stream.heard_at != heard_at or not self._room.is_set()
            ):
                unheard_s, heard_at = 0.0, self._stream.heard_at
            stands = self._stream is not None
            if unheard_s >= (self._silence_s if stands else self._opening_s):
                self.end("silent" if stands else "missing")
            self._beat_due = True
            self._wake.set()

    async def _write(self, stream: Stream) -> None:
        try:
            while not (self._finishing and not self._outgoing):
                await self._wake.wait()
                self._wake.clear()
                while self._beat_due or self._outgoing:
                    if self._beat_due:
                        self._beat_due = False
                        await stream.write(self._next_heartbeat())
                    else:
                        await stream.write(*self._outgoing.popleft())
            await stream.write(self._next_heartbeat(last=True))
        except OSError:
            self.end("closed")

    async def _read(self, stream: Stream) -> None:
        try:
            while True:
                await self._room.wait()
                self._take(await stream.read(self._limits))
        except FrameRefused as refused:
            self.refuse(refused.kind)
        except (EOFError, OSError):
            self.end("closed")

    def _take(self, frame: Frame) -> None:
        if (frame.replica, frame.epoch) != (self.key.replica, self.key.epoch):
            raise FrameRefused("epoch", f"{frame.kind} of epoch {frame.epoch}")
        if frame.kind == "heartbeat":
            self._hear(frame)
        elif self._finishing:
            pass  # nobody wants it any more
        elif frame.kind not in LINK_KINDS or frame.kind == "hello":
            raise FrameRefused("kind", f"{frame.kind} on a link")
        elif self.share.frames >= self._max_queued:
            raise FrameRefused("flood", f"{self.share.frames} frames wait to be taken")
        else:
            self._inbox.put(Arrived(self.key, frame), self.share)
            if self.share.full:
                self._room.clear()

    def _next_heartbeat(self, *, last: bool = False) -> bytes:
        """What the time is here, and for how long the neighbour's last such question lay here.

        The last one asks the neighbour to close the stream.
        """
        now = time.monotonic()
        facts: dict[str, object] = {"at": now, "last": last}
        if self._heartbeat is not None:
            facts |= {"echo": self._heartbeat[0], "held": now - self._heartbeat[1]}
        replica, epoch = self.key.replica, self.key.epoch
        return encode_prefix_and_header(
            Frame(kind="heartbeat", replica=replica, epoch=epoch, facts=facts)
        )

    def _hear(self, frame: Frame) -> None:
        now = time.monotonic()
        self._heartbeat = (number(frame.facts, "at", 0.0, LONGEST_TIME_S), now)
        if "echo" in frame.facts:
            echo = number(frame.facts, "echo", 0.0, LONGEST_TIME_S)
            round_trip_s = now - echo - number(frame.facts, "held", 0.0, LONGEST_TIME_S)
            if round_trip_s >= 0:
                self._round_trips.append(round_trip_s)
        if flag(frame.facts, "last"):
            self.end("closed")
