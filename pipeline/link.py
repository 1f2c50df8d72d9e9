"""Links between the neighbours of a replica: what the computing thread sees of them, and each one
from the wish to have it to its end.

Keys, messages and the inbox that they come in stand first. The network thread (network.py) puts
messages in, the computing thread takes them out when it has time. The inbox knows how much of each
link lies in it, so that a neighbour which sends more than this peer can take costs no more than a
bounded piece of memory.

A `Stream` is one libp2p stream to one peer, with frames on it, counted and timed. Any byte is noted
as a sign of life, not only a whole frame, or a large activation on a slow line would look like
silence.

A `Link` is frames both ways, heartbeats, the silence limit. A killed process closes its streams, a
frozen one does not (20 s without an error were measured), so each side says every half second that
it lives. Silence is counted in *observed* time: a process that was itself frozen has observed
nothing, and accuses nobody when it thaws. All of it runs in the network thread, but for `post` and
`facts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from dilocox.pipeline.frames import (
    LINK_KINDS,
    Facts,
    Frame,
    FrameLimits,
    FrameRefused,
    encode_prefix_and_header,
    read_frame,
)

logger = logging.getLogger(__name__)

BrokenKind = Literal["closed", "silent", "missing", "stuck", "refused"]


class LinkKey(NamedTuple):
    """Which link of this peer it is.

    replica: peer id of the head. upper_stage: the link leads from this stage to the next one.
    side: which neighbour of this peer it leads to, the one towards the head ("upper") or the one
    towards the last stage ("lower").
    """

    replica: str
    epoch: int
    upper_stage: int
    side: Literal["upper", "lower"]


@dataclass(frozen=True)
class Arrived:
    """A frame came over a link."""

    key: LinkKey
    frame: Frame


@dataclass(frozen=True)
class Opened:
    """A link stands: the neighbour has proved its peer id and knows this link."""

    key: LinkKey


@dataclass(frozen=True)
class Broken:
    """A link is gone and will not come back; nothing of it follows.

    kind: "closed" (the stream ended), "silent" (not a byte for `silence_s`), "missing" (it never
    stood), "stuck" (too much waits to be sent), "refused" (the neighbour sent what cannot be).
    after_s: seconds since the last byte came, or since the link was wanted.
    """

    key: LinkKey
    kind: BrokenKind
    after_s: float


@dataclass(frozen=True)
class Wake:
    """Something outside of the links wants to be looked at."""


Message = Arrived | Opened | Broken | Wake


@dataclass(frozen=True)
class LinkFacts:
    """What was measured of a link; 0.0 before that.

    round_trip_s: the shortest of the last heartbeats'. received_bytes_per_s: of payloads of some
    size from their first byte to their last, smoothed.
    """

    round_trip_s: float = 0.0
    received_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The answer to a request, and how long it took from the request's last byte."""

    frame: Frame
    round_trip_s: float


