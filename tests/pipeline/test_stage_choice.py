"""Where peers go: the emptiest stage first, then one spare at a time, and never back and forth."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.dht.records import StageRecord
from dilocox.pipeline.stage_choice import Mover, choose_stage, live_peers, next_move
from tests.pipeline.swarms import in_replica, stage_record

Swarm = dict[int, dict[str, StageRecord]]
JOINING_LOOKS = 2


def spares(*counts: int) -> Swarm:
    return {
        stage: {f"{stage}-{index}": stage_record() for index in range(count)}
        for stage, count in enumerate(counts)
    }


def counts_of(swarm: Swarm) -> list[int]:
    return [len(live_peers(swarm[stage])) for stage in sorted(swarm)]


def test_a_joiner_takes_the_stage_that_has_nobody_then_the_emptiest() -> None:
    assert choose_stage(spares(2, 0, 1), me="me", num_stages=3) == 1
    assert choose_stage(spares(3, 2, 1), me="me", num_stages=3) == 2
    swarm = spares(1, 1)
    swarm[1] = {f"left{index}": stage_record(state="left") for index in range(3)}
    assert choose_stage(swarm, me="me", num_stages=2) == 1
    swarm[0] = {"joiner": stage_record(state="joining")}
    swarm[1] = {"a": in_replica("h"), "b": stage_record()}
    assert choose_stage(swarm, me="me", num_stages=2) == 0
    own = {0: {"a": stage_record()}, 1: {"me": stage_record()}}  # its old record does not count
    assert choose_stage(own, me="me", num_stages=2) == 1


def test_a_stage_that_gave_no_answer_is_not_taken_for_an_empty_one() -> None:
    assert choose_stage({1: spares(0, 4)[1]}, me="me", num_stages=3) == 1
    assert choose_stage({}, me="me", num_stages=3) in range(3)
    assert next_move({0: spares(4)[0], 1: {}}, num_stages=3, turn=0) is None


def test_joiners_spread_over_stages_that_are_equally_empty() -> None:
    chosen = Counter(choose_stage(spares(0, 0, 0), me=f"m{i}", num_stages=3) for i in range(90))
    assert min(chosen.values()) > 15


@pytest.mark.parametrize(
    ("swarm", "target"),
    [
        (spares(5, 3, 4), 1),
        (spares(4, 3, 4), None),  # level
        (spares(2, 0), 1),
        (spares(1, 0), None),  # its own stage would be empty
        (spares(9, 0, 0), 1),
        ({0: {"a": in_replica("h"), "b": in_replica("h")}, 1: {}}, None),  # they are no spares
        # what these learnt is sent by no replica, since there is none
        ({0: {"a": stage_record(tokens=5), "b": stage_record(tokens=1)}, 1: {}}, 1),
        ({0: {n: stage_record(tokens=5) for n in "abc"}, 1: {"d": stage_record()}}, None),
        ({0: {"a": stage_record(state="left"), "b": stage_record()}, 1: {}}, None),
        (
            {0: spares(4)[0], 1: {"x": stage_record(state="joining")}},
            None,
        ),  # somebody is on the way
    ],
)
def test_a_spare_moves_from_the_fullest_stage_to_the_emptiest(
    swarm: Swarm, target: int | None
) -> None:
    move = next_move(swarm, num_stages=len(swarm), turn=3)
    assert (None if move is None else move[1]) == target
    if move is not None:
        assert move[0] in swarm[0]


def test_the_fullest_stage_that_has_a_spare_gives_it() -> None:
    for turn in range(10):
        move = next_move(spares(4, 5, 2), num_stages=3, turn=turn)
        assert move is not None
        assert move[0].startswith("1-")
    swarm = spares(4, 5, 2)
    swarm[1] = {peer: in_replica("h") for peer in swarm[1]}
    move = next_move(swarm, num_stages=3, turn=0)
    assert move is not None
    assert move[0].startswith("0-")


def test_turns_pass_so_that_a_peer_which_cannot_move_does_not_stop_the_others() -> None:
    swarm = spares(6, 0)
    moves = {next_move(swarm, num_stages=2, turn=turn) for turn in range(40)}
    assert len(moves) == 6


def test_a_move_must_be_due_for_several_looks_in_a_row() -> None:
    swarm = spares(4, 2)
    move = next_move(swarm, num_stages=2, turn=0)
    assert move is not None
    mover = Mover(me=move[0], stage=0, num_stages=2, hold=3)
    looks = [
        mover.observe(swarm, free=True, turn=0),
        mover.observe(swarm, free=True, turn=0),
        mover.observe(spares(3, 2), free=True, turn=0),  # the condition was broken once
        mover.observe(swarm, free=True, turn=0),
        mover.observe(swarm, free=False, turn=0),  # recruited meanwhile
        mover.observe(swarm, free=True, turn=0),
        mover.observe(swarm, free=True, turn=0),
        mover.observe(swarm, free=True, turn=0),
    ]
    assert looks == [None] * 7 + [1]


def test_nobody_moves_before_it_has_looked_at_the_stages_anew() -> None:
    swarm: Swarm = {0: {"me": stage_record(), "x": in_replica("h"), "y": in_replica("h")}, 1: {}}
    mover = Mover(me="me", stage=0, num_stages=2, hold=3)
    assert not mover.named
    looks = [mover.observe(swarm, free=True, turn=0, fresh=False) for _ in range(9)]
    assert looks == [None] * 9 and mover.named
    assert mover.observe(swarm, free=True, turn=0) == 1
    swarm[1] = {"z": stage_record(), "w": stage_record()}
    assert mover.observe(swarm, free=True, turn=0) is None and not mover.named


def test_to_a_stage_without_anybody_those_go_first_that_leave_nothing_behind() -> None:
    swarm: Swarm = {0: {n: stage_record(tokens=n != "b") for n in "abcde"}, 1: {}}
    assert {next_move(swarm, num_stages=2, turn=turn) for turn in range(40)} == {("b", 1)}


def test_with_unsent_progress_a_move_waits_for_whoever_may_only_start_again() -> None:
    swarm: Swarm = {0: {"me": stage_record(tokens=5), "x": in_replica("h")}, 1: {}}
    mover = Mover(me="me", stage=0, num_stages=2, hold=1, long=4)

    def looks(count: int) -> list[int | None]:
        return [mover.observe(swarm, free=True, turn=0, unsent=True) for _ in range(count)]

    assert looks(3) == [None] * 3
    swarm[1] = {"y": stage_record(state="joining")}
    assert looks(3) == [None] * 3
    swarm[1] = {"y": stage_record(state="left")}
    assert looks(4) == [None] * 3 + [1]
    swarm[0] |= {n: in_replica("h") for n in "uvw"}
    swarm[1] = {"y": stage_record()}
    assert looks(9) == [None] * 9, "it is sent first"


def test_nobody_moves_to_a_stage_that_does_not_fit_its_machine() -> None:
    swarm: Swarm = {0: {"me": stage_record(), "x": in_replica("h"), "y": in_replica("h")}, 1: {}}
    asked = list[int]()

    def fits(stage: int) -> bool:
        asked.append(stage)
        return False

    mover = Mover(me="me", stage=0, num_stages=2, hold=2, fits=fits)
    assert [mover.observe(swarm, free=True, turn=0) for _ in range(3)] == [None] * 3
    assert asked == [1, 1], "only once it is due"


def test_a_peers_own_old_record_under_the_stage_it_left_moves_nobody() -> None:
    swarm: Swarm = {0: {"me": stage_record(), "x": in_replica("h"), "y": in_replica("h")}, 1: {}}
    assert next_move(swarm, num_stages=2, turn=0) == ("me", 1)
    assert Mover(me="me", stage=1, num_stages=2, hold=1).observe(swarm, free=True, turn=0) is None
    swarm[1] = {"me": stage_record()}
    assert Mover(me="me", stage=1, num_stages=2, hold=1).observe(swarm, free=True, turn=0) is None


class Movers:
    """A swarm whose peers look in turn, at records up to `delay` looks old, and move."""

    def __init__(self, swarm: Swarm, *, delay: int, seed: int):
        self.swarm = swarm
        self.moves: list[tuple[int, str, int]] = []
        self.at_once = 0
        self._hold = delay + 2
        self._random = random.Random(seed)
        self._past: deque[Swarm] = deque(maxlen=delay + 1)
        self._joining: dict[str, int] = {}
        self._movers = {
            peer: Mover(me=peer, stage=stage, num_stages=len(swarm), hold=self._hold)
            for stage, here in swarm.items()
            for peer in here
        }

    def look(self, number: int) -> None:
        self._past.append({stage: dict(here) for stage, here in self.swarm.items()})
        for stage, peer in [(k, peer) for k, here in self.swarm.items() for peer in here]:
            record = self.swarm[stage][peer]
            if record.state == "joining":
                self._joining[peer] -= 1
                if self._joining[peer] == 0:
                    self.swarm[stage][peer] = dataclasses.replace(record, state="spare")
            # Every stage's records come with an age of their own.
            seen = {k: self._random.choice(self._past)[k] for k in self.swarm}
            free = record.state == "spare" and not record.replica
            target = self._movers[peer].observe(seen, free=free, turn=number // 50)
            if target is not None:
                self._move(number, peer, stage, target)
        joining = [r for here in self.swarm.values() for r in here.values() if r.state == "joining"]
        self.at_once = max(self.at_once, len(joining))

    def _move(self, number: int, peer: str, stage: int, target: int) -> None:
        del self.swarm[stage][peer]
        self.swarm[target][peer] = stage_record(state="joining")
        self._joining[peer] = JOINING_LOOKS
        self._movers[peer] = Mover(
            me=peer, stage=target, num_stages=len(self.swarm), hold=self._hold
        )
        self.moves.append((number, peer, target))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=4),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_any_swarm_becomes_level_one_at_a_time_and_then_rests(
    counts: list[int], replicas: int, delay: int, seed: int
) -> None:
    """Whatever the delays of what peers see: no more moves than a plan made by one would need."""
    swarm = spares(*counts)
    for here in swarm.values():  # some train in replicas and stay where they are
        for index in range(replicas if min(counts) >= replicas else 0):
            peer = sorted(here)[index]
            here[peer] = in_replica(f"0-{index}")
    movers = Movers(swarm, delay=delay, seed=seed)
    before = counts_of(swarm)
    for number in range(400):
        movers.look(number)
    after = counts_of(swarm)
    assert sum(after) == sum(before)
    assert max(after) - min(after) <= 1
    assert movers.at_once <= 1
    # Each move takes one from above the level and puts it below: none is ever taken back.
    surplus = sum(max(0, count - after[stage]) for stage, count in enumerate(before))
    assert len(movers.moves) == surplus
    assert not movers.moves or movers.moves[-1][0] < 350
