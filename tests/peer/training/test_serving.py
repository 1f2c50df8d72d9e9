"""The role of a peer below the head: it serves, waits to be recruited, or moves elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.training import roles
from dilocox.peer.training.loop import Move
from dilocox.peer.training.roles import Serving
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.head import LAST_STEP_S
from dilocox.pipeline.member import Follower, Member
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.reservation import Assignment, Reservation
from tests.clocks import TestClock
from tests.peer.loops import ME, Loop, manifest
from tests.pipeline.swarms import stage_record

HEAD = "h"
STEPPED = Stepped(step=4, loss=2.5, skipped=False)


class FakeFollower:
    """What comes in each turn is prepared in `turns`; nothing comes after that."""

    def __init__(self) -> None:
        self.head = ""
        self.between_steps = True
        self.turns: deque[Callable[[], Stepped | None]] = deque()
        self.taken = self.left = 0

    def turn(self, wait_s: float) -> Stepped | None:
        self.taken += 1
        if self.turns:
            return self.turns.popleft()()
        time.sleep(0.001)
        return None

    def leave(self) -> None:
        self.left += 1
        self.head = ""


@dataclass
class Server:
    """A member's role and all that it talks to."""

    loop: Loop
    follower: FakeFollower
    member: Any
    reservation: Reservation
    role: Serving


@pytest.fixture
def served(tmp_path: Path) -> Server:
    loop = Loop(tmp_path, manifest(stages=2), stage=1)
    follower = FakeFollower()
    member = SimpleNamespace(leaving=False, num_stages=2, window_limit=lambda: 7)
    reservation = Reservation(me=ME, stage=1, num_stages=2, on_change=lambda: None)
    role = Serving(
        learner=loop.learner,
        follower=cast("Follower", follower),
        member=cast("Member", member),
        reservation=reservation,
        coordinator=loop.coordinator,
    )
    return Server(loop, follower, member, reservation, role)


def reserve(served: Server) -> Frame:
    return served.reservation.answer(HEAD, Frame(kind="reserve", replica=HEAD))


def recruit(served: Server) -> None:
    """A head takes this peer, as far as its reservation is concerned."""
    assert reserve(served).kind == "yes"
    assignment = Assignment(
        replica=HEAD,
        epoch=1,
        head=HEAD,
        members=(HEAD, ME),
        clients=(False, False),
        codecs=("bf16",),
        step=0,
        done=None,
    )
    answer = served.reservation.answer(
        HEAD, Frame(kind="assign", replica=HEAD, facts=assignment.to_facts())
    )
    assert answer.kind == "yes"


