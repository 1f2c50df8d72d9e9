"""Members below the head: what they do when their head is gone, or without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilocox.pipeline.activation_codec import tensor_frame
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.link import Arrived
from dilocox.pipeline.member import (
    ASK_S,
    PATIENCE,
    PING_LIMIT_S,
    RESCUE_LIMIT_S,
    STALL_LIMIT_S,
)
from tests.pipeline.chains import batches
from tests.pipeline.histories import How, after_frames, check_history, equal, retraced, strike
from tests.pipeline.peers import TINY, Peer, Plan
from tests.pipeline.replicas import Swarm
from tests.pipeline.wires import SILENCE_S, Vanished
from tests.sweeps import sweep

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 3, 2)
KILLS: list[tuple[How, int]] = [("kill", moment) for moment in range(13)]
CASES: list[tuple[How, int]] = [*KILLS, *(("freeze", moment) for moment in range(0, 13, 4))]


def followers(swarm: Swarm) -> list[Peer]:
    return [peer for peer in swarm.alive if peer.stage > 0]


def left_because(peer: Peer) -> list[str]:
    return [facts["reason"] for facts in peer.telling("dissolved")]


def check_that_another_head_goes_on(swarm: Swarm) -> None:
    assert {peer.reservation.state for peer in followers(swarm)} == {"free"}
    assert all(peer.clean and not peer.follower.head for peer in followers(swarm))
    other = swarm.lead("other")
    assert other.form() == ""
    for batch in BATCHES[1:]:
        assert other.step(batch) is not None
    swarm.settle()
    assert other.members == ("other", "1a", "2a")
    check_history(swarm)
    for name, expected in retraced(swarm).items():
        assert equal(swarm.peers[name].weights(), expected)


class TestTheHeadIsGone:
    @pytest.mark.parametrize(
        ("how", "moment"),
        sweep(CASES, CASES[::4]),
    )
    def test_in_mid_step_its_members_free_themselves(self, moment: int, how: How) -> None:
        swarm = Swarm(PLAN, seed=moment)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        with (
            pytest.raises(Vanished),
            after_frames(swarm, moment, lambda: strike(swarm, "head", how)),
        ):
            for batch in BATCHES:
                swarm.leader.step(batch)
        asks_s = PING_LIMIT_S + ASK_S
        swarm.run_for(asks_s if how == "kill" else SILENCE_S + PATIENCE * asks_s)
        assert left_because(swarm.peers["1a"]) == ["its head is gone"]
        check_that_another_head_goes_on(swarm)

    def test_a_head_that_thaws_finds_nobody(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.wires.freeze("head")
        swarm.run_for(SILENCE_S + PATIENCE * (PING_LIMIT_S + ASK_S))
        check_that_another_head_goes_on(swarm)
        swarm.wires.thaw("head")
        assert swarm.leader.step(BATCHES[1]) is None
        assert swarm.leader.members == ()
        assert "train" in swarm.leader.form()

    def test_one_question_that_finds_no_way_is_not_the_end(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        swarm.leader.form()
        _, middle, last = swarm.leader.members
        swarm.settle()
        swarm.wires.kill(middle, flushed=False)
        swarm.wires.unreachable.add("head")
        for _ in range(3):  # the network is shaky for one question
            swarm.act()
        swarm.run_for(1.5)
        swarm.wires.unreachable.clear()
        swarm.run_for(5.0)
        assert not left_because(swarm.peers[last])
        assert swarm.leader.step(BATCHES[0]) is not None
        assert swarm.leader.members[2] == last

    def test_a_head_that_was_silent_is_asked_more_than_once(self) -> None:
        """Its line is full, or broken for a moment; its process has not ended."""
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.settle()
        swarm.wires.freeze("head")
        swarm.run_for(SILENCE_S + PING_LIMIT_S + 0.5)
        first = swarm.peers["1a"]
        assert [facts["stage"] for facts in first.telling("lost")] == [0]
        assert not left_because(first)
        swarm.wires.thaw("head")
        swarm.run_for(PING_LIMIT_S)
        assert not left_because(first)
        assert swarm.leader.step(BATCHES[0]) is not None
        assert swarm.leader.members == ("head", "1a", "2a")

    def test_a_member_that_cannot_ask_for_long_leaves(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.wires.kill("1a", flushed=False)
        swarm.wires.unreachable.add("head")
        swarm.run_for(10.0)
        assert left_because(swarm.peers["2a"]) == ["its head is gone"]
        assert swarm.peers["2a"].reservation.state == "free"


class TestTheHeadGoesOn:
    def test_a_member_waits_while_its_replica_heals_but_not_for_ever(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.wires.kill("1a", flushed=False)
        swarm.run_for(RESCUE_LIMIT_S - 5.0)
        last = swarm.peers["2a"]
        assert [facts["stage"] for facts in last.telling("lost")] == [1]
        assert last.follower.head == "head"
        swarm.run_for(10.0)
        assert left_because(last) == ["it was not healed in time"]
        assert last.reservation.state == "free"

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_member_that_thaws_after_it_was_replaced_is_free_soon(self, stage: int) -> None:
        swarm = Swarm(PLAN, spares=1)
        swarm.leader.form()
        frozen = swarm.peers[swarm.leader.members[stage]]
        swarm.wires.freeze(frozen.me)
        assert swarm.leader.step(BATCHES[0]) is not None
        swarm.wires.thaw(frozen.me)
        swarm.run_for(2.0)
        assert left_because(frozen) == ["its head leads a replica without it, or none"]
        assert frozen.reservation.state == "free"
        assert swarm.leader.step(BATCHES[1]) is not None
        assert frozen.steps == []

    def test_a_member_spliced_in_stays_when_the_next_fault_comes_in_the_same_step(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        first, second = leader.members[1:]
        swarm.wires.kill(first, flushed=False)

        def once_healed() -> None:
            if leader.peer.telling("healed") and swarm.peers[second].box.alive:
                swarm.wires.kill(second, flushed=False)

        swarm.wires.on_frame = lambda _: once_healed()
        assert leader.step(BATCHES[0]) is not None
        swarm.settle()
        assert len(leader.peer.telling("healed")) == 2
        [spliced] = [name for name in ("1a", "1b") if name != first]
        assert leader.members[1] == spliced
        assert not left_because(swarm.peers[spliced])
        assert swarm.peers[spliced].steps == [("head", 0)]

    @pytest.mark.parametrize("heard", [False, True])
    def test_all_hear_that_it_dissolves_the_replica(self, heard: bool) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        swarm.wires.unreachable |= set() if heard else {"1a", "2a"}  # for its release
        swarm.leader.head.dissolve()
        swarm.settle()
        reasons = {reason for peer in followers(swarm) for reason in left_because(peer)}
        assert reasons <= {"its head dissolved it", "its head let it go"}
        assert heard or reasons == {"its head dissolved it"}
        for peer in followers(swarm):
            assert len(left_because(peer)) == 1
            assert peer.reservation.state == "free"
            assert peer.clean

    def test_a_head_that_stalls_for_minutes_is_left(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.run_for(STALL_LIMIT_S - 10.0)  # it may be merging, or training its own part
        assert not any(left_because(peer) for peer in followers(swarm))
        swarm.run_for(20.0)
        assert left_because(swarm.peers["1a"]) == ["nothing came from its head"]
        assert {peer.reservation.state for peer in followers(swarm)} == {"free"}

    def test_a_head_that_waits_for_an_average_is_not(self) -> None:
        """Without overlap (`outer.merge: none`) for as long as one may take."""
        swarm = Swarm(replace(PLAN, longest_wait_s=1000.0))
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.run_for(STALL_LIMIT_S + 990.0)
        assert not any(left_because(peer) for peer in followers(swarm))
        swarm.run_for(20.0)
        assert left_because(swarm.peers["1a"]) == ["nothing came from its head"]

    def test_a_head_that_has_it_evaluate_without_end_keeps_it_from_nothing(self) -> None:
        """It never came back to its loop: neither to a signal nor to another head."""
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.settle()
        below = swarm.peers["1a"]
        [end] = [each for each in below.box.ends.values() if each.key.side == "upper"]
        frame = Frame(kind="evaluate", replica="head", epoch=1, shape=PLAN.shape)
        made = tensor_frame(frame, "fp32", torch.zeros(PLAN.shape), BATCHES[0][0])
        below.box.inbox.messages.extend([Arrived(end.key, made)] * (PLAN.num_stages + 2))
        below.follower.turn(0.0)
        assert len(below.box.inbox.messages) == 2

    def test_a_release_does_not_hide_what_came_before_it(self) -> None:
        """Such as the GO of the last inner step."""
        swarm = Swarm(Plan(num_stages=2))
        swarm.leader.form()
        below = swarm.peers["1a"]

        def look_away(frame: Frame) -> None:
            below.busy = below.busy or frame.kind == "sum"

        swarm.wires.on_frame = look_away
        swarm.leader.step(batches(TINY, 1)[0])
        swarm.leader.head.dissolve()
        swarm.settle()
        assert below.reservation.released
        below.busy = False
        swarm.settle()
        assert below.steps == [("head", 0)]
        assert below.reservation.state == "free"


class TestItLeavesByItself:
    def test_at_once_and_for_good(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        leaver = swarm.peers[swarm.leader.members[2]]
        leaver.reservation.shut("it leaves")
        leaver.follower.leave()
        leaver.follower.leave()  # twice does no harm
        assert left_because(leaver) == ["this peer leaves"]
        assert leaver.clean
        stepped = swarm.leader.step(BATCHES[1])
        assert stepped is not None
        assert stepped.step == 1
        assert leaver.me not in swarm.leader.members
        assert leaver.reservation.state == "shut"

    def test_weights_may_change_only_between_inner_steps(self) -> None:
        seen: set[bool] = set()
        swarm = Swarm(PLAN)
        follower = swarm.peers["1a"].follower
        assert follower.between_steps
        swarm.leader.form()
        assert follower.between_steps
        swarm.wires.on_frame = lambda _: seen.add(follower.between_steps)
        swarm.leader.step(BATCHES[0])
        assert seen == {True, False}
        swarm.settle()
        assert follower.between_steps
