"""A peer is in one replica at a time, whoever asks for it and however often."""

from __future__ import annotations

import pytest

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.reservation import Desk
from tests.pipeline.desks import LEASE_S, Clock, ask, assign, assignment


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def desk(clock: Clock, changes: list[str]) -> Desk:
    def on_change() -> None:
        changes.append(desk.state)  # reads the desk: it is called without the lock

    desk = Desk(me="me", stage=1, num_stages=3, lease_s=LEASE_S, clock=clock, on_change=on_change)
    desk.open({"anchor_round": 7})
    return desk


def test_a_head_reserves_then_assigns_and_the_peer_takes_it_once(
    desk: Desk, changes: list[str]
) -> None:
    answer = ask(desk, "reserve", "A")
    assert (answer.kind, answer.facts["anchor_round"], answer.facts["stage"]) == ("yes", 7, 1)
    assert desk.state == "reserved"
    assert assign(desk, assignment()).kind == "yes"
    assert desk.state == "member"
    assert changes == ["reserved", "member"]
    assert desk.take_assignment() == assignment()
    assert desk.take_assignment() is None
    assert desk.assignment == assignment()


def test_a_peer_that_is_shut_is_not_recruited_but_answers_a_ping(desk: Desk) -> None:
    desk.shut("catching up")
    refused = ask(desk, "reserve", "A")
    assert (refused.kind, refused.facts["reason"]) == ("no", "catching up")
    pong = ask(desk, "ping", "A")
    assert (pong.kind, pong.facts["state"], pong.facts["reason"]) == ("yes", "shut", "catching up")
    desk.open({"anchor_round": 8})
    assert ask(desk, "reserve", "A").facts["anchor_round"] == 8
    desk.shut("leaving")
    assert assign(desk, assignment()).kind == "no"
    starting = Desk(me="me", stage=1, num_stages=3, on_change=lambda: None)
    assert (starting.state, ask(starting, "reserve", "A").kind) == ("shut", "no")


def test_a_ping_changes_nothing(desk: Desk, changes: list[str]) -> None:
    assert desk.answer("anybody", Frame(kind="ping")).facts["state"] == "free"
    assert changes == []


