"""A head forms its replica, keeps it going, and lets members go; healing is in test_healing.py."""

from __future__ import annotations

import math

import pytest

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.head import LAST_STEP_S, SKIPPED, STALL_LIMIT_S, STALLS, rest_of_step_s
from dilocox.pipeline.link import Arrived
from dilocox.pipeline.stage_worker import Produced, StageWorker
from tests.pipeline.chains import batches
from tests.pipeline.histories import check_weights
from tests.pipeline.peers import TINY, Peer, Plan
from tests.pipeline.replicas import Swarm
from tests.pipeline.wires import OPENING_S
from tests.sweeps import sweep

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 4, 2)


def that_trains(spares: int = 0) -> Swarm:
    """A swarm whose replica has taken an inner step."""
    swarm = Swarm(PLAN, spares=spares)
    swarm.leader.form()
    assert swarm.leader.step(BATCHES[0]) is not None
    swarm.settle()
    return swarm


class TestForming:
    def test_of_one_stage_nobody_else_is_needed(self) -> None:
        swarm = Swarm(Plan(num_stages=1))
        assert swarm.leader.form() == ""
        assert swarm.leader.members == ("head",)
        swarm.leader.head.dissolve()
        assert swarm.leader.members == ()

    def test_it_says_what_is_missing_and_blocks_nobody(self) -> None:
        swarm = Swarm(PLAN)
        swarm.wires.kill("2a", flushed=False)
        for _ in range(2):
            assert swarm.leader.form() == "stage 2 has no free peer (1 failed lately)"
        assert swarm.peers["1a"].reservation.state == "free"
        assert swarm.leader.peer.told == []
        swarm.add("2b", 2)
        assert swarm.leader.form() == ""
        [told] = swarm.leader.peer.telling("replica")
        assert told["members"] == ["head", "1a", "2b"]

    @pytest.mark.parametrize("moment", sweep(range(8), {2, 5}))
    def test_of_two_heads_for_the_same_peers_one_gets_them(self, moment: int) -> None:
        swarm = Swarm(PLAN, seed=moment)
        other, asked, said = swarm.lead("other"), 0, "not asked yet"

        def meddle(asker: str, _: str, __: Frame) -> None:
            nonlocal asked, said
            asked += asker == "head"
            if asked > moment and said == "not asked yet":
                said = ""
                said = other.form()

        swarm.wires.on_request = meddle
        ours = swarm.leader.form()
        if said == "not asked yet":  # after all that the first one asks
            said = other.form()
        assert sorted([bool(ours), bool(said)]) == [False, True]
        winner, loser = (swarm.leader, other) if said else (other, swarm.leader)
        assert winner.members == (winner.me, "1a", "2a")
        assert loser.members == ()
        assert "has no free peer" in ours + said
        assert winner.step(BATCHES[0]) is not None
        winner.head.dissolve()
        swarm.run_for(6.0)
        assert loser.form() == ""
        assert loser.step(BATCHES[1]) is not None
        check_weights(swarm)

    def test_a_peer_that_is_busy_for_too_long_is_replaced(self) -> None:
        swarm = Swarm(PLAN)
        swarm.peers["2a"].busy = True
        # its link is forgiven once
        assert swarm.leader.form() == "stage 2 has no free peer (1 failed lately)"
        assert swarm.leader.members == ()
        swarm.add("2b", 2)
        swarm.run_for(OPENING_S)
        assert swarm.leader.form() == ""
        assert swarm.leader.members[2] == "2b"
        assert swarm.leader.step(BATCHES[0]) is not None


class TestWindow:
    """Microbatches in flight are what all members have memory for, as they say it."""

    def most_in_flight(self, swarm: Swarm) -> int:
        """In the next inner step, which must not stall."""
        most, start = 0, swarm.wires.now

        def look(_: Frame) -> None:
            nonlocal most
            most = max(most, swarm.leader.peer.worker.in_flight)

        swarm.wires.on_frame = look
        assert swarm.leader.step(batches(TINY, 1)[0]) is not None
        assert swarm.wires.now - start < STALL_LIMIT_S
        return most

    def test_a_head_that_has_less_memory_than_it_told_runs_fewer_forwards(self) -> None:
        swarm = Swarm(Plan())
        swarm.leader.form()
        peer, run, ran = swarm.leader.peer, swarm.leader.peer.worker.run_one, list[str]()

        def run_one(most: int) -> Produced | None:
            made = run(most)
            ran.extend([] if made is None else [made.kind])
            return made

        peer.worker.run_one = run_one  # type: ignore[method-assign]
        peer.set_window(1)
        assert self.most_in_flight(swarm) > 1
        assert ran == ["forward", "backward"] * 3

    @pytest.mark.parametrize("name", ["head", "1a", "2a"])
    def test_it_is_that_of_the_scarcest(self, name: str) -> None:
        swarm = Swarm(Plan())
        if name != "head":
            swarm.peers[name].set_window(1)
        swarm.leader.form()
        assert self.most_in_flight(swarm) == (3 if name == "head" else 1)
        swarm.peers[name].set_window(2)
        self.most_in_flight(swarm)
        assert self.most_in_flight(swarm) == 2
        swarm.peers[name].set_window(1)
        self.most_in_flight(swarm)
        assert self.most_in_flight(swarm) == 1


