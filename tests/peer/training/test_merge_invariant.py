"""The invariant of the merge: nothing learnt is lost or counted twice, under any schedule."""

from __future__ import annotations

import json

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilocox.peer.training.merge import MergeConfig
from tests.peer.training.schedules import FOREVER, SCHEDULE, Schedule, World, event_of

DROPPED_IN_FLIGHT = (
    *(5 * [0]),
    *(4913, 368475, 3065712, 44217, 3090277),
    *(7 * [0]),
    *(117912, 653429, 4913),
)


@settings(max_examples=200, deadline=None)
@given(schedule=SCHEDULE, weight=st.sampled_from([0.0, 0.5, 0.75, 1.0]))
def test_nothing_is_lost_or_counted_twice_exactly_in_float64(
    schedule: Schedule, weight: float
) -> None:
    config = MergeConfig(weight=weight, decay=1.0, max_age=FOREVER)
    world = World(config, torch.float64, 0.25)

    def check() -> None:
        assert world.gap().tolist() == [0, 0, 0], world.happened
        assert world.tokens_gap() == 0, world.happened

    world.run(schedule, check)


@settings(max_examples=100, deadline=None)
@given(schedule=SCHEDULE, max_age=st.integers(1, 4))
def test_no_token_vanishes_uncounted_where_old_progress_is_dropped(
    schedule: Schedule, max_age: int
) -> None:
    config = MergeConfig(weight=0.75, decay=1.0, max_age=max_age)
    world = World(config, torch.float64, 0.25)

    def check() -> None:
        assert world.tokens_gap() == 0, world.happened

    world.run(schedule, check)


@settings(max_examples=60, deadline=None)
@given(schedule=SCHEDULE)
@example(schedule=[event_of(number) for number in DROPPED_IN_FLIGHT])
def test_state_through_json_and_copies_goes_on_bit_for_bit(schedule: Schedule) -> None:
    config = MergeConfig(weight=0.75, decay=0.95, max_age=3)
    kept, reborn = (World(config, torch.float32, 0.013) for _ in range(2))

    def be_born_again() -> None:
        tensors, facts = reborn.merge.state()
        # a restart gives up a send that was dropped in flight: of that the tokens alone may count
        if not any(dropped for _, _, dropped in facts["fly"]):
            reborn.reborn(tensors, json.dumps(facts))

    kept.run(schedule, lambda: None)
    reborn.run(schedule, be_born_again)
    (left, left_facts), (right, right_facts) = kept.merge.state(), reborn.merge.state()
    assert left_facts == right_facts
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_long_schedules_meet_every_event() -> None:
    happened: set[str] = set()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(0, 5040, (400,), generator=generator).tolist()
        draws = torch.randint(-8, 9, (400, 3), generator=generator).tolist()
        config = MergeConfig(weight=0.75, decay=1.0, max_age=FOREVER)
        world = World(config, torch.float64, 0.25)

        def check(world: World = world) -> None:
            assert world.gap().tolist() == [0, 0, 0]

        world.run([(n, (a, b, c)) for n, (a, b, c) in zip(numbers, draws, strict=True)], check)
        happened |= set(world.happened)
    assert len(happened) == 18
