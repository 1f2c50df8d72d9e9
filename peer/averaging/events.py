"""What the coordinator tells the training loop, and the loop takes between two inner steps."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from dilocox.peer.chain.sync import State, Told
from dilocox.peer.rounds.record import RoundRecord


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something to be merged; the loop sets `taken` when it has done so."""

    taken: threading.Event = field(default_factory=threading.Event, repr=False)


@dataclass(frozen=True, kw_only=True)
class BuffersAsked(Event):
    """The averaging process is about to change anchor, momentum and, of a send in flight, the
    message. Once this is taken, the loop leaves them alone until `Committed` or `Resynced` comes.
    """


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """The chain's next record; the anchor is that after it."""

    record: RoundRecord
    digest: str
    anchor_sha256: str
    remainder: bool  # the message is now what the record left of it
    exchange_s: float | None  # how long this peer's exchange took; None if it was not in the group
    matchmaking_s: float | None = None  # until its group stood; None if it was in none, or alone
    payload_bytes: int = 0  # of the record's means


@dataclass(frozen=True, kw_only=True)
class Voided(Event):
    """The exchange of a round came to nothing; the send is undone."""

    round: int
    reason: str
    certain: bool  # no record can ever name the send


@dataclass(frozen=True, kw_only=True)
class Resynced(Event):
    """A state was taken from a peer: it is the anchor and momentum now."""

    state: State
    fork_round: int | None  # our records after this one are void; None where we were only behind
    told: Told | None = None  # which records up to the state's count this peer, if headers said so


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The peer cannot go on as it is."""

    error: Exception


class EventQueue:
    """Events in order. Of records and states, the next one comes only when the last was taken."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def next_is(self, kind: type[Event]) -> bool:
        """Whether there is a next event, and it is of this kind."""
        with self._queue.mutex:
            waiting = self._queue.queue
            return bool(waiting) and isinstance(waiting[0], kind)

    def get(self, wait_s: float = 0.0) -> Event | None:
        """The next event; None if there is none within the wait."""
        try:
            return self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