class TestUndecidedSends:
    """A round lasts until the sends of all members are decided (peer/rounds/round_end.py)."""

    @pytest.mark.parametrize("stage", [1, 2])
    def test_the_head_hears_of_another_members_at_the_end_of_the_step(self, stage: int) -> None:
        swarm = Swarm(PLAN)
        leader = swarm.leader
        leader.form()
        anchor = swarm.peers[leader.members[stage]].anchor
        anchor.undecided = True
        assert not leader.head.undecided
        leader.step(BATCHES[0])
        assert leader.head.undecided
        anchor.undecided = False
        leader.step(BATCHES[1])
        assert not leader.head.undecided

    def test_the_head_hears_of_the_oldest_anchor_of_the_others(self) -> None:
        swarm = Swarm(PLAN)
        leader = swarm.leader
        leader.form()
        assert leader.head.oldest_anchor is None
        for stage, peer in enumerate(leader.members):
            swarm.peers[peer].anchor.round = 7 - stage if stage else 3
        leader.step(BATCHES[0])
        assert leader.head.oldest_anchor == 7 - (len(leader.members) - 1)

    def test_its_own_is_not_a_members(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.peer.anchor.undecided = True
        swarm.leader.step(BATCHES[0])
        assert not swarm.leader.head.undecided


class TestLeaving:
    @pytest.mark.parametrize("stages", [(1,), (2,), (1, 2)])
    def test_spares_take_over_at_the_end_of_the_step(self, stages: tuple[int, ...]) -> None:
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        leader.step(BATCHES[0])
        before = leader.members
        for stage in stages:
            swarm.peers[before[stage]].reservation.shut("it leaves")
            swarm.peers[before[stage]].member.leaving = True
        assert leader.step(BATCHES[1]) is not None
        swarm.settle()
        assert {stage for stage in range(3) if leader.members[stage] != before[stage]} == set(
            stages
        )
        for stage in stages:
            leaver = swarm.peers[before[stage]]
            assert leaver.steps == [("head", 0), ("head", 1)]
            assert leaver.follower.head == ""
            assert leaver.reservation.state == "shut"
        assert leader.step(BATCHES[2]) is not None
        assert leader.head.last_fault == f"stage {stages[0]} left, epoch 1"
        check_weights(swarm)

    def test_without_a_spare_the_replica_dissolves_and_keeps_the_step(self) -> None:
        swarm = Swarm(PLAN)
        leader = swarm.leader
        leader.form()
        swarm.peers["1a"].reservation.shut("it leaves")
        swarm.peers["1a"].member.leaving = True
        stepped = leader.step(BATCHES[0])
        assert stepped is not None
        assert leader.members == ()
        assert [facts["reason"] for facts in leader.peer.telling("dissolved")] == [
            "stage 1 has no free peer (1 failed lately)"
        ]
        swarm.run_for(3.0)
        assert swarm.peers["1a"].reservation.state == "shut"
        assert swarm.peers["2a"].reservation.state == "free"
        assert all(peer.clean for peer in swarm.alive)
        check_weights(swarm)


class TestFaultsOfLinks:
    def broken(self, swarm: Swarm, upper: Peer) -> None:
        """The link from this member downwards breaks at both of its ends."""
        [end] = [each for each in upper.box.ends.values() if each.key.side == "lower"]
        swarm.wires.broken(end, "closed", 0.0)

    @pytest.mark.parametrize("above", [0, 1])
    def test_a_link_that_breaks_once_is_made_anew(self, above: int) -> None:
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        before = leader.members
        self.broken(swarm, swarm.peers[before[above]])
        assert leader.step(BATCHES[0]) is not None
        assert leader.members == before
        assert leader.head.epoch == 2
        check_weights(swarm)

    @pytest.mark.parametrize("above", [0, 1])
    def test_one_that_breaks_again_costs_the_lower_peer_its_place(self, above: int) -> None:
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        before = leader.members
        for batch in BATCHES[:2]:
            self.broken(swarm, swarm.peers[leader.members[above]])
            assert leader.step(batch) is not None
        swarm.run_for(3.0)
        assert leader.members[above + 1] != before[above + 1]
        assert leader.members[2 - above] == before[2 - above]
        assert swarm.peers[before[above + 1]].reservation.state == "free"
        check_weights(swarm)

    def test_one_that_breaks_again_much_later_is_forgiven(self) -> None:
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        before = leader.members
        for batch in BATCHES[:2]:
            self.broken(swarm, swarm.peers[leader.members[1]])
            assert leader.step(batch) is not None
            swarm.run_for(61.0)
        assert leader.members == before

    def test_one_that_breaks_again_before_any_step_ended_is_not(self) -> None:
        """However long that takes: steps of minutes never ended, and nobody was replaced."""
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        before = leader.members
        self.broken(swarm, swarm.peers[before[1]])
        breaks = [61.0]

        def break_again(_: Frame) -> None:
            if breaks and leader.head.epoch == 2 and len(swarm.peers[before[1]].box.ends) == 2:
                swarm.wires.pass_time(breaks.pop())
                self.broken(swarm, swarm.peers[before[1]])

        swarm.wires.on_frame = break_again
        assert leader.step(BATCHES[0]) is not None
        assert not breaks
        assert leader.members[1] == before[1] and leader.members[2] != before[2]
        check_weights(swarm)

    def test_members_that_answer_and_never_move_are_let_go_for_long(self) -> None:
        """Each stall was forgiven, and its head stood in that inner step for ever."""
        swarm = that_trains(spares=1)
        leader = swarm.leader
        before, start = leader.members, swarm.wires.now
        swarm.peers[before[2]].worker.run_one = lambda most=0: None
        assert leader.step(BATCHES[1]) is None
        assert leader.members == ()
        assert STALLS * STALL_LIMIT_S <= swarm.wires.now - start < STALLS * STALL_LIMIT_S + 60
        [told] = leader.peer.telling("dissolved")
        assert "stands still" in told["reason"]
        assert leader.form() == ""
        assert not set(leader.members[1:]) & set(before), "they are asked again at once"
        assert leader.step(BATCHES[0]) is not None

    def test_members_with_which_every_step_is_skipped_are_let_go(self) -> None:
        """One can send what is not finite for ever, and nobody learns anything."""
        swarm = that_trains(spares=1)
        leader = swarm.leader
        before = leader.members
        steps = 0
        swarm.peers[before[2]].worker.squared_norm = lambda: math.nan  # type: ignore[method-assign]
        while (stepped := leader.step(BATCHES[1])) is not None:
            assert stepped.skipped and steps < SKIPPED
            swarm.settle()
            steps += 1
        assert steps == SKIPPED
        [told] = leader.peer.telling("dissolved")
        assert "not finite" in told["reason"]
        assert leader.form() == ""
        assert not set(leader.members[1:]) & set(before), "they are asked again at once"

    def test_a_time_of_its_own_that_a_member_states_lets_nobody_wait_for_ever(self) -> None:
        swarm = that_trains(spares=1)
        leader = swarm.leader
        liar = swarm.peers[leader.members[2]].worker
        liar.__class__ = type("Liar", (StageWorker,), {"compute_s": 1e300})
        assert leader.step(BATCHES[1]) is not None
        swarm.settle()
        liar.run_one = lambda most=0: None  # type: ignore[method-assign]
        start = swarm.wires.now
        assert leader.step(BATCHES[2]) is None
        assert swarm.wires.now - start < STALLS * STALL_LIMIT_S + 60

    def test_a_time_that_a_member_states_gives_links_no_longer_than_two_inner_steps(self) -> None:
        swarm = that_trains(spares=1)
        leader, openings = swarm.leader, list[object]()
        last, start, before = swarm.peers[leader.members[2]], swarm.wires.now, swarm.wires.pass_time
        last.worker.__class__ = type("Liar", (StageWorker,), {"compute_s": 1e300})

        def computes(seconds: float) -> None:
            before(seconds)
            last.busy = swarm.wires.now - start < 20.0

        def asked(_: str, __: str, frame: Frame) -> None:
            openings.extend([frame.facts["opening_s"]] if frame.kind == "assign" else [])

        last.busy, swarm.wires.pass_time, swarm.wires.on_request = True, computes, asked
        assert leader.step(BATCHES[1]) is not None
        step_s = leader.head.step_s
        swarm.settle()
        swarm.wires.kill(leader.members[1], flushed=False)
        assert leader.step(BATCHES[2]) is not None
        assert step_s >= 20.0
        assert openings == [2 * step_s] * 2  # of both members

    def test_where_there_are_no_others_those_will_do(self) -> None:
        swarm = that_trains()
        leader = swarm.leader
        stuck = swarm.peers["2a"].worker
        works, stuck.run_one = stuck.run_one, lambda most=0: None
        assert leader.step(BATCHES[1]) is None
        stuck.run_one = works
        swarm.run_for(10.0)
        assert leader.form() == ""
        assert leader.step(BATCHES[1]) is not None

    def test_words_alone_are_no_progress(self) -> None:
        swarm = that_trains()
        leader = swarm.leader
        below, start = swarm.peers["1a"], swarm.wires.now
        below.busy = True
        [end] = [each for each in leader.peer.box.ends.values() if each.key.side == "lower"]
        before = swarm.wires.pass_time

        def talks(seconds: float) -> None:
            before(seconds)
            ready = Frame(kind="ready", replica=leader.me, epoch=leader.head.epoch)
            if leader.head.epoch == 1:
                leader.peer.box.inbox.messages.append(Arrived(end.key, ready))
            below.busy = below.busy and swarm.wires.now - start < STALL_LIMIT_S + 2

        swarm.wires.pass_time = talks
        assert leader.step(BATCHES[1]) is not None
        assert leader.head.last_fault == "stage 1 silent, epoch 1"

    def test_a_stage_that_makes_no_progress_is_a_fault(self) -> None:
        swarm = that_trains()
        below, start = swarm.peers["1a"], swarm.wires.now
        below.busy = True
        before = swarm.wires.pass_time

        def wakes(seconds: float) -> None:
            before(seconds)
            below.busy = below.busy and swarm.wires.now - start < STALL_LIMIT_S + 2

        swarm.wires.pass_time = wakes
        assert swarm.leader.step(BATCHES[1]) is not None
        assert swarm.wires.now - start >= STALL_LIMIT_S
        assert swarm.leader.head.last_fault == "stage 1 silent, epoch 1"
        check_weights(swarm)


class TestStopping:
    @pytest.mark.parametrize(
        ("lasted_s", "since_s", "waits_s"),
        [
            (0.0, 9.0, LAST_STEP_S),  # it never took one
            (1.0, 0.5, LAST_STEP_S),
            (100.0, 0.0, 120.0),
            (100.0, 90.0, 35.0),
            (100.0, 300.0, 25.0),  # it takes longer than the last one
            (900.0, 890.0, 120.0),
            (900.0, 100.0, LAST_STEP_S),  # little is lost, and it ends too late
        ],
    )
    def test_the_end_of_a_step_is_waited_for_where_it_is_near(
        self, lasted_s: float, since_s: float, waits_s: float
    ) -> None:
        assert rest_of_step_s(lasted_s, since_s, 120.0) == waits_s

    def test_a_long_step_that_is_nearly_done_is_finished(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        below, started, before = swarm.peers["1a"], [swarm.wires.now], swarm.wires.pass_time

        def wakes(seconds: float) -> None:
            before(seconds)
            took_s = swarm.wires.now - started[-1]
            below.busy = took_s < 90.0
            swarm.leader.stop = len(started) == 2 and took_s > 30.0

        swarm.wires.pass_time = wakes
        below.busy = True
        assert swarm.leader.step(BATCHES[0]) is not None
        started.append(swarm.wires.now)
        below.busy = True
        assert swarm.leader.step(BATCHES[1]) is not None
        assert swarm.leader.stop
        check_weights(swarm)

    @pytest.mark.parametrize(
        ("moment", "stuck"), [(1, False), (5, False), (9, False), (1, True), (5, True)]
    )
    def test_it_finishes_the_step_unless_that_takes_long(self, moment: int, stuck: bool) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        due = swarm.wires.delivered + moment

        def stop(_: Frame) -> None:
            swarm.leader.stop = swarm.wires.delivered >= due
            swarm.peers["1a"].busy = swarm.leader.stop and stuck

        swarm.wires.on_frame = stop
        start = swarm.wires.now
        assert (swarm.leader.step(BATCHES[1]) is None) == stuck
        assert swarm.wires.now - start < LAST_STEP_S + 0.5
        swarm.wires.on_frame = lambda _: None
        swarm.peers["1a"].busy = False
        swarm.leader.head.dissolve()
        swarm.settle()
        assert all(peer.clean for peer in swarm.alive)
        assert len(swarm.leader.peer.steps) == (1 if stuck else 2)
        check_weights(swarm)
