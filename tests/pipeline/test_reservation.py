"""A peer is in one replica at a time, whoever asks for it, however often and at the same time.

An assignment comes from a stranger's machine: it is whole and consistent, or it is refused.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dilocox.pipeline.frames import Frame, FrameRefused
from dilocox.pipeline.recruiting import REQUEST_LIMIT_S
from dilocox.pipeline.reservation import LEASE_S, Assignment, Reservation
from tests.clocks import TestClock
from tests.pipeline.wires import over_the_wire

HEADS = ("A", "B")


def assignment(head: str = "A", epoch: int = 1, **fields: Any) -> Assignment:
    plain: dict[str, Any] = {
        "members": (head, "me", "last"),
        "clients": (False, True, False),
        "codecs": ("bf16", "int4"),
        "step": 4,
        "done": (3, 0.5, 1e-3),
    }
    return Assignment(replica=head, head=head, epoch=epoch, **plain | fields)


def assign(reservation: Reservation, what: Assignment, *, by: str = "") -> Frame:
    peer = by or what.head
    return reservation.answer(peer, Frame(kind="assign", replica=peer, facts=what.to_facts()))


def ask(reservation: Reservation, kind: str, head: str, **facts: object) -> Frame:
    return reservation.answer(head, Frame(kind=kind, replica=head, facts=facts))


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def reservation(clock: TestClock, changes: list[str]) -> Reservation:
    def on_change() -> None:
        changes.append(reservation.state)  # reads the reservation: it is called without the lock

    reservation = Reservation(
        me="me", stage=1, num_stages=3, clock=clock.monotonic, on_change=on_change
    )
    reservation.open({"anchor_round": 7})
    return reservation


def test_a_head_reserves_then_assigns_and_the_peer_takes_it_once(
    reservation: Reservation, changes: list[str]
) -> None:
    answer = ask(reservation, "reserve", "A")
    assert (answer.kind, answer.facts["anchor_round"], answer.facts["stage"]) == ("yes", 7, 1)
    assert reservation.state == "reserved"
    assert assign(reservation, assignment()).kind == "yes"
    assert reservation.state == "member"
    assert changes == ["reserved", "member"]
    assert reservation.take_assignment() == assignment()
    assert reservation.take_assignment() is None
    assert reservation.assignment == assignment()


def test_a_peer_that_is_shut_is_not_recruited_but_answers_a_ping(reservation: Reservation) -> None:
    reservation.shut("catching up")
    refused = ask(reservation, "reserve", "A")
    assert (refused.kind, refused.facts["reason"]) == ("no", "catching up")
    moved = ask(reservation, "reserve", "A", stage=2)  # by a record of the stage that it left
    assert (moved.kind, moved.facts["reason"]) == ("no", "it hosts stage 1")
    pong = ask(reservation, "ping", "A")
    assert (pong.kind, pong.facts["state"], pong.facts["reason"]) == ("yes", "shut", "catching up")
    reservation.open({"anchor_round": 8})
    assert ask(reservation, "reserve", "A").facts["anchor_round"] == 8
    reservation.shut("leaving")
    assert assign(reservation, assignment()).kind == "no"
    starting = Reservation(me="me", stage=1, num_stages=3, on_change=lambda: None)
    assert (starting.state, ask(starting, "reserve", "A").kind) == ("shut", "no")


def test_the_second_head_gets_a_refusal_and_the_first_may_ask_again(
    reservation: Reservation,
) -> None:
    assert ask(reservation, "reserve", "A").kind == "yes"
    refused = ask(reservation, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is reserved for another replica")
    late = assign(reservation, assignment("B"))
    assert (late.kind, late.facts["reason"]) == ("no", "it is not reserved for this replica")
    assert ask(reservation, "reserve", "A").kind == "yes"
    assert assign(reservation, assignment("A")).kind == "yes"
    refused = ask(reservation, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is in another replica")
    assert assign(reservation, assignment("B", epoch=9)).kind == "no"
    assert reservation.assignment == assignment("A")


def test_a_reservation_lasts_while_its_head_makes_those_of_all_other_stages(
    reservation: Reservation, clock: TestClock
) -> None:
    assert ask(reservation, "reserve", "A").kind == "yes"
    clock.now += 14 * 0.6 + 2 * REQUEST_LIMIT_S  # of sixteen stages, over relays; two are dead
    assert assign(reservation, assignment("A")).kind == "yes"


def test_who_holds_a_peer_for_nothing_leaves_it_to_others(
    reservation: Reservation, clock: TestClock
) -> None:
    """A stranger that reserves it again and again, and never comes, has it a third of the time."""
    reservation.open({})
    held_s = 0.0
    for _ in range(900):
        ask(reservation, "reserve", "A")
        held_s += reservation.state == "reserved"
        clock.now += 1.0
    assert held_s <= 310
    clock.now += LEASE_S
    assert ask(reservation, "reserve", "B").kind == "yes"


@pytest.mark.parametrize("known", [False, True], ids=["any head", "a head that learns goes first"])
def test_a_crowd_of_keys_holds_a_spare_for_ever_only_where_no_head_goes_first(
    clock: TestClock, known: bool
) -> None:
    """Each key reserves the spare, makes it a member of its replica, and nothing comes of it, for
    which the spare leaves it after a while. The head that learns asks as often as heads do.
    """
    spare = Reservation(
        me="me",
        stage=1,
        num_stages=3,
        clock=clock.monotonic,
        proven=lambda: {"A"} if known else (),
        on_change=lambda: None,
    )
    spare.open({})
    left_at = clock.now
    for number in range(6000):
        clock.now += 0.1
        if clock.now - left_at >= 120.0 and (current := spare.assignment) is not None:
            spare.take_assignment()
            spare.leave(current.replica)
            left_at = clock.now
        ask(spare, "reserve", f"key{number}")
        assign(spare, assignment(f"key{number}"))
        if number % 8 == 7 and ask(spare, "reserve", "A").kind == "yes":
            assert known and assign(spare, assignment("A")).kind == "yes"
            return
    assert not known


def test_a_head_that_learns_takes_a_reservation_over_and_who_is_new_waits_for_it(
    clock: TestClock,
) -> None:
    proven = set[str]()
    peer = Reservation(
        me="me",
        stage=1,
        num_stages=3,
        clock=clock.monotonic,
        proven=lambda: proven,
        turn_s=30.0,
        on_change=lambda: None,
    )
    peer.open({})
    assert ask(peer, "reserve", "new").kind == "yes"  # nobody is known yet: all are new
    proven |= {"A", "B"}
    assert ask(peer, "reserve", "newer").kind == "no"
    assert ask(peer, "reserve", "A").kind == "yes"
    assert assign(peer, assignment("new")).kind == "no"
    assert ask(peer, "reserve", "B").kind == "no"  # of its like the first has it
    assert ask(peer, "release", "A").kind == "yes"
    refused = ask(peer, "reserve", "newer")
    assert (refused.kind, refused.facts["reason"]) == ("no", "heads whose replicas learn go first")
    clock.now += LEASE_S  # nobody of them asked since
    assert ask(peer, "reserve", "newer").kind == "yes"
    assert assign(peer, assignment("newer")).kind == "yes"
    assert peer.take_assignment() == assignment("newer")
    assert ask(peer, "reserve", "newest").kind == "no"
    assert ask(peer, "reserve", "A").kind == "yes"  # its record says that nothing came of that
    assert (peer.state, peer.released) == ("reserved", True)
    assert assign(peer, assignment("A")).kind == "yes"
    assert ask(peer, "reserve", "B").kind == "no"
    ask(peer, "release", "A")
    clock.now += 29.0
    assert ask(peer, "reserve", "newest").kind == "no"  # they may not know that it is free
    clock.now += 1.0
    assert ask(peer, "reserve", "newest").kind == "yes"


def test_only_a_later_epoch_replaces_an_assignment(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment(epoch=3))
    reservation.take_assignment()
    old = assign(reservation, assignment(epoch=2))
    assert (old.kind, old.facts["reason"], old.facts["epoch"]) == ("no", "epoch 3 is on", 3)
    assert assign(reservation, assignment(epoch=3, step=9)).kind == "no"
    assert (
        assign(reservation, assignment(epoch=3)).kind == "yes"
    )  # the same again: its answer was lost
    assert reservation.take_assignment() is None
    reservation.shut("nobody else")  # a member stays one until it leaves
    for epoch in (5, 6):
        assert assign(reservation, assignment(epoch=epoch)).kind == "yes"
    assert reservation.take_assignment() == assignment(epoch=6)


def test_release_ends_a_reservation_or_a_membership(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assert ask(reservation, "release", "B").kind == "yes"
    assert reservation.state == "reserved"
    assert ask(reservation, "release", "A").kind == "yes"
    assert (reservation.state, reservation.released) == ("free", False)
    ask(reservation, "reserve", "A")
    assign(reservation, assignment())
    ask(reservation, "release", "A")  # before it was taken
    assert (reservation.take_assignment(), reservation.released) == (None, False)
    ask(reservation, "reserve", "A")
    assign(reservation, assignment())
    reservation.take_assignment()
    ask(reservation, "release", "B")
    assert (reservation.state, reservation.released) == ("member", False)
    ask(reservation, "release", "A")
    assert (reservation.state, reservation.released, reservation.assignment) == ("free", True, None)
    assert reservation.take_assignment() is None
    assert reservation.released  # until it is acted on
    reservation.leave("A")
    assert not reservation.released


def test_a_release_is_not_missed_when_the_next_head_is_quick(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment("A"))
    reservation.take_assignment()
    ask(reservation, "release", "A")
    ask(reservation, "reserve", "B")
    assign(reservation, assignment("B"))
    assert reservation.released
    reservation.leave("A")
    assert not reservation.released
    assert reservation.take_assignment() == assignment("B")


@pytest.mark.parametrize("shut", [False, True])
def test_an_epoch_that_comes_while_a_peer_leaves_is_taken_unless_it_leaves_for_good(
    reservation: Reservation, shut: bool
) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment())
    reservation.take_assignment()
    assign(reservation, assignment(epoch=2))
    if shut:
        reservation.shut("leaving")
    reservation.leave("A")
    assert reservation.take_assignment() == (None if shut else assignment(epoch=2))
    assert reservation.state == ("shut" if shut else "member")


@pytest.mark.parametrize(
    ("peer", "frame", "kind"),
    [
        ("B", Frame(kind="reserve", replica="A"), "replica"),
        ("B", Frame(kind="release", replica="A"), "replica"),
        ("B", Frame(kind="assign", replica="A", facts=assignment().to_facts()), "replica"),
        ("B", Frame(kind="assign", replica="B", facts=assignment().to_facts()), "header"),
        ("A", Frame(kind="assign", replica="A"), "header"),
        ("A", Frame(kind="assign", replica="A", facts=assignment(step=3).to_facts()), "header"),
        ("A", Frame(kind="forward", replica="A"), "kind"),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_who_speaks_for_another_is_refused(
    reservation: Reservation, peer: str, frame: Frame, kind: str
) -> None:
    ask(reservation, "reserve", peer)
    before = reservation.state
    assert reservation.answer(peer, frame).kind == "no"
    assert (reservation.refused, reservation.state) == ({kind: 1}, before)


def test_an_assignment_must_name_this_peer_at_its_stage(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assert assign(reservation, assignment(members=("A", "last", "me"))).kind == "no"
    assert assign(reservation, assignment(members=("A", "last", "other"))).kind == "no"
    assert reservation.refused == {"header": 2}


def test_a_head_is_recruited_by_nobody() -> None:
    reservation = Reservation(me="me", stage=0, num_stages=3, on_change=lambda: None)
    reservation.open({})
    assert ask(reservation, "reserve", "A").kind == "no"
    own = assignment("me", members=("me", "x", "y"))
    assert assign(reservation, own, by="me").kind == "no"
    assert reservation.state == "free"


# ---- assignments ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given", [assignment(), assignment(done=None), assignment(done=(3, math.nan, 0.0))]
)
def test_assignment_reads_back_equal(given: Assignment) -> None:
    carried = over_the_wire(Frame(kind="assign", facts=given.to_facts()))
    assert repr(Assignment.from_facts(carried.facts, 3)) == repr(given)


def test_largest_run_fits_into_a_frame() -> None:
    members = tuple(f"{number:0>60}" for number in range(256))
    large = assignment(members[0], members=members, clients=(False,) * 256, codecs=("int8",) * 255)
    carried = over_the_wire(Frame(kind="assign", facts=large.to_facts()))
    assert Assignment.from_facts(carried.facts, 256) == large


@pytest.mark.parametrize(
    "odd",
    [
        {"replica": "B"},
        {"replica": 7},
        {"head": "me"},
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 2**60},
        {"members": ("A", "me")},
        {"members": ("A", "me", "me")},
        {"members": ("A", "me", "")},
        {"members": ("A", "me", "x" * 65)},
        {"members": "Ame"},
        {"clients": (True, True, False)},
        {"clients": (False, 1, False)},
        {"clients": (False, False)},
        {"codecs": ("bf16",)},
        {"codecs": ("bf16", "none")},
        {"codecs": ("bf16", "zip")},
        {"step": 3},
        {"step": 1.0},
        {"done_step": None},
        {"done_factor": None},
        {"done_factor": "much"},
        {"done_factor": -0.5},
        {"done_learning_rate": math.nan},
        {"done_learning_rate": math.inf},
        {"done_learning_rate": -1e-3},
    ],
    ids=str,
)
def test_odd_assignment_is_refused(odd: dict[str, object]) -> None:
    facts = assignment().to_facts() | odd
    with pytest.raises(FrameRefused):
        Assignment.from_facts(facts, 3)
    with pytest.raises(FrameRefused):
        Assignment.from_facts({name: facts[name] for name in facts if name not in odd}, 3)


# ---- at the same time ----------------------------------------------------------------------------
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
        self.clock = TestClock()
        self.reservation = Reservation(
            me="me",
            stage=1,
            num_stages=3,
            clock=self.clock.monotonic,
            on_change=lambda: None,
        )
        self.reservation.open({})
        self.lease: tuple[str, float] | None = None  # whose, until when; perhaps over by now
        self.not_before: dict[str, float] = {}
        self.member_of = ""
        self.epoch = 0

    @rule(head=st.sampled_from(HEADS))
    def reserve(self, head: str) -> None:
        yes = ask(self.reservation, "reserve", head).kind == "yes"
        if self.member_of or self.holder:
            assert yes == (head in (self.member_of, self.holder))
            return
        self.in_vain()
        assert yes == (self.clock.now >= self.not_before.get(head, 0.0))
        if yes:
            self.lease = head, self.clock.now + LEASE_S

    @rule(head=st.sampled_from(HEADS), epoch=st.integers(0, 4))
    def assign(self, head: str, epoch: int) -> None:
        yes = assign(self.reservation, assignment(head, epoch)).kind == "yes"
        if self.member_of == head:
            assert yes == (epoch >= self.epoch)
        else:
            assert yes == (not self.member_of and head == self.holder)
        if yes:
            self.member_of, self.epoch, self.lease = head, epoch, None

    @rule(head=st.sampled_from(HEADS))
    def release(self, head: str) -> None:
        assert ask(self.reservation, "release", head).kind == "yes"
        if self.holder == head:
            self.in_vain()
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

    @property
    def holder(self) -> str:
        return self.lease[0] if self.lease and self.clock.now < self.lease[1] else ""

    def in_vain(self) -> None:
        """Who had the peer and did not come waits for twice as long as it held it."""
        if self.lease is not None:
            head, until = self.lease
            ended = min(until, self.clock.now)
            self.not_before[head] = ended + 2 * (ended - (until - LEASE_S))
            self.lease = None

    @invariant()
    def the_reservation_says_what_the_heads_heard(self) -> None:
        current = self.reservation.assignment
        assert (current.head if current else "") == self.member_of
        expected = "member" if self.member_of else "reserved" if self.holder else "free"
        assert self.reservation.state == expected


TestTwoHeads = TwoHeads.TestCase
TestTwoHeads.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
