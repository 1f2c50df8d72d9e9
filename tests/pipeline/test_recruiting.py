"""A head asks the right peers in the right order, and knows who answers no more."""

from __future__ import annotations

import pytest

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.recruiting import AVOID_S
from tests.pipeline.chains import batches
from tests.pipeline.histories import check_weights
from tests.pipeline.peers import TINY, Plan
from tests.pipeline.replicas import Leader, Swarm

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 2, 2)


def asked_by(leader: Leader, swarm: Swarm) -> list[str]:
    """What its attempt to form a replica asks, as in "ping 1a"."""
    asked: list[str] = []
    swarm.wires.on_request = lambda _, peer, frame: asked.append(f"{frame.kind} {peer}")
    leader.form()
    swarm.wires.on_request = lambda *_: None
    return asked


def near_and_far(swarm: Swarm, near: str, far: str) -> None:
    swarm.peers[near].box.distance_s, swarm.peers[far].box.distance_s = 0.001, 0.3


class TestOrder:
    def test_all_are_pinged_once_and_the_nearest_asked_first(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        near_and_far(swarm, "1b", "1a")
        near_and_far(swarm, "2a", "2b")
        asked = asked_by(swarm.leader, swarm)
        assert swarm.leader.members == ("head", "1b", "2a")
        assert sorted(asked[:4]) == ["ping 1a", "ping 1b", "ping 2a", "ping 2b"]
        assert asked[4:] == ["reserve 1b", "reserve 2a", "assign 1b", "assign 2a"]
        assert swarm.peers["1a"].reservation.state == "free"
        swarm.leader.head.dissolve()
        swarm.settle()
        again = asked_by(swarm.leader, swarm)
        assert again == asked[4:], "distances are remembered"

    def test_the_next_is_asked_when_one_refuses(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        near_and_far(swarm, "1b", "1a")
        swarm.peers["1b"].reservation.shut("it leaves")
        asked = asked_by(swarm.leader, swarm)
        assert swarm.leader.members[1] == "1a"
        assert asked.index("reserve 1b") < asked.index("reserve 1a")

    def test_who_refused_comes_after_the_others_the_next_time_however_near(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        near_and_far(swarm, "1b", "1a")
        answer = swarm.peers["1b"].box.answer

        def refuses(peer: str, frame: Frame) -> Frame:
            if frame.kind == "reserve":
                return Frame(kind="no", replica=frame.replica, facts={"reason": "no"})
            return answer(peer, frame)

        swarm.peers["1b"].box.answer = refuses
        assert "reserve 1b" in asked_by(swarm.leader, swarm)
        swarm.peers["1b"].box.answer = answer
        swarm.leader.head.dissolve()
        swarm.settle()
        assert "reserve 1b" not in asked_by(swarm.leader, swarm)
        assert swarm.leader.members[1] == "1a"

    def test_what_was_reserved_is_free_again_where_a_stage_has_nobody(self) -> None:
        swarm = Swarm(PLAN)
        swarm.peers["2a"].reservation.shut("it leaves")
        assert swarm.leader.form() == "stage 2 has no free peer"
        assert swarm.peers["1a"].reservation.state == "free"


class TestPeersThatOnlyDialOut:
    def test_a_head_of_their_kind_needs_a_neighbour_that_others_reach(self) -> None:
        swarm = Swarm(PLAN)
        leader = swarm.lead("dials", client=True)
        for name in ("1a", "2a"):
            swarm.wires.kill(name, flushed=False)
            swarm.add(f"{name} dials", int(name[0]), client=True)
        leader.form()  # finds out who is dead
        assert leader.form() == (
            "stage 1 has no free peer (1 failed lately, 1 can only dial out, like its neighbour)"
        )
        swarm.add("open", 1)
        assert leader.form() == ""
        assert leader.members == ("dials", "open", "2a dials")

    def test_one_that_was_reserved_gives_way_when_its_neighbour_refuses(self) -> None:
        swarm = Swarm(PLAN)
        for name in ("1 dials", "2 dials"):
            swarm.add(name, int(name[0]), client=True)
        near_and_far(swarm, "1 dials", "1a")
        near_and_far(swarm, "2a", "2 dials")
        swarm.peers["2a"].reservation.shut("it leaves")
        asked = asked_by(swarm.leader, swarm)
        assert swarm.leader.members == ("head", "1a", "2 dials")
        assert swarm.peers["1 dials"].reservation.state == "free"
        assert asked.index("reserve 1 dials") < asked.index("release 1 dials")


class TestAnswers:
    def test_who_gives_none_is_left_alone_for_a_while(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        near_and_far(swarm, "1b", "1a")
        swarm.wires.kill("1b", flushed=False)
        asked = asked_by(swarm.leader, swarm)
        assert swarm.leader.members[1] == "1a"
        assert "reserve 1b" not in asked
        swarm.leader.head.dissolve()
        assert not any("1b" in each for each in asked_by(swarm.leader, swarm))
        swarm.leader.head.dissolve()
        swarm.run_for(AVOID_S)
        assert "ping 1b" in asked_by(swarm.leader, swarm)

    def test_of_many_that_vanished_together_all_are_found_out_at_once(self) -> None:
        """They were asked one after another, two seconds each, and those who waited gave up."""
        swarm = Swarm(PLAN, spares=7)
        swarm.peers["1a"].box.distance_s = 0.5  # the last that is asked
        swarm.leader.form()
        swarm.leader.head.dissolve()
        swarm.settle()
        for name in swarm.peers:
            if name.startswith("1") and name != "1a":
                swarm.wires.freeze(name)
        start = swarm.wires.now
        while swarm.leader.form():
            swarm.run_for(0.1)
        assert swarm.leader.members[1] == "1a"
        assert swarm.wires.now - start < 8.0

    def test_who_reserves_and_never_comes_is_not_taken_again_at_once(self) -> None:
        """The nearest of all kept a head from every replica."""
        swarm = Swarm(PLAN, spares=1)
        near_and_far(swarm, "1b", "1a")
        answer = swarm.peers["1b"].box.answer

        def changes_its_mind(peer: str, frame: Frame) -> Frame:
            if frame.kind == "assign":
                return Frame(kind="no", replica=frame.replica, facts={"reason": "no"})
            return answer(peer, frame)

        swarm.peers["1b"].box.answer = changes_its_mind
        asked = asked_by(swarm.leader, swarm)
        assert asked.count("assign 1b") == 1
        assert swarm.leader.members[1] == "1a"

    def test_an_earlier_life_of_this_head_has_used_up_epochs(self) -> None:
        swarm = Swarm(PLAN)
        for epoch in (1, 2):
            leader = Leader(swarm, swarm.leader.peer)
            assert leader.form() == ""
            assert leader.head.epoch == epoch

    @pytest.mark.parametrize("stage", [1, 2])
    def test_who_has_left_is_missing_but_may_be_asked_again_at_once(self, stage: int) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        swarm.peers[f"{stage}a"].follower.leave()
        assert swarm.leader.step(BATCHES[1]) is not None
        assert swarm.leader.members == ("head", "1a", "2a")
        assert swarm.leader.head.epoch == 2
        check_weights(swarm)

    @pytest.mark.parametrize("window", [0, "many", None])
    def test_a_window_that_is_none_bounds_nothing(self, window: object) -> None:
        swarm = Swarm(PLAN)
        swarm.peers["1a"].reservation.open({"window": window})
        assert swarm.leader.form() == ""
        assert swarm.leader.step(BATCHES[0]) is not None
