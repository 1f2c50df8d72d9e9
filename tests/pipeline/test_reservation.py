"""A peer is in one replica at a time, whoever asks for it and however often."""

from __future__ import annotations

import pytest

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.reservation import Reservation
from tests.pipeline.reservations import LEASE_S, Clock, ask, assign, assignment


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def reservation(clock: Clock, changes: list[str]) -> Reservation:
    def on_change() -> None:
        changes.append(reservation.state)  # reads the reservation: it is called without the lock

    reservation = Reservation(
        me="me", stage=1, num_stages=3, lease_s=LEASE_S, clock=clock, on_change=on_change
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
    pong = ask(reservation, "ping", "A")
    assert (pong.kind, pong.facts["state"], pong.facts["reason"]) == ("yes", "shut", "catching up")
    reservation.open({"anchor_round": 8})
    assert ask(reservation, "reserve", "A").facts["anchor_round"] == 8
    reservation.shut("leaving")
    assert assign(reservation, assignment()).kind == "no"
    starting = Reservation(me="me", stage=1, num_stages=3, on_change=lambda: None)
    assert (starting.state, ask(starting, "reserve", "A").kind) == ("shut", "no")


def test_a_ping_changes_nothing(reservation: Reservation, changes: list[str]) -> None:
    assert reservation.answer("anybody", Frame(kind="ping")).facts["state"] == "free"
    assert changes == []


def test_the_second_head_gets_a_refusal_and_the_first_may_ask_again(
    reservation: Reservation,
) -> None:
    assert ask(reservation, "reserve", "A").kind == "yes"
    refused = ask(reservation, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is reserved for another replica")
    assert assign(reservation, assignment("B")).kind == "no"
    assert ask(reservation, "reserve", "A").kind == "yes"
    assert assign(reservation, assignment("A")).kind == "yes"
    refused = ask(reservation, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is in another replica")
    assert assign(reservation, assignment("B", epoch=9)).kind == "no"
    assert reservation.assignment == assignment("A")


def test_a_reservation_expires_and_is_renewed_by_asking_again(
    reservation: Reservation, clock: Clock
) -> None:
    ask(reservation, "reserve", "A")
    clock.now += LEASE_S - 1
    ask(reservation, "reserve", "A")
    clock.now += LEASE_S - 1
    assert ask(reservation, "reserve", "B").kind == "no"
    clock.now += 1
    assert reservation.state == "free"
    late = assign(reservation, assignment("A"))
    assert (late.kind, late.facts["reason"]) == ("no", "it is not reserved for this replica")
    assert ask(reservation, "reserve", "B").kind == "yes"
    assert assign(reservation, assignment("A")).kind == "no"
    assert assign(reservation, assignment("B")).kind == "yes"


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


def test_a_head_that_was_restarted_hears_which_epoch_to_exceed(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment(epoch=5))
    again = ask(reservation, "reserve", "A")
    assert (again.kind, again.facts["epoch"], again.facts["state"]) == ("yes", 5, "member")
    assert "epoch" not in ask(reservation, "ping", "B").facts
    assert assign(reservation, assignment(epoch=6)).kind == "yes"


def test_a_peer_that_moved_is_not_taken_for_its_old_stage(reservation: Reservation) -> None:
    refused = ask(reservation, "reserve", "A", stage=2)
    assert (refused.kind, refused.facts["reason"]) == ("no", "it hosts stage 1")
    assert ask(reservation, "reserve", "A", stage=1).kind == "yes"


def test_release_ends_a_reservation_or_a_membership(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assert ask(reservation, "release", "B").kind == "yes"
    assert reservation.state == "reserved"
    assert ask(reservation, "release", "A").kind == "yes"
    assert (reservation.state, reservation.released) == ("free", False)
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


def test_an_assignment_that_was_never_taken_is_let_go_silently(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment())
    ask(reservation, "release", "A")
    assert (reservation.take_assignment(), reservation.released) == (None, False)


def test_a_peer_that_leaves_is_free_again(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    assign(reservation, assignment())
    reservation.take_assignment()
    reservation.leave("B")
    assert reservation.state == "member"
    reservation.leave("A")
    assert (reservation.state, reservation.assignment, reservation.take_assignment()) == (
        "free",
        None,
        None,
    )
    assert assign(reservation, assignment(epoch=2)).kind == "no"


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


def test_odd_assignment_is_refused_and_counted(reservation: Reservation) -> None:
    ask(reservation, "reserve", "A")
    odd = Frame(kind="assign", replica="A", facts=assignment().to_facts() | {"step": -1})
    answer = reservation.answer("A", odd)
    assert (answer.kind, "step" in str(answer.facts["reason"])) == ("no", True)
    assert (reservation.refused, reservation.state) == ({"header": 1}, "reserved")


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