class Backlog:
    """How much of one link lies in the inbox. Its methods may be called from any thread.

    dropped: nobody wants to see messages of this link any more.
    """

    def __init__(self, *, max_bytes: int, on_room: Callable[[], None]):
        self.dropped = False
        self.frames = 0
        self._bytes = 0
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether to read no more from the link; `on_room` is called when that ends."""
        return self._bytes > self._max_bytes

    def count(self, message: Message, change: Literal[1, -1]) -> None:
        """Take note of a message that goes into the inbox (1) or was taken out (-1)."""
        if isinstance(message, Arrived):
            with self._lock:
                was_full = self.full
                self.frames += change
                self._bytes += change * len(message.frame.payload)
            if was_full and not self.full:
                self._on_room()


class Inbox:
    """Messages in the order of their arrival, from the network thread to the computing thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Message, Backlog | None]] = queue.SimpleQueue()

    def put(self, message: Message, backlog: Backlog | None = None) -> None:
        """Add a message, of the link with this backlog; from any thread."""
        if backlog is not None:
            backlog.count(message, 1)
        self._queue.put((message, backlog))

    def get(self, timeout_s: float) -> Message | None:
        """The next message, of links that were not dropped; None if none comes within so long."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message, backlog = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if backlog is None:
                return message
            backlog.count(message, -1)
            if not backlog.dropped:
                return message


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
    def received_bytes_per_s(self) -> float:
        """How fast payloads came, smoothed; 0.0 before the first of some size."""
        return self._speed_bytes / self._speed_s if self._speed_s > 0 else 0.0

    async def read(self, limits: FrameLimits) -> Frame:
        """The next frame; raises FrameRefused, EOFError or OSError."""
        self._began = None
        frame = await read_frame(self._take, limits)
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


OPENING_S = 8.0
MAX_QUEUED = 4096
LONGEST_TICK_S = 0.5
FLUSH_S = 1.0  # what was said just before a link is dropped may still leave
INBOX_BYTES = 64 * 1024 * 1024
OUTGOING_BYTES = 1 << 30
ROUND_TRIPS_KEPT = 8

Seconds = Annotated[
    float, Field(ge=0.0, le=1e15, allow_inf_nan=False)
]  # of a peer's monotonic clock


class Heartbeat(Facts):
    """What a peer says every half second, and how its neighbour measures the round trip.

    at: the time at its sender. echo: the time in the neighbour's last heartbeat, which had lain
    there for `held` seconds. last: it asks the neighbour to close the stream.
    """

    at: Seconds
    echo: Seconds | None = None
    held: Seconds = 0.0
    last: bool


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """What a link may carry, and how long it may be silent.

    frames: what the tensors may be. silence_s: after so long without a byte a link is broken.
    opening_s: one that does not stand after so long is missing, which the head must hear in time to
    know whose; the neighbour may have to finish a piece of work first. max_queued: frames of one
    link, to be sent or to be taken. inbox_bytes: what one link may leave in the inbox, at least
    four of its largest frames; as much may wait to be sent, and more where `room` (bytes) says so.
    """

    frames: FrameLimits
    silence_s: float
    opening_s: float = OPENING_S
    max_queued: int = MAX_QUEUED
    inbox_bytes: int = INBOX_BYTES
    room: Callable[[], float] = lambda: OUTGOING_BYTES

    @property
    def most_in_inbox(self) -> int:
        return max(self.inbox_bytes, 4 * self.frames.max_payload)


class Link:
    """One link of this peer, from the wish to have it to its end.

    expected: whether the neighbour dials. adopted: the network sets it to the stream then.
    backlog: how much of the link lies in the inbox.
    """

    def __init__(
        self,
        key: LinkKey,
        peer: str,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
        inbox: Inbox,
        traffic: Traffic,
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
        self._tick_s = min(limits.silence_s / 8, LONGEST_TICK_S)
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
        self.backlog = Backlog(
            max_bytes=limits.most_in_inbox,
            on_room=lambda: self._in_loop(self._room.set),
        )

    # ---- from any thread -------------------------------------------------------------------------
    def post(self, frame: Frame) -> None:
        """Queue a frame; raises ValueError for one that nobody would take."""
        head = encode_prefix_and_header(frame)
        if len(self._outgoing) >= self._limits.max_queued or self._holds_too_much():
            self._in_loop(lambda: self.end("stuck"))
        else:
            self._outgoing.append((head, frame.payload))
            self._in_loop(self._wake.set)

    def _holds_too_much(self) -> bool:
        """Whether a neighbour that reads nothing has this peer keep more than it has room for."""
        waiting = sum(len(payload) for _, payload in self._outgoing.copy())
        return waiting > self._limits.most_in_inbox and waiting > self._limits.room()

    def facts(self) -> LinkFacts:
        return LinkFacts(
            round_trip_s=min(tuple(self._round_trips), default=0.0),
            received_bytes_per_s=self._stream.received_bytes_per_s if self._stream else 0.0,
        )

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
        logger.warning("%s sent an invalid frame (%s); closing the link", self.peer, kind)
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
                self._inbox.put(Opened(self.key), self.backlog)
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
            for opened in (opener, self.adopted):  # also if it came just when the link ended
                if opened.done() and not opened.cancelled() and opened.exception() is None:
                    opened.result().abort()

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
            if self._stream is not None and unheard_s >= self._limits.silence_s:
                self.end("silent")
            elif self._stream is None and unheard_s >= self._limits.opening_s:
                self.end("missing")
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
                self._take(await stream.read(self._limits.frames))
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
        elif self.backlog.frames >= self._limits.max_queued:
            raise FrameRefused("flood", f"{self.backlog.frames} frames wait to be taken")
        else:
            self._inbox.put(Arrived(self.key, frame), self.backlog)
            if self.backlog.full:
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
        beat = Heartbeat.from_facts(frame.facts)
        self._heartbeat = beat.at, now
        if beat.echo is not None and (round_trip_s := now - beat.echo - beat.held) >= 0:
            self._round_trips.append(round_trip_s)
        if beat.last:
            self.end("closed")


def link_of(hello: Frame, stage: int) -> LinkKey | None:
    """Which link of a peer of this stage a `hello` asks for; None: none that it could have."""
    upper_stage = hello.facts.get("upper_stage")
    if upper_stage == stage:
        return LinkKey(hello.replica, hello.epoch, stage, "lower")
    if upper_stage == stage - 1:
        return LinkKey(hello.replica, hello.epoch, stage - 1, "upper")
    return None
