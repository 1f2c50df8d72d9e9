"""Whoever vanishes, and whenever: each stage makes each inner step once, or nobody does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor

from dilocox.peer.inner import InnerOptimizer, clip_factor
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.worker import StageWorker
from tests.pipeline.chains import SPEC, Chain, batches, chain
from tests.pipeline.replicas import TINY, Peer, Plan, Swarm, fresh_stage

How = Literal["kill", "kill, what it sent arrives", "freeze"]

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 3, 2)
FRAMES_A_STEP = 12  # of 3 stages and 2 microbatches: 4 forwards, 4 gradients, 2 sums, 2 GOs
RATE = 1e-2


def strike(swarm: Swarm, victim: str, how: How) -> None:
    if how == "freeze":
        swarm.wires.freeze(victim)
    else:
        swarm.wires.kill(victim, flushed=how != "kill")


@contextmanager
def after_frames(swarm: Swarm, count: int, act: Callable[[], None]) -> Iterator[None]:
    """`act` when so many more frames have arrived; it must come to that within."""
    due = swarm.wires.delivered + count
    acted = False

    def look(_: Frame | None) -> None:
        nonlocal acted
        if swarm.wires.delivered >= due and not acted:
            acted = True
            act()

    swarm.wires.on_frame = look
    look(None)
    yield
    assert acted


@lru_cache
def undisturbed(steps: int, missed: tuple[int, int] | None = None) -> list[list[Tensor]]:
    """Weights by stage after so many steps, of which one stage missed one (stage, step)."""
    chained = chain(TINY, 3, microbatches=2)
    for step, batch in enumerate(BATCHES[:steps]):
        chained.run(batch)
        go(chained, {stage for stage in range(3) if (stage, step) != missed})
    return [[p.detach() for p in stage.parameters()] for stage in chained.stages]


def go(chained: Chain, stages: set[int]) -> None:
    """End a step as a head does; only these stages hear of it."""
    squared_norm = 0.0
    for worker in reversed(chained.workers):
        squared_norm += worker.squared_norm()
    factor = clip_factor(squared_norm, SPEC.clip_norm)
    for stage, worker in enumerate(chained.workers):
        if stage in stages:
            worker.go(factor, RATE)
    chained.restart()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class TestAMemberVanishes:
    """In the second of three inner steps, after any number of its frames."""

    def test_a_step_has_as_many_frames_as_the_moments_below_assume(self) -> None:
        with Swarm(PLAN) as swarm:
            swarm.leader.form()
            for batch in BATCHES[:2]:
                before = swarm.wires.delivered
                swarm.leader.step(batch)
                swarm.settle()
                assert swarm.wires.delivered - before == FRAMES_A_STEP

    @pytest.mark.parametrize("moment", range(FRAMES_A_STEP + 3))
    @pytest.mark.parametrize("stage", [1, 2])
    @pytest.mark.parametrize("how", ["kill", "kill, what it sent arrives", "freeze"])
    def test_a_spare_takes_its_place(self, moment: int, stage: int, how: How) -> None:
        with Swarm(PLAN, spares=1, seed=moment) as swarm:
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
        assert swarm.leader.head.last_fault == f"stage {victim.stage} {reason}"

    @pytest.mark.parametrize("moment", range(FRAMES_A_STEP + 3))
    @pytest.mark.parametrize("stage", [1, 2])
    @pytest.mark.parametrize("how", ["kill", "freeze"])
    def test_without_a_spare_the_replica_dissolves(
        self, moment: int, stage: int, how: How
    ) -> None:
        with Swarm(PLAN, seed=moment) as swarm:
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
                if heard or stage == 2:
                    assert equal(peer.weights(), self.expected(given, victim)[peer.stage])
            self.check_that_all_is_free_again(swarm, victim, given)

    def expected(self, given: int, victim: Peer) -> list[list[Tensor]]:
        """After the last GO; what the dead stage missed, no later step has seen."""
        del victim
        return undisturbed(given + 1)

    def check_that_all_is_free_again(self, swarm: Swarm, victim: Peer, given: int) -> None:
        others = [peer for peer in swarm.alive if peer.stage > 0]
        assert {peer.desk.state for peer in others} == {"free"}
        assert all(peer.member.assignment is None for peer in others)
        reason = swarm.leader.form()
        assert reason == f"stage {victim.stage} has no free peer (1 failed lately)"
        swarm.add("new", victim.stage)
        assert swarm.leader.form() == ""
        stepped = swarm.leader.step(BATCHES[0])
        assert stepped is not None
        assert stepped.step == given + 1


# ---- any number of faults, at any moment ----------------------------------------------------------
Fault = tuple[int, int, How, int]  # events until then, stage, how, events until it thaws


def some_faults(dice: random.Random) -> list[Fault]:
    hows: tuple[How, ...] = ("kill", "kill, what it sent arrives", "freeze")
    return [
        (dice.randint(1, 40), dice.randint(1, 2), dice.choice(hows), dice.randint(1, 60))
        for _ in range(dice.randint(1, 5))
    ]


class Storm:
    """Faults in a swarm that always gets a new peer for one that it lost.

    An event is a frame that arrives, or a request: so a peer may also vanish between a head's yes
    and its assignment.
    """

    def __init__(self, swarm: Swarm, faults: list[Fault]) -> None:
        self._swarm = swarm
        self._faults = list(faults)
        self._events = self._due = 0
        self._thaws: list[tuple[int, str]] = []
        self._next()
        swarm.wires.on_frame = lambda _: self._event("")
        swarm.wires.on_request = lambda _, peer, __: self._event(peer)

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
        members = [p for p in swarm.alive if p.stage == stage and p.desk.assignment is not None]
        victims = [p for p in members if p.stage > 0] or [p for p in swarm.alive if p.stage == stage]
        if asked and swarm.peers[asked].stage > 0:
            victims = [peer for peer in swarm.alive if peer.me == asked]
        if victims:
            strike(swarm, victims[0].me, how)
            if how == "freeze":
                self._thaws.append((self._events + lasts, victims[0].me))
            swarm.add(f"{victims[0].stage}+{self._events}", victims[0].stage)


def retraced(swarm: Swarm) -> dict[str, list[Tensor]]:
    """The weights that all peers must have, from who completed which steps with whom."""
    stages = {name: fresh_stage(swarm.plan, peer.stage) for name, peer in swarm.peers.items()}
    optimizers = {
        name: InnerOptimizer(stage.named_parameters(), swarm.plan.spec)
        for name, stage in stages.items()
    }
    for going in swarm.goings:
        workers = [
            StageWorker(
                stages[name],
                optimizers[name],
                microbatches=swarm.plan.microbatches,
                stage_index=index,
                num_stages=swarm.plan.num_stages,
            )
            for index, name in enumerate(going.members)
        ]
        members = going.members
        chained = Chain(
            [stages[name] for name in members],
            workers,
            [optimizers[name] for name in members],
            window=2,
        )
        chained.run(going.batch)
        step = (going.head, going.step)
        go(chained, {index for index, name in enumerate(members) if step in swarm.peers[name].steps})
    return {name: [p.detach() for p in stage.parameters()] for name, stage in stages.items()}


def check_history(swarm: Swarm) -> None:
    """Each step was completed once, and missed by nobody who stayed."""
    for peer in swarm.peers.values():
        assert len(set(peer.steps)) == len(peer.steps), "a step was made twice"
        for head, step in peer.steps:
            assert [g.members for g in swarm.goings if (g.head, g.step) == (head, step)]
    by_head: dict[str, list[int]] = {}
    for going in swarm.goings:
        by_head.setdefault(going.head, []).append(going.step)
    for numbers in by_head.values():
        assert numbers == list(range(len(numbers)))
    for before, after in pairwise(swarm.goings):
        stayed = set(before.members) & set(after.members) if before.head == after.head else set()
        if not swarm.peers[before.head].telling("dissolved"):
            for name in stayed:
                assert (before.head, before.step) in swarm.peers[name].steps


@pytest.mark.parametrize("seed", range(25))
def test_any_faults_at_any_moments(seed: int) -> None:
    with Swarm(PLAN, spares=1, seed=seed) as swarm:
        Storm(swarm, some_faults(random.Random(seed)))
        made = swarm.leader.train([*BATCHES, *BATCHES])
        for name in swarm.peers:
            swarm.wires.thaw(name)
        swarm.leader.head.dissolve()
        swarm.run_for(10.0)
    assert [stepped.step for stepped in made] == list(range(6))
    assert not any(stepped.skipped for stepped in made)
    check_history(swarm)
    for name, expected in retraced(swarm).items():
        assert equal(swarm.peers[name].weights(), expected), name
    for peer in swarm.alive:
        assert peer.clean
        assert peer.member.assignment is None
        assert peer.stage == 0 or peer.desk.state == "free"
    assert not swarm.wires.refused
