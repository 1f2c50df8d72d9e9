"""Keeps the round of a peer: when a head rings, when to send, when to go on (see rounds.py).

What was seen of a round stays seen until its group has met, also by peers that have gone on: bells
in the DHT live for three heartbeats, and a round may last an hour. For the same reason a head keeps
its own bell of a round alive until then. (With bells that were forgotten as they expired, 4 heads
committed every third round of 600 s: slower ones rang into an empty room.)

Two threads use it: the coordinator's, which looks at the others' bells, and the training loop,
which ends a round by its send.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace

from dilocox.dht.clock import Clock
from dilocox.dht.records import BellRecord, ReplicaRecord
from dilocox.peer.rounds import (
    RoundView,
    Schedule,
    bells_to_read,
    current_round,
    first_round,
    must_ring,
)
from dilocox.peer.view import SwarmView

LOOKS = 32  # at others' bells in the time of a round
LOOK_S, LONGEST_LOOK_S = 1.0, 60.0  # between two of them


@dataclass
class _Round:
    """What is known of one round. own: this head's bell. times: the smallest ever seen."""

    bells: dict[str, BellRecord] = field(default_factory=dict[str, BellRecord])
    own: BellRecord | None = None
    times: Schedule | None = None


class RoundKeeper:
    """The round that this peer is in, its own bells, and the times of the groups once known."""

    def __init__(self, me: str, clock: Clock, *, meeting_s: float, first: int = 0):
        """meeting_s: how long after its time a group may still form. first: the least round that it
        can be in, whatever is seen of the run.
        """
        self._me = me
        self._clock = clock
        self._meeting_s = meeting_s
        self._lock = threading.Lock()
        self._began = clock.monotonic()
        self._lasted_s = 0.0  # the round before
        self._finished = False
        self._known: dict[int, _Round] = {first: _Round()}  # this round, and those yet to meet
        self.round = first

    # ---- the training loop -----------------------------------------------------------------------
    def send_due(self, now: float) -> tuple[int, float] | None:
        """The round and the time of its group if the send is to be taken at this inner step."""
        with self._lock:
            times = self._here.times
            if times is None or not (self._finished or now >= times.send_after):
                return None
            return self.round, times.scheduled_at

    def end(self, round_number: int) -> None:
        """The send of this round was taken, or skipped."""
        with self._lock:
            if round_number >= self.round:  # else the others' bells have led on already
                self._go_to(round_number + 1)

    # ---- the coordinator -------------------------------------------------------------------------
    @property
    def bells(self) -> list[BellRecord]:
        """This head's bells, to be kept alive in the DHT."""
        with self._lock:
            return [each.own for each in self._known.values() if each.own is not None]

    def meets_at(self, round_number: int) -> float | None:
        """The time of a round's group, also of one that it has sent in; None if not known."""
        known = self._known.get(round_number)
        return None if known is None or known.times is None else known.times.scheduled_at

    def start(self, view: SwarmView, last_record: int) -> None:
        """The round in which a peer begins that joins or comes back."""
        with self._lock:
            rung = [number for number, bells in view.bells.items() if bells]
            first = first_round(view.replicas.values(), rung=rung, last_record=last_record)
            self._go_to(max(self.round, first))

    def stood_still(self, seconds: float) -> None:
        """So many seconds of this round nobody trained: its grace is not to grow by them."""
        with self._lock:
            self._began += seconds

    def wanted_bells(self, view: SwarmView) -> list[int]:
        """The rounds whose bells are to be read."""
        wanted = bells_to_read(self.round, view.replicas.values())
        return [*wanted, *sorted(self._known.keys() - set(wanted), reverse=True)]

    def look_s(self, *, resting: bool = False) -> float:
        """Seconds between two looks at the others' bells.

        In the measure of a round's time: who rings gives the others a grace of a quarter of it, and
        a notice that counts with this. Infinity in a run that has been paused (`resting`) for
        longer than a bell lives: whoever rang before it has been heard, and nobody rings now.
        """
        if resting:
            return math.inf
        lasted_s = max(self._clock.monotonic() - self._began, self._lasted_s)
        return min(max(lasted_s / LOOKS, LOOK_S), LONGEST_LOOK_S)

    def follow(
        self,
        view: SwarmView,
        own: ReplicaRecord | None,
        now: float,
        *,
        head: str,
        inner_steps: int,
        tokens: int,
        undecided: bool,
    ) -> bool:
        """Move with the others, ring when it is time; whether `bells` are to be published at once.

        Only heads ring. Other members (`own` is None) take their send once their `head` has rung;
        a peer in no replica, which learns nothing more, as soon as the time of the group is known.

        A head does not ring while its last send is `undecided`: it trains on, and the round lasts
        as long as the exchange. If it rang, it would have to skip the send of this round, and two
        heads that skip in turn would never meet.
        """
        with self._lock:
            self._hear(view)
            rung = [number for number, each in self._known.items() if each.bells]
            newest = current_round(self.round, rung=rung)
            if newest != self.round:
                self._go_to(newest)
            here = self._here
            before = here.own
            steps = 0 if own is None or undecided else own.inner_step
            if must_ring(steps, inner_steps, rung=before is not None):
                here.own = BellRecord(
                    round=self.round,
                    finished_at=now,
                    round_s=self._clock.monotonic() - self._began,
                    tokens=tokens,
                    send_after=None,
                    scheduled_at=None,
                )
            proposed = self._view(self.round, view, own).proposal(self._me, now)
            if proposed is not None and here.own is not None:
                here.own = _with(here.own, proposed)
            urgent = here.own != before
            self._set_times(view, own, now)
            own_rung = head == self._me and here.own is not None
            self._finished = not head or own_rung or head in here.bells
            return urgent

    def _hear(self, view: SwarmView) -> None:
        for number, bells in view.bells.items():
            if number in self._known or (number > self.round and bells):
                known = self._known.setdefault(number, _Round())
                known.bells |= {
                    head: bell
                    for head, bell in bells.items()
                    # of our own, what the DHT has may be older than what we know
                    if head != self._me and bell.round == number
                }

    def _set_times(self, view: SwarmView, own: ReplicaRecord | None, now: float) -> None:
        for number, known in list(self._known.items()):
            known.times = self._view(number, view, own).schedule(now)
            over = known.times is None or now > known.times.scheduled_at + self._meeting_s
            if over and number < self.round:
                del self._known[number]
                continue
            if known.own is not None and known.times is not None:
                # should the one that wrote them be gone, others learn them from here
                known.own = _with(known.own, known.times)

    def _view(self, number: int, view: SwarmView, own: ReplicaRecord | None) -> RoundView:
        known = self._known[number]
        bells = dict(known.bells)
        if known.own is not None:
            bells[self._me] = known.own
        replicas = dict(view.replicas)
        replicas.pop(self._me, None)
        if own is not None:
            replicas[self._me] = own
        return RoundView(round=number, bells=bells, replicas=replicas, known=known.times)

    @property
    def _here(self) -> _Round:
        return self._known[self.round]

    def _go_to(self, round_number: int) -> None:
        if round_number != self.round:
            self._lasted_s = self._clock.monotonic() - self._began
        self.round = round_number
        self._known.setdefault(round_number, _Round())
        self._finished = False
        self._began = self._clock.monotonic()


def _with(bell: BellRecord, times: Schedule) -> BellRecord:
    return replace(bell, send_after=times.send_after, scheduled_at=times.scheduled_at)
