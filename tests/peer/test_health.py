"""How a swarm is, in one sentence: each state, and which one goes before which."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from dilocox.peer.monitor import health
from dilocox.peer.monitor.health import STATES, Health, StageHealth, SwarmHealth, health_of

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.utc).timestamp()
FULL = StageHealth(hosts=2, joining=0, rounds=5, progress_at=NOON)
EMPTY = replace(FULL, hosts=0)
NEW = StageHealth(hosts=0, joining=0, rounds=0, progress_at=None)


def swarm(*stages: StageHealth, after_s: float = 10.0, **changes: object) -> SwarmHealth:
    told = SwarmHealth(
        now=NOON + after_s,
        watched_since=NOON - 3600,
        stages=stages,
        replicas=2,
        round_s=30.0,
        patience_s=20.0,
    )
    return replace(told, **changes)  # pyright: ignore[reportArgumentType]


def sentence(*stages: StageHealth, **changes: object) -> str:
    return health_of(swarm(*stages, **changes)).sentence  # pyright: ignore[reportArgumentType]


def test_a_state_is_told_in_one_sentence_and_an_operators_word_goes_first() -> None:
    assert health_of(swarm(FULL, FULL)) == Health("training", "training")
    assert sentence(FULL, FULL, replicas=0) == "training: replicas form"
    assert health_of(swarm(EMPTY, EMPTY, ended=True)) == Health("ended", "ended")
    paused = health_of(swarm(FULL, FULL, after_s=10_000, paused=True))
    assert paused == Health("paused", "paused") and paused.good
    blocked = health_of(swarm(FULL, FULL, EMPTY))
    assert blocked == Health("blocked", "blocked: stage 2 has no peer", (2,)) and not blocked.good


@pytest.mark.parametrize(
    ("empty", "named"),
    [
        ((1, 2), "stages 1 and 2"),
        ((1, 2, 3), "stages 1, 2 and 3"),
        ((1, 2, 3, 4), "stages 1, 2, 3 and 4"),
        ((1, 2, 3, 4, 5, 6), "stages 1, 2, 3, 4 and 2 more"),
    ],
)
def test_several_empty_stages_are_named_up_to_four(empty: tuple[int, ...], named: str) -> None:
    stages = [EMPTY if number in empty else FULL for number in range(8)]
    found = health_of(swarm(*stages))
    assert found.sentence == f"blocked: {named} have no peer"
    assert found.blocked == empty


def test_empty_stages_are_waited_for_while_their_peers_join_or_nobody_has_begun() -> None:
    joining = replace(EMPTY, joining=1)
    assert sentence(NEW, NEW, replicas=0) == "waiting for the first peers"
    assert sentence(replace(NEW, hosts=1), NEW) == "blocked: stage 1 has no peer"
    assert sentence(EMPTY, EMPTY) == "blocked: no stage has a peer"
    assert sentence(joining, EMPTY) == "blocked: stage 1 has no peer"
    assert health_of(swarm(FULL, joining)) == Health(
        "waiting", "waiting: the peers of stage 1 are joining", (1,)
    )


def test_no_round_for_three_usual_ones_is_a_stall_since_the_last() -> None:
    # three rounds of 30 s and an exchange's patience of 20 s
    assert sentence(FULL, FULL, after_s=109) == "training"
    assert health_of(swarm(FULL, FULL, after_s=111)) == Health("stalled", "stalled since 12:00 UTC")


def test_short_rounds_are_given_a_minute_and_one_stage_is_enough_for_a_stall() -> None:
    assert sentence(FULL, after_s=59, round_s=1.0, patience_s=1.0) == "training"
    assert sentence(FULL, after_s=61, round_s=1.0, patience_s=1.0) == "stalled since 12:00 UTC"
    assert sentence(FULL, replace(FULL, progress_at=NOON - 600)) == "stalled since 11:50 UTC"


def test_without_a_round_in_view_the_watch_itself_is_the_measure() -> None:
    fresh = replace(FULL, progress_at=None)
    assert sentence(fresh, watched_since=NOON) == "training"
    assert sentence(fresh, watched_since=NOON - 3600) == "stalled since 11:00 UTC"


def test_a_round_from_before_the_watch_is_no_measure() -> None:
    long_ago = replace(FULL, progress_at=NOON - 7200)
    assert sentence(long_ago, watched_since=NOON) == "training"
    assert sentence(long_ago, watched_since=NOON, after_s=111) == "stalled since 12:00 UTC"


def test_after_a_time_without_rounds_they_are_waited_for_anew() -> None:
    before = replace(FULL, progress_at=NOON - 7200)
    assert sentence(before, watched_since=NOON - 9000, held_at=NOON) == "training"
    stalled = sentence(before, watched_since=NOON - 9000, held_at=NOON, after_s=111)
    assert stalled == "stalled since 12:00 UTC"
    assert sentence(replace(before, progress_at=NOON + 5), held_at=NOON, after_s=114) == "training"


def test_a_swarm_out_of_sight_is_unreachable_since_it_was_seen_last() -> None:
    found = health_of(swarm(FULL, reachable=False, unreachable_since=NOON - 60))
    assert found == Health("unreachable", "unreachable: nobody answers since 11:59 UTC")
    assert sentence(FULL, reachable=False).endswith("since 11:00 UTC")


def test_without_a_bootstrap_every_sentence_of_a_run_that_goes_on_says_so() -> None:
    tail = "; no bootstrap answers: nobody can join"
    found = health_of(swarm(FULL, FULL, bootstraps=False))
    # the monitor's figure of health stays: for this there is an alert of its own
    assert found == Health("training", "training" + tail, warns=True) and found.good
    assert sentence(FULL, EMPTY, bootstraps=False) == "blocked: stage 1 has no peer" + tail
    assert sentence(FULL, bootstraps=False, paused=True) == "paused" + tail
    assert sentence(FULL, bootstraps=False, ended=True) == "ended"
    assert sentence(FULL, bootstraps=False, reachable=False).endswith("since 11:00 UTC")


def test_the_states_are_those_of_the_modules_text() -> None:
    told = [line.split()[0] for line in str(health.__doc__).split("\n\n")[1].splitlines()]
    assert tuple(told) == STATES
