"""Whether this peer is free for a replica: which head may have it, and in which epoch it works.

What: `Reservation` answers the requests of heads (ping, reserve, assign, release) in the network
thread and hands the assignment that follows to the thread that computes.
Why: the swarm's records are hints, seconds old; two heads may want the same spare at once. Only the
peer itself knows whether it is free, so a head reserves all it needs and then assigns them
(two-phase). A reservation expires by itself: a head that dies in between blocks nobody. A head that
had one and did not come waits for twice as long as it held it: others go first then. Keys cost
nothing, so heads that are known to train go before those that are not: they take a reservation or a
member over (members that train with a head say so in the DHT, and are not asked), nobody else has
one while they ask, and a peer that becomes free is theirs for a while.
How: one lock, no I/O, time from a clock that is passed in. Nothing that a peer sends raises: what
is odd is answered with "no" and counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from dilocox.dht.invite import MAX_PEER_ID
from dilocox.pipeline.frames import Codec, Count, Facts, Frame, FrameRefused, or_nan

ReservationState = Literal["shut", "free", "reserved", "member"]

# How long a reservation holds if no assignment follows: a head makes up to fifteen, one after
# another, and some of those that it asks do not answer.
LEASE_S = 20.0
LONGEST_OPENING_S = 120.0
MAX_WINDOW = 65536
MAX_LEARNING_RATE = 10.0  # no manifest has more

PeerName = Annotated[str, Field(max_length=MAX_PEER_ID)]
ClipFactor = Annotated[float, or_nan(0.0, 1.0)]
LearningRate = Annotated[float, Field(ge=0.0, le=MAX_LEARNING_RATE, allow_inf_nan=False)]


_DONE = ("done_step", "done_factor", "done_learning_rate")


class Assignment(Facts):
    """One epoch of a replica: its members, and where they are.

    replica, head: peer id of the stage-0 peer. members: peer ids by stage.
    clients: by stage, whether the member can only dial out; of two neighbours at most one.
    codecs: of each link, from the head downwards.
    step: the inner step that comes next. done: number, clip factor (not a number: skipped) and
        learning rate of the last GO, for members that have not taken that step; None before the
        first. In a frame each of the three is a fact of its own.
    opening_s: what the links may take to stand, where members finish a long piece of work first.
    """

    replica: PeerName
    epoch: Count
    head: PeerName
    members: tuple[PeerName, ...]
    clients: tuple[bool, ...]
    codecs: tuple[Codec, ...]
    step: Count
    done: tuple[Count, ClipFactor, LearningRate] | None
    opening_s: Annotated[float, Field(ge=0.0, le=LONGEST_OPENING_S)] = 0.0

    def to_facts(self) -> dict[str, object]:
        done = dict(zip(_DONE, self.done or (None, None, None), strict=True))
        return {**self.model_dump(exclude={"done"}), **done}

    @classmethod
    def from_facts(cls, facts: Mapping[str, object], num_stages: int = 0) -> Assignment:
        done = tuple(facts.get(name) for name in _DONE)
        known = None if done == (None, None, None) else done
        return super().from_facts({**facts, "done": known}, num_stages)

    def contradiction(self, num_stages: int) -> str:
        if (len(self.members), len(self.clients)) != (num_stages, num_stages):
            return f"it is not about {num_stages} stages"
        if len(self.codecs) != num_stages - 1:
            return f"{len(self.codecs)} codecs of {num_stages - 1} links"
        if self.members[0] != self.head or self.replica != self.head:
            return "the head is not the member of stage 0"
        if len(set(self.members)) != len(self.members) or not all(self.members):
            return "members are missing or there twice"
        if any(upper and lower for upper, lower in pairwise(self.clients)):
            return "two neighbours that can only dial out"
        if self.done is not None and self.done[0] >= self.step:
            return f"step {self.done[0]} is done, {self.step} comes next"
        return ""


class Reservation:
    """Says yes to one head at a time. All methods may be called from any thread.

    clock: monotonic seconds.
    proven: heads whose replicas are known to learn; they go first. turn_s: how long a peer that was
        in a replica is theirs alone, until they have heard that it is free.
    on_change: called, without a lock, after an answer that changed the state; to wake the thread
        that takes assignments.
    `refused` counts requests that were odd (not those that came too late), by kind.
    """

    def __init__(
        self,
        *,
        me: str,
        stage: int,
        num_stages: int,
        clock: Callable[[], float] = time.monotonic,
        proven: Callable[[], Collection[str]] = tuple,
        turn_s: float = LEASE_S,
        on_change: Callable[[], None],
    ):
        self.refused: Counter[str] = Counter()
        self._me = me
        self._stage = stage
        self._num_stages = num_stages
        self._clock = clock
        self._proven = proven
        self._turn_s = turn_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._facts: dict[str, object] = {}
        self._shut: str | None = "starting"  # why, None while open
        self._hold: tuple[str, float] | None = None  # the head that reserved it, until when
        self._not_before: dict[str, float] = {}  # heads that held it for nothing
        self._theirs_until = -math.inf  # of proven heads
        self._assignment: Assignment | None = None
        self._waiting: Assignment | None = None  # not taken yet
        self._taken = ""  # the replica whose assignment the other thread took last

    # ---- the peer's own side ---------------------------------------------------------------------
    def open(self, facts: Mapping[str, object]) -> None:
        """From now on this peer may be recruited.

        facts: what heads hear in every answer, beside `stage`, `state`, `reason` and, for its own
        head, `epoch`. Called again it renews the facts, in a replica too.
        """
        with self._lock:
            self._facts = dict(facts)
            self._shut = None

    def shut(self, reason: str) -> None:
        """From now on nobody recruits this peer; a reservation is void, a membership stays."""
        with self._lock:
            self._shut = reason
            self._hold = None

    def leave(self, replica: str) -> None:
        """This peer has left that replica: it was dissolved, or let this peer go.

        An assignment that came meanwhile and is not taken yet stands, unless this is shut.
        """
        with self._lock:
            current = self._assignment
            overtaken = self._waiting is not None and self._shut is None
            if current is not None and current.replica == replica and not overtaken:
                self._end_assignment()
            if self._taken == replica:
                self._taken = ""

    def take_assignment(self) -> Assignment | None:
        """The newest assignment, once; None if there is nothing new."""
        with self._lock:
            taken, self._waiting = self._waiting, None
            if taken is not None:
                self._taken = taken.replica
            return taken

    @property
    def assignment(self) -> Assignment | None:
        """The newest assignment, None while this peer is in no replica."""
        with self._lock:
            return self._assignment

    @property
    def released(self) -> bool:
        """Whether the head let this peer go from the replica whose assignment was taken last.

        True until that replica is left (`leave`) or another assignment is taken, so that it is
        never missed between two looks.
        """
        with self._lock:
            now = "" if self._assignment is None else self._assignment.replica
            return self._taken not in ("", now)

    @property
    def state(self) -> ReservationState:
        """What this peer is to others now."""
        with self._lock:
            return self._state()

    # ---- requests of heads -----------------------------------------------------------------------
    def answer(self, peer: str, frame: Frame) -> Frame:
        """Answer a request of `peer` with "yes" or "no"; the facts of "no" hold a `reason`."""
        with self._lock:
            before = self._assignment, self._hold
            try:
                reason = self._reason_against(peer, frame)
            except FrameRefused as odd:
                self.refused[odd.kind] += 1
                reason = str(odd)
            changed = before != (self._assignment, self._hold)
            reply = self._reply(frame, reason)
        if changed:
            self._on_change()
        return reply

    def _reason_against(self, peer: str, frame: Frame) -> str:
        """Do what is asked; why not, empty if it is done."""
        if frame.kind == "ping":
            return ""
        if frame.replica != peer:
            raise FrameRefused("replica", "only its head speaks for a replica")
        match frame.kind:
            case "reserve":
                return self._reserve(peer, frame.facts)
            case "assign":
                return self._assign(peer, Assignment.from_facts(frame.facts, self._num_stages))
            case "release":
                self._release(peer)
                return ""
            case _:
                raise FrameRefused("kind", f"{frame.kind} is no request")

    def _reserve(self, head: str, facts: Mapping[str, object]) -> str:
        # A record of a peer that has moved is there until it expires.
        if "stage" in facts and facts["stage"] != self._stage:
            return f"it hosts stage {self._stage}"
        # Its own head asks again when it was restarted or its release was lost: the next assignment
        # says which, and the answer which epoch it must exceed.
        if self._assigned_to(head) or self._reserved_for(head):
            return ""
        if self._shut is not None:
            return self._shut
        if self._stage == 0:
            return "it is a head"
        proven, now = self._proven(), self._clock()
        goes_first, current = head in proven, self._assignment
        if current is not None and not (goes_first and current.head not in proven):
            return "it is in another replica"
        if self._state() != "reserved":
            self._end_hold()
        elif self._hold and not (goes_first and self._hold[0] not in proven):
            return "it is reserved for another replica"
        if now < self._not_before.get(head, 0.0):
            return "it was reserved for this replica before, which did not come"
        if not goes_first and proven and now < self._theirs_until:
            return "heads whose replicas learn go first"
        self._end_assignment()
        self._end_hold()
        self._hold = head, now + LEASE_S
        if goes_first:
            self._theirs_until = now + LEASE_S
        return ""

    def _end_assignment(self) -> None:
        if self._assignment is not None:
            self._theirs_until = self._clock() + self._turn_s
        self._assignment = self._waiting = None

    def _end_hold(self) -> None:
        """A reservation, if there is one, has led to nothing."""
        if self._hold is None:
            return
        (head, until), now = self._hold, self._clock()
        held_s = LEASE_S - max(0.0, until - now)
        self._hold = None
        waiting = {each: at for each, at in self._not_before.items() if at > now}
        self._not_before = waiting | {head: min(until, now) + 2 * held_s}

    def _assign(self, head: str, assignment: Assignment) -> str:
        if assignment.head != head:
            raise FrameRefused("header", "another peer is its head")
        if assignment.members[self._stage] != self._me:
            raise FrameRefused("header", f"this peer is not its member of stage {self._stage}")
        if self._stage == 0:
            raise FrameRefused("header", "a head is assigned to nothing")
        current = self._assignment
        if current is not None and current.replica == assignment.replica:
            if assignment.epoch <= current.epoch:
                return "" if repr(assignment) == repr(current) else f"epoch {current.epoch} is on"
        elif current is not None or not self._reserved_for(head):
            return "it is in another replica" if current else "it is not reserved for this replica"
        self._assignment = self._waiting = assignment
        self._hold = None
        return ""

    def _release(self, head: str) -> None:
        if self._reserved_for(head):
            self._end_hold()
        if self._assigned_to(head):
            self._end_assignment()

    def _reply(self, frame: Frame, reason: str) -> Frame:
        facts = {**self._facts, "stage": self._stage, "state": self._state()}
        facts["reason"] = reason or self._shut or ""
        if self._assignment is not None and self._assignment.replica == frame.replica:
            facts["epoch"] = self._assignment.epoch
        kind = "no" if reason else "yes"
        return Frame(kind=kind, replica=frame.replica, epoch=frame.epoch, facts=facts)

    def _state(self) -> ReservationState:
        if self._assignment is not None:
            return "member"
        if self._hold is not None and self._clock() < self._hold[1]:
            return "reserved"
        return "free" if self._shut is None else "shut"

    def _reserved_for(self, head: str) -> bool:
        return self._state() == "reserved" and self._hold is not None and self._hold[0] == head

    def _assigned_to(self, head: str) -> bool:
        return self._assignment is not None and self._assignment.head == head
