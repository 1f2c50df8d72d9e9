"""What the coordinator tells the training loop, and the loop takes between two inner steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dilocox.peer.chain.chain_client import TakenState
from dilocox.peer.chain.header_client import CountedRounds
from dilocox.peer.rounds.record import RoundRecord


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something to be merged; the loop sets `taken` when it has done so."""

    taken: threading.Event = field(default_factory=threading.Event, repr=False)


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

    state: TakenState
    fork_round: int | None  # our records after this one are void; None where we were only behind
    told: CountedRounds | None = None  # up to the state, if headers said so


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The peer cannot go on as it is."""

    error: Exception


class AnchorLease:
    """The holder of anchor, momentum and, of a send in flight, the message: the training loop, or
    the averaging process, which moves them on to the next record or to another state.

    The loop offers them while it computes an inner step or waits. Once they are taken they are not
    the loop's until `Committed` or `Resynced` comes.

    Attributes:
        leased: whether the averaging process has them.
        on_taken: called in the thread that takes them; the loop does not use them then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered = False
        self.leased = False
        self.on_taken: Callable[[], None] = lambda: None

    def offer(self) -> None:
        """The loop does not need them for now."""
        with self._lock:
            self._offered = not self.leased

    def withdraw(self) -> bool:
        """The loop needs them; whether it has them."""
        with self._lock:
            self._offered = False
            return not self.leased

    def take(self) -> bool:
        """For the averaging process; whether that has them."""
        with self._lock:
            if self._offered:
                self.on_taken()
                self._offered, self.leased = False, True
            return self.leased

    def give_back(self) -> None:
        """They are the loop's again."""
        with self._lock:
            self.leased = False


class EventQueue:
    """Events in order. Of records and states, the next one comes only when the last was taken.

    Attributes:
        lease: of what they are about.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self.lease = AnchorLease()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def get(self, wait_s: float = 0.0) -> Event | None:
        """The next event; None if there is none within the wait."""
        try:
            return self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