def test_who_is_in_no_replica_for_a_while_hears_once_what_for(
    served: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = TestClock(time.monotonic())
    monkeypatch.setattr(roles, "time", clock)
    view = SwarmView(me=ME, stages={0: {HEAD: stage_record()}, 1: {ME: stage_record()}})
    served.loop.fake.view = view

    def told_after(seconds: float) -> int:
        clock.now += seconds
        with caplog.at_level("INFO", logger="dilocox.peer.training.roles"):
            served.role.turn()
        return caplog.text.count("as a spare it follows the rounds")

    assert [told_after(s) for s in (0.0, roles.SPARE_S - 5, 10.0, 500.0)] == [0, 0, 1, 1]
    served.follower.head = HEAD
    assert told_after(500.0) == 1
    served.follower.head = ""
    assert [told_after(s) for s in (1.0, 50.0)] == [1, 2]


# ---- work ----------------------------------------------------------------------------------------
def test_heads_hear_of_its_anchor_and_its_room_for_microbatches(served: Server) -> None:
    assert reserve(served).kind == "no"  # nobody is recruited before its first turn
    served.role.turn()
    facts = reserve(served).facts
    assert (facts["round"], facts["window"]) == (-1, 7)
    served.loop.fake.events.put(served.loop.committed(0, 0.0))
    served.loop.learner.take_events()
    served.role.turn()
    assert reserve(served).facts["round"] == 0


def test_the_head_that_it_serves_is_shown_and_announced(served: Server) -> None:
    served.role.turn()
    assert not served.loop.fake.told
    served.follower.head = HEAD
    served.role.turn()
    assert served.loop.fake.status.head == "", "anybody can say that it leads this peer"
    served.follower.turns.append(lambda: STEPPED)
    served.role.turn()
    assert served.loop.fake.status.head == HEAD
    assert served.loop.fake.status.members == ()  # it leads none
    served.follower.head = ""
    served.role.turn()
    assert served.loop.fake.status.head == ""
    assert served.loop.fake.told == [("announce",), ("announce",)]


def test_inner_steps_count_with_the_time_since_the_last_one(
    served: Server, clock: TestClock
) -> None:
    served.follower.head = HEAD
    served.role.turn()  # the replica begins now
    clock.now += 2.0
    served.follower.turns.append(lambda: STEPPED)
    served.role.turn()
    meter = served.loop.meter
    assert (meter.inner_step, meter.longest_step_s, meter.train_loss) == (1, 2.0, 2.5)
    clock.now += 3.0
    served.follower.turns.append(lambda: STEPPED)
    served.role.turn()
    assert (meter.inner_step, meter.longest_step_s) == (2, 3.0)
    assert served.loop.model.merge.tokens == 2 * 16


def test_time_in_no_replica_makes_no_inner_step_long(served: Server, clock: TestClock) -> None:
    for _ in range(2):
        clock.now += 600.0  # a spare for ten minutes
        served.role.turn()
    served.follower.head = HEAD
    served.role.turn()
    clock.now += 1.0
    served.follower.turns.append(lambda: STEPPED)
    served.role.turn()
    assert served.loop.meter.longest_step_s == 1.0


def test_the_weights_may_change_when_the_follower_says_so(served: Server) -> None:
    assert served.role.between_steps
    served.follower.between_steps = False
    assert not served.role.between_steps


def test_a_member_ends_with_its_head_and_a_spare_with_the_records(served: Server) -> None:
    assert not served.role.ended
    served.loop.fake.ending = served.loop.fake.stopped = True
    assert served.role.ended
    served.follower.head = HEAD  # which may want the last anchor evaluated
    assert not served.role.ended


def test_a_spare_says_which_stages_keep_the_run_from_training(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dilocox")
    served.loop.fake.view = SwarmView(me=ME, stages={0: {}, 1: {ME: stage_record()}})
    for _ in range(3):
        served.role.turn()
    assert "stage 0" in served.loop.fake.status.blocked
    assert caplog.text.count("blocked: ") == 1
    served.follower.head = HEAD
    served.role.turn()
    assert served.loop.fake.status.blocked == ""
    last = caplog.records[-1]
    assert (last.levelname, last.message) == ("INFO", "the run is no longer blocked")


def test_it_says_nothing_of_stages_before_its_own_record_is_in_view(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for own in ({}, {ME: stage_record(state="joining")}, {ME: stage_record(state="left")}):
        served.loop.fake.view = SwarmView(me=ME, stages={0: {}, 1: own})
        served.role.turn()
        assert served.loop.fake.status.blocked == ""
    served.loop.fake.view = SwarmView(me=ME, stages={0: {}, 1: {ME: stage_record()}})
    served.role.turn()
    served.loop.fake.view = SwarmView(me=ME)  # the DHT does not answer
    served.role.turn()
    assert served.loop.fake.status.blocked == "stage 0 has no peer"
    assert [record.message for record in caplog.records] == [
        "the run is blocked: stage 0 has no peer"
    ]


# ---- moving --------------------------------------------------------------------------------------
def test_a_free_spare_moves_when_it_is_its_turn_and_nobody_recruits_it_any_more(
    served: Server,
) -> None:
    served.role.turn()
    served.loop.fake.move_to = 0
    with pytest.raises(Move) as moved:
        served.role.turn()
    assert moved.value.stage == 0
    assert reserve(served).kind == "no"


def test_it_does_not_move_with_progress_that_no_record_holds(served: Server) -> None:
    served.loop.train()
    served.loop.fake.move_to = 0
    served.role.turn()
    served.loop.fake.due = (0, 1.0)
    served.loop.learner.between_steps()
    served.role.turn()  # now it is in flight
    (send,) = served.loop.model.merge.in_flight.values()
    served.loop.fake.events.put(served.loop.committed(0, send.message, mine=True))
    served.loop.learner.take_events()
    with pytest.raises(Move):
        served.role.turn()


def test_it_moves_with_it_to_a_stage_that_has_nobody_but_not_while_a_send_is_under_way(
    served: Server,
) -> None:
    """Without peers in a stage there is no replica, and without one nothing is sent."""
    served.loop.train()
    served.loop.fake.due = (0, 1.0)
    served.loop.learner.between_steps()
    served.loop.train()
    served.loop.fake.move_to, served.loop.fake.moves_with_progress = 0, True
    served.role.turn()
    (send,) = served.loop.model.merge.in_flight.values()
    served.loop.fake.events.put(served.loop.committed(0, send.message, mine=True))
    served.loop.learner.take_events()
    assert served.loop.learner.unsent
    with pytest.raises(Move):
        served.role.turn()


def test_it_does_not_move_once_a_head_has_reserved_or_taken_it(served: Server) -> None:
    served.role.turn()
    served.loop.fake.move_to = 0
    assert reserve(served).kind == "yes"
    served.role.turn()
    recruit(served)
    served.role.turn()
    assert served.reservation.state == "member"
    served.reservation.answer(HEAD, Frame(kind="release", replica=HEAD))
    with pytest.raises(Move):
        served.role.turn()


# ---- leaving -------------------------------------------------------------------------------------
def test_a_leaver_works_on_until_its_head_has_replaced_it(served: Server) -> None:
    served.role.turn()
    recruit(served)
    served.follower.head = HEAD
    served.role.turn()

    def replaced() -> None:
        served.follower.head = ""

    seen: list[bool] = []

    def last_step() -> Stepped:
        seen.append(served.member.leaving)
        return STEPPED

    served.follower.turns.extend([lambda: None, last_step, replaced])
    served.role.release(ended=False)
    assert seen == [True]  # the head hears of it at the end of the inner step
    assert served.loop.meter.inner_step == 1
    assert (served.follower.taken, served.follower.left) == (5, 1)
    assert served.loop.fake.status.head == ""
    assert served.reservation.answer("g", Frame(kind="reserve", replica="g")).kind == "no"


@pytest.mark.parametrize(
    ("took_s", "limit_s", "waited_s"),
    [
        (10.0, 120.0, 12.0),  # of 200 s
        (190.0, 120.0, 10.0),
        (190.0, 1800.0, 192.0),  # what can wait
    ],
)
def test_a_leaver_waits_for_the_end_of_its_step_where_that_is_near(
    served: Server, clock: TestClock, took_s: float, limit_s: float, waited_s: float
) -> None:
    leaves = Serving(
        learner=served.loop.learner,
        follower=cast("Follower", served.follower),
        member=served.member,
        reservation=served.reservation,
        coordinator=served.loop.coordinator,
        leave_limit_s=lambda: limit_s,
    )
    served.follower.head = HEAD
    leaves.turn()
    ends = clock.now + 200.0

    def turn(wait_s: float) -> Stepped | None:
        nonlocal ends
        clock.now += 2.0
        if clock.now < ends:
            return None
        served.follower.head, ends = HEAD if served.member.leaving is False else "", ends + 200.0
        return STEPPED

    served.follower.turn = turn  # type: ignore[method-assign]
    while served.loop.meter.inner_step == 0 or clock.now < ends - took_s:
        leaves.turn()
    began = clock.now
    leaves.release(ended=False)
    waited = clock.now - began
    assert waited == pytest.approx(waited_s, abs=4.0)
    assert served.loop.meter.inner_step == (2 if waited > took_s - 4 else 1)
    assert (served.follower.head, served.follower.left) == ("", 1)
    assert served.loop.fake.status.head == ""


def test_a_leaver_whose_head_goes_on_after_its_step_does_not_stay_for_another_one(
    served: Server, clock: TestClock
) -> None:
    """The head had its sum of that step before it was to leave, so that nobody replaces it."""
    served.follower.head = HEAD
    served.role.turn()
    ends = clock.now + 50.0

    def turn(wait_s: float) -> Stepped | None:
        nonlocal ends
        clock.now += 1.0
        if clock.now < ends:
            return None
        ends += 50.0
        return STEPPED

    served.follower.turn = turn  # type: ignore[method-assign]
    while served.loop.meter.inner_step == 0 or clock.now < ends - 10.0:
        served.role.turn()
    end = ends
    served.role.release(ended=False)
    assert served.loop.meter.inner_step == 2
    assert clock.now - end == pytest.approx(LAST_STEP_S, abs=1.0)
    assert served.follower.left == 1


def test_a_spare_leaves_at_once(served: Server) -> None:
    served.role.turn()
    taken = served.follower.taken
    served.role.release(ended=False)
    assert served.follower.taken == taken
    assert reserve(served).kind == "no"
