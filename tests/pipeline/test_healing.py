"""Whoever vanishes, and whenever: each stage makes each inner step once, or nobody does."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from torch import Tensor

from dilocox.pipeline.stage_worker import StageWorker
from tests.pipeline.chains import batches, chain
from tests.pipeline.histories import (
    How,
    after_frames,
    check_history,
    check_weights,
    equal,
    go,
    retraced,
    strike,
)
from tests.pipeline.peers import TINY, Peer, Plan
from tests.pipeline.replicas import Swarm
from tests.sweeps import sweep

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 3, 2)
FRAMES_A_STEP = 12  # of 3 stages and 2 microbatches: 4 forwards, 4 gradients, 2 sums, 2 GOs
MOMENTS = range(FRAMES_A_STEP + 3)
KILLS: list[tuple[How, int]] = [("kill", moment) for moment in MOMENTS]
FREEZES: list[tuple[How, int]] = [("freeze", moment) for moment in MOMENTS]
# what it sent matters most about sums and GO
LAST_WORDS: list[tuple[How, int]] = [("kill, what it sent arrives", m) for m in MOMENTS[7:]]


CASES, CASES_ALONE = [*KILLS, *FREEZES, *LAST_WORDS], [*KILLS, *FREEZES[::4]]


@lru_cache
def undisturbed(steps: int, missed: tuple[int, int] | None = None) -> list[list[Tensor]]:
    """Weights by stage after so many steps, of which one stage missed one (stage, step)."""
    chained = chain(TINY, 3, microbatches=2)
    for step, batch in enumerate(BATCHES[:steps]):
        chained.run(batch)
        go(chained, {stage for stage in range(3) if (stage, step) != missed})
    return [[p.detach() for p in stage.parameters()] for stage in chained.stages]


class TestAMemberVanishes:
    """In the second of three inner steps, after any number of its frames."""

    def test_a_step_has_as_many_frames_as_the_moments_below_assume(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        for batch in BATCHES[:2]:
            before = swarm.wires.delivered
            swarm.leader.step(batch)
            swarm.settle()
            assert swarm.wires.delivered - before == FRAMES_A_STEP

    @pytest.mark.parametrize(("how", "moment"), sweep(CASES, CASES[::6]))
    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_spare_takes_its_place(self, moment: int, stage: int, how: How) -> None:
        swarm = Swarm(PLAN, spares=1, seed=moment)
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        victim = swarm.peers[swarm.leader.members[stage]]
        [spare] = [p for p in swarm.alive if p.stage == stage and p is not victim]

        def vanish() -> None:
            spare.copy_of(victim)  # so that only what is lost can make a difference
            strike(swarm, victim.me, how)

        with after_frames(swarm, moment, vanish):
            stepped = [swarm.leader.step(batch) for batch in BATCHES[1:]]
        swarm.settle()
        assert [each.step if each else None for each in stepped] == [1, 2]
        survivors = [swarm.peers[name] for name in swarm.leader.members]
        assert survivors[stage] is spare
        assert [going.step for going in swarm.goings] == [0, 1, 2]
        # Replayed, as if never disturbed; or the dead one's part of a step that had its GO is lost.
        missed = {going.step for going in swarm.goings if victim.me in going.members}
        missed -= {number for _, number in victim.steps}
        assert missed <= {1}
        expected = undisturbed(3, (stage, 1) if missed else None)
        for peer in survivors:
            assert equal(peer.weights(), expected[peer.stage])
            assert peer.clean
            if peer is not spare:
                assert [number for _, number in peer.steps] == [0, 1, 2]
        made = [going.step for going in swarm.goings if spare.me in going.members]
        assert [number for _, number in spare.steps] == made
        self.check_what_was_told(swarm, victim, how)
        assert not swarm.wires.refused

    def check_what_was_told(self, swarm: Swarm, victim: Peer, how: How) -> None:
        [fault] = swarm.leader.peer.telling("fault")
        [healed] = swarm.leader.peer.telling("healed")
        reason = "silent" if how == "freeze" else "closed"
        assert (fault["stage"], fault["peer"], fault["reason"]) == (
            victim.stage,
            victim.me,
            reason,
        )
        assert healed["members"] == list(swarm.leader.members)
        assert healed["epoch"] == swarm.leader.head.epoch == 2
        assert swarm.leader.head.last_fault == f"stage {victim.stage} {reason}, epoch 1"

    @pytest.mark.parametrize(("how", "moment"), sweep(CASES_ALONE, CASES_ALONE[::6]))
    @pytest.mark.parametrize("stage", [1, 2])
    def test_without_a_spare_the_replica_dissolves(self, moment: int, stage: int, how: How) -> None:
        swarm = Swarm(PLAN, seed=moment)
        leader = swarm.leader
        leader.form()
        leader.step(BATCHES[0])
        swarm.settle()
        victim = swarm.peers[leader.members[stage]]
        with after_frames(swarm, moment, lambda: strike(swarm, victim.me, how)):
            for batch in BATCHES[1:]:
                leader.step(batch)
        assert leader.members == ()
        assert leader.peer.telling("dissolved")
        swarm.settle()
        given = swarm.goings[-1].step
        for peer in (leader.peer, swarm.peers["1a" if stage == 2 else "2a"]):
            made = [number for _, number in peer.steps]
            # only who would have heard the GO from the dead one may have missed it
            heard = made == list(range(given + 1))
            assert heard or (peer.stage > stage and made == list(range(given)))
            assert peer.clean
            if heard:
                assert equal(peer.weights(), undisturbed(given + 1)[peer.stage])
        self.check_that_all_is_free_again(swarm, victim, given)

    def check_that_all_is_free_again(self, swarm: Swarm, victim: Peer, given: int) -> None:
        others = [peer for peer in swarm.alive if peer.stage > 0]
        assert {peer.reservation.state for peer in others} == {"free"}
        assert all(peer.member.assignment is None for peer in others)
        reason = swarm.leader.form()
        assert reason == f"stage {victim.stage} has no free peer (1 failed lately)"
        swarm.add("new", victim.stage)
        assert swarm.leader.form() == ""
        stepped = swarm.leader.step(BATCHES[0])
        assert stepped is not None
        assert stepped.step == given + 1


# ---- any number of faults, at any moment ---------------------------------------------------------
Fault = tuple[int, int, How, int]  # events until then, stage, how, events until it thaws


def some_faults(dice: random.Random) -> list[Fault]:
    hows: tuple[How, ...] = ("kill", "kill, what it sent arrives", "freeze")
    return [
        (dice.randint(1, 40), dice.randint(1, 2), dice.choice(hows), dice.randint(1, 60))
        for _ in range(dice.randint(1, 5))
    ]


class Storm:
    """Faults in a swarm that gets a new peer for one that it lost: at once, or when it must.

    An event is a frame that arrives, or a request: so a peer may also vanish between a head's yes
    and its assignment.
    """

    def __init__(self, swarm: Swarm, faults: list[Fault], *, relieved: bool) -> None:
        self._swarm = swarm
        self._relieved = relieved
        self.struck = 0
        self._faults = list(faults)
        self._events = self._due = 0
        self._thaws: list[tuple[int, str]] = []
        self._next()
        swarm.wires.on_frame = lambda _: self._event("")
        swarm.wires.on_request = lambda _, peer, __: self._event(peer)
        swarm.on_blocked = self._relieve

    def _next(self) -> None:
        if self._faults:
            self._due += self._faults[0][0]

    def _event(self, asked: str) -> None:
        self._events += 1
        for at, frozen in self._thaws:
            if at == self._events:
                self._swarm.wires.thaw(frozen)
        if self._faults and self._events == self._due:
            _, stage, how, lasts = self._faults.pop(0)
            self._next()
            self._vanish(asked, stage, how, lasts)

    def _vanish(self, asked: str, stage: int, how: How, lasts: int) -> None:
        swarm = self._swarm
        members = [
            p for p in swarm.alive if p.stage == stage and p.reservation.assignment is not None
        ]
        victims = members or [peer for peer in swarm.alive if peer.stage == stage]
        if asked and swarm.peers[asked].stage > 0:
            victims = [peer for peer in swarm.alive if peer.me == asked]
        if victims:
            strike(swarm, victims[0].me, how)
            if how == "freeze":
                self._thaws.append((self._events + lasts, victims[0].me))
            self.struck += 1
            if self._relieved:
                swarm.add(f"{victims[0].stage}+{self._events}", victims[0].stage)

    def _relieve(self) -> None:
        for stage in (1, 2):
            if not any(peer.stage == stage for peer in self._swarm.alive):
                self._swarm.add(f"{stage}-{self._events}", stage)


def test_members_that_are_in_the_middle_of_a_long_piece_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A desktop's backward takes half a minute, and only then it takes up an epoch."""
    monkeypatch.setattr(StageWorker, "compute_s", property(lambda _: 20.0))
    swarm = Swarm(PLAN, spares=1)
    swarm.leader.form()
    first, last = (swarm.peers[name] for name in swarm.leader.members[1:])
    [spare] = [name for name in ("2a", "2b") if name != last.me]
    until, before = swarm.wires.now + 20.0, swarm.wires.pass_time

    def computes(seconds: float) -> None:
        before(seconds)
        last.busy = swarm.wires.now < until

    last.busy, swarm.wires.pass_time = True, computes
    assert swarm.leader.step(BATCHES[0]) is not None
    swarm.settle()
    swarm.wires.kill(spare, flushed=False)
    swarm.wires.kill(first.me, flushed=False)
    last.busy, until = True, swarm.wires.now + 35.0
    assert swarm.leader.step(BATCHES[1]) is not None
    assert swarm.leader.members[2] == last.me
    assert len(swarm.leader.peer.telling("healed")) == 1
    check_weights(swarm)


@pytest.mark.parametrize("seed", sweep(range(8), 2))
def test_any_faults_at_any_moments(seed: int) -> None:
    relieved = seed % 2 == 0
    swarm = Swarm(PLAN, spares=int(relieved), seed=seed)
    storm = Storm(swarm, some_faults(random.Random(seed)), relieved=relieved)
    made = swarm.leader.train([*BATCHES, *BATCHES])
    for name in swarm.peers:
        swarm.wires.thaw(name)
    swarm.leader.head.dissolve()
    swarm.run_for(10.0)
    assert storm.struck > 0
    assert [stepped.step for stepped in made] == list(range(6))
    assert not any(stepped.skipped for stepped in made)
    check_history(swarm)
    for name, expected in retraced(swarm).items():
        assert equal(swarm.peers[name].weights(), expected), name
    for peer in swarm.alive:
        assert peer.clean
        assert peer.member.assignment is None
        assert peer.stage == 0 or peer.reservation.state == "free"
    assert not swarm.wires.refused