def test_the_second_head_gets_a_refusal_and_the_first_may_ask_again(desk: Desk) -> None:
    assert ask(desk, "reserve", "A").kind == "yes"
    refused = ask(desk, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is reserved for another replica")
    assert assign(desk, assignment("B")).kind == "no"
    assert ask(desk, "reserve", "A").kind == "yes"
    assert assign(desk, assignment("A")).kind == "yes"
    refused = ask(desk, "reserve", "B")
    assert (refused.kind, refused.facts["reason"]) == ("no", "it is in another replica")
    assert assign(desk, assignment("B", epoch=9)).kind == "no"
    assert desk.assignment == assignment("A")


def test_a_reservation_expires_and_is_renewed_by_asking_again(desk: Desk, clock: Clock) -> None:
    ask(desk, "reserve", "A")
    clock.now += LEASE_S - 1
    ask(desk, "reserve", "A")
    clock.now += LEASE_S - 1
    assert ask(desk, "reserve", "B").kind == "no"
    clock.now += 1
    assert desk.state == "free"
    late = assign(desk, assignment("A"))
    assert (late.kind, late.facts["reason"]) == ("no", "it is not reserved for this replica")
    assert ask(desk, "reserve", "B").kind == "yes"
    assert assign(desk, assignment("A")).kind == "no"
    assert assign(desk, assignment("B")).kind == "yes"


def test_only_a_later_epoch_replaces_an_assignment(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment(epoch=3))
    desk.take_assignment()
    old = assign(desk, assignment(epoch=2))
    assert (old.kind, old.facts["reason"], old.facts["epoch"]) == ("no", "epoch 3 is on", 3)
    assert assign(desk, assignment(epoch=3, step=9)).kind == "no"
    assert assign(desk, assignment(epoch=3)).kind == "yes"  # the same again: its answer was lost
    assert desk.take_assignment() is None
    desk.shut("nobody else")  # a member stays one until it leaves
    for epoch in (5, 6):
        assert assign(desk, assignment(epoch=epoch)).kind == "yes"
    assert desk.take_assignment() == assignment(epoch=6)


def test_a_head_that_was_restarted_hears_which_epoch_to_exceed(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment(epoch=5))
    again = ask(desk, "reserve", "A")
    assert (again.kind, again.facts["epoch"], again.facts["state"]) == ("yes", 5, "member")
    assert "epoch" not in ask(desk, "ping", "B").facts
    assert assign(desk, assignment(epoch=6)).kind == "yes"


def test_a_peer_that_moved_is_not_taken_for_its_old_stage(desk: Desk) -> None:
    refused = ask(desk, "reserve", "A", stage=2)
    assert (refused.kind, refused.facts["reason"]) == ("no", "it hosts stage 1")
    assert ask(desk, "reserve", "A", stage=1).kind == "yes"


def test_release_ends_a_reservation_or_a_membership(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assert ask(desk, "release", "B").kind == "yes"
    assert desk.state == "reserved"
    assert ask(desk, "release", "A").kind == "yes"
    assert (desk.state, desk.released) == ("free", False)
    ask(desk, "reserve", "A")
    assign(desk, assignment())
    desk.take_assignment()
    ask(desk, "release", "B")
    assert (desk.state, desk.released) == ("member", False)
    ask(desk, "release", "A")
    assert (desk.state, desk.released, desk.assignment) == ("free", True, None)
    assert desk.take_assignment() is None
    assert desk.released  # until it is acted on
    desk.leave("A")
    assert not desk.released


def test_a_release_is_not_missed_when_the_next_head_is_quick(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment("A"))
    desk.take_assignment()
    ask(desk, "release", "A")
    ask(desk, "reserve", "B")
    assign(desk, assignment("B"))
    assert desk.released
    desk.leave("A")
    assert not desk.released
    assert desk.take_assignment() == assignment("B")


def test_an_assignment_that_was_never_taken_is_let_go_silently(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment())
    ask(desk, "release", "A")
    assert (desk.take_assignment(), desk.released) == (None, False)


def test_a_peer_that_leaves_is_free_again(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment())
    desk.take_assignment()
    desk.leave("B")
    assert desk.state == "member"
    desk.leave("A")
    assert (desk.state, desk.assignment, desk.take_assignment()) == ("free", None, None)
    assert assign(desk, assignment(epoch=2)).kind == "no"


@pytest.mark.parametrize("shut", [False, True])
def test_an_epoch_that_comes_while_a_peer_leaves_is_taken_unless_it_leaves_for_good(
    desk: Desk, shut: bool
) -> None:
    ask(desk, "reserve", "A")
    assign(desk, assignment())
    desk.take_assignment()
    assign(desk, assignment(epoch=2))
    if shut:
        desk.shut("leaving")
    desk.leave("A")
    assert desk.take_assignment() == (None if shut else assignment(epoch=2))
    assert desk.state == ("shut" if shut else "member")


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
def test_who_speaks_for_another_is_refused(desk: Desk, peer: str, frame: Frame, kind: str) -> None:
    ask(desk, "reserve", peer)
    before = desk.state
    assert desk.answer(peer, frame).kind == "no"
    assert (desk.refused, desk.state) == ({kind: 1}, before)


def test_odd_assignment_is_refused_and_counted(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    odd = Frame(kind="assign", replica="A", facts=assignment().to_facts() | {"step": -1})
    answer = desk.answer("A", odd)
    assert (answer.kind, "step" in str(answer.facts["reason"])) == ("no", True)
    assert (desk.refused, desk.state) == ({"header": 1}, "reserved")


def test_an_assignment_must_name_this_peer_at_its_stage(desk: Desk) -> None:
    ask(desk, "reserve", "A")
    assert assign(desk, assignment(members=("A", "last", "me"))).kind == "no"
    assert assign(desk, assignment(members=("A", "last", "other"))).kind == "no"
    assert desk.refused == {"header": 2}


def test_a_head_is_recruited_by_nobody() -> None:
    desk = Desk(me="me", stage=0, num_stages=3, on_change=lambda: None)
    desk.open({})
    assert ask(desk, "reserve", "A").kind == "no"
    own = assignment("me", members=("me", "x", "y"))
    assert assign(desk, own, by="me").kind == "no"
    assert desk.state == "free"
