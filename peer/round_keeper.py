"""Keeps the round of a peer: when a head rings, when to send, when to go on (see rounds.py).

Two threads use it: the coordinator's, which looks at the others' bells, and the training loop,
which ends a round by its send.
"""

from __future__ import annotations

import threading
from dataclasses import replace

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


class RoundKeeper:
    """The round that this peer is in, its own bell, and the time of the group once known."""

    def __init__(self, me: str, clock: Clock, *, first: int = 0):
        """first: the least round that it can be in, whatever is seen of the run."""
        self._me = me
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._clock.monotonic()
        self._bell: BellRecord | None = None
        self._schedule: Schedule | None = None
        self._finished = False
        self.round = first

    # ---- the training loop -----------------------------------------------------------------------
    def send_due(self, now: float) -> tuple[int, float] | None:
        """The round and the time of its group if the send is to be taken at this inner step."""
        with self._lock:
            times = self._schedule
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
    def bell(self) -> BellRecord | None:
        """This head's bell of the round, to be kept alive in the DHT."""
        return self._bell

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
        return bells_to_read(self.round, view.replicas.values())

    def deaf_s(self, view: SwarmView, *, near_end: bool, resting: bool = False) -> float:
        """How long the others' bells may go unheard, in seconds.

        For ever (infinity) in a run that has been paused for longer than a bell lives: whoever rang
        before it has been heard, and nobody rings now.
        Else not at all (0) once one has rung or this peer is near the round's end, where all may
        have rung. Before that a sixteenth of the time that the round has lasted: whoever rings then
        gives the others a grace of a quarter of it.
        """
        if resting:
            return float("inf")
        if near_end or self._bell is not None or any(view.bells.values()):
            return 0.0
        return (self._clock.monotonic() - self._began) / 16

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
    ) -> BellRecord | None:
        """Move with the others, ring when it is time; a new or changed bell to publish.

        Only heads ring. Other members (`own` is None) take their send once their `head` has rung;
        a peer in no replica, which learns nothing more, as soon as the time of the group is known.

        A head does not ring while its last send is `undecided`: it trains on, and the round lasts
        as long as the exchange. If it rang, it would have to skip the send of this round, and two
        heads that skip in turn would never meet.
        """
        with self._lock:
            before = self._bell
            rung = [number for number, bells in view.bells.items() if bells]
            newest = current_round(self.round, rung=rung)
            if newest != self.round:
                self._go_to(newest)
            rung_before = self._bell is not None
            steps = 0 if own is None or undecided else own.inner_step
            if must_ring(steps, inner_steps, rung=rung_before):
                self._bell = BellRecord(
                    round=self.round,
                    finished_at=now,
                    round_s=self._clock.monotonic() - self._began,
                    tokens=tokens,
                    send_after=None,
                    scheduled_at=None,
                )
            seen = self._view(view, own)
            proposed = seen.proposal(self._me, now)
            if proposed is not None and self._bell is not None:
                self._bell = replace(
                    self._bell,
                    send_after=proposed.send_after,
                    scheduled_at=proposed.scheduled_at,
                )
                seen = self._view(view, own)
            self._schedule = seen.schedule(now)
            self._finished = head in seen.bells if head else True
            return self._bell if self._bell != before else None

    def _view(self, view: SwarmView, own: ReplicaRecord | None) -> RoundView:
        bells = dict(view.bells.get(self.round, {}))
        bells.pop(self._me, None)  # what the DHT has of ours may be older than what we know
        if self._bell is not None:
            bells[self._me] = self._bell
        replicas = dict(view.replicas)
        replicas.pop(self._me, None)
        if own is not None:
            replicas[self._me] = own
        return RoundView(round=self.round, bells=bells, replicas=replicas)

    def _go_to(self, round_number: int) -> None:
        self.round = round_number
        self._bell = self._schedule = None
        self._finished = False
        self._began = self._clock.monotonic()
