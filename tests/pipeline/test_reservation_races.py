"""Heads that want the same peer at the same time: one gets it, and all hear the truth."""

from __future__ import annotations

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dilocox.pipeline.reservation import Reservation
from tests.pipeline.reservations import LEASE_S, Clock, ask, assign, assignment

HEADS = ("A", "B")


def test_of_many_heads_at_once_one_gets_the_peer() -> None:
    """Every head reserves and, if it may, assigns; in threads that start together."""
    reservation = Reservation(me="me", stage=1, num_stages=3, on_change=lambda: None)
    reservation.open({})
    for _ in range(20):
        start, won = threading.Barrier(8), list[str]()

        def run(head: str, start: threading.Barrier = start, won: list[str] = won) -> None:
            start.wait(5.0)
            if ask(reservation, "reserve", head).kind == "yes":
                won.append(head)
                assert assign(reservation, assignment(head)).kind == "yes"

        threads = [threading.Thread(target=run, args=(f"head{number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)
        (winner,) = won
        taken = reservation.take_assignment()
        assert taken is not None
        assert taken.head == winner
        reservation.leave(winner)


class TwoHeads(RuleBasedStateMachine):
    """Requests in any order, late and repeated, against what each head may believe."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.reservation = Reservation(
            me="me",
            stage=1,
            num_stages=3,
            lease_s=LEASE_S,
            clock=self.clock,
            on_change=lambda: None,
        )
        self.reservation.open({})
        self.leases: dict[str, float] = {}
        self.member_of = ""
        self.epoch = 0

    @rule(head=st.sampled_from(HEADS))
    def reserve(self, head: str) -> None:
        yes = ask(self.reservation, "reserve", head).kind == "yes"
        others = [each for each in self.holders() if each != head]
        assert yes == (self.member_of in ("", head) and not others)
        if yes and not self.member_of:
            self.leases[head] = self.clock.now + LEASE_S

    @rule(head=st.sampled_from(HEADS), epoch=st.integers(0, 4))
    def assign(self, head: str, epoch: int) -> None:
        yes = assign(self.reservation, assignment(head, epoch)).kind == "yes"
        if self.member_of == head:
            assert yes == (epoch >= self.epoch)
        else:
            assert yes == (not self.member_of and head in self.holders())
        if yes:
            self.member_of, self.epoch, self.leases = head, epoch, {}

    @rule(head=st.sampled_from(HEADS))
    def release(self, head: str) -> None:
        assert ask(self.reservation, "release", head).kind == "yes"
        self.leases.pop(head, None)
        if self.member_of == head:
            self.member_of = ""

    @rule()
    def leave(self) -> None:
        self.reservation.take_assignment()
        self.reservation.leave(self.member_of)
        self.member_of = ""

    @rule(seconds=st.sampled_from([1.0, 6.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def holders(self) -> list[str]:
        return [head for head, until in self.leases.items() if self.clock.now < until]

    @invariant()
    def the_reservation_says_what_the_heads_heard(self) -> None:
        assert len(self.holders()) <= 1
        current = self.reservation.assignment
        assert (current.head if current else "") == self.member_of
        expected = "member" if self.member_of else "reserved" if self.holders() else "free"
        assert self.reservation.state == expected


TestTwoHeads = TwoHeads.TestCase
TestTwoHeads.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
