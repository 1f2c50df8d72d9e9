"""Links between the neighbours of a replica, as the computing thread sees them: keys, messages, and
the inbox that they come in.

The network thread (network.py) puts messages in, the computing thread takes them out when it has
time. The inbox knows how much of each link lies in it, so that a neighbour which sends more than
this peer can take costs no more than a bounded piece of memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dilocox.pipeline.frames import Frame

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
    peer: str
    kind: BrokenKind
    after_s: float


@dataclass(frozen=True)
class Wake:
    """Something outside of the links wants to be looked at."""


Message = Arrived | Opened | Broken | Wake


@dataclass(frozen=True)
class LinkFacts:
    """What was measured of a link that stands.

    round_trip_s: the shortest of the last heartbeats', None before the first. received_bytes_per_s:
    of payloads from their first byte to their last, smoothed; None before the first of some size.
    """

    round_trip_s: float | None
    received_bytes_per_s: float | None


@dataclass(frozen=True)
class Answer:
    """The answer to a request, and how long it took from the request's last byte."""

    frame: Frame
    round_trip_s: float


class Share:
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

    def add(self, message: Message) -> None:
        """Count a message that goes into the inbox."""
        if isinstance(message, Arrived):
            with self._lock:
                self.frames += 1
                self._bytes += len(message.frame.payload)

    def take(self, message: Message) -> None:
        """Count a message that was taken out."""
        if isinstance(message, Arrived):
            with self._lock:
                was_full = self.full
                self.frames -= 1
                self._bytes -= len(message.frame.payload)
            if was_full and not self.full:
                self._on_room()


class Inbox:
    """Messages in the order of their arrival, from the network thread to the computing thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Message, Share | None]] = queue.SimpleQueue()

    def put(self, message: Message, share: Share | None = None) -> None:
        """Add a message, of the link with this share; from any thread."""
        if share is not None:
            share.add(message)
        self._queue.put((message, share))

    def get(self, timeout: float) -> Message:
        """The next message, of links that were not dropped; raises `queue.Empty` after so long."""
        deadline = time.monotonic() + timeout
        while True:
            message, share = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            if share is None:
                return message
            share.take(message)
            if not share.dropped:
                return message
