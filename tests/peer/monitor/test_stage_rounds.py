"""A stage's chain as a monitor keeps it: a record counts once, what was abandoned not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.monitor.chains import DETAILED, MAX_TIMES, StageRounds
from tests.peer.fabricated import chain_round, digest, walk_of

ROOT = "root"


def chain_of(count: int, start: int = 0) -> list[ChainRound]:
    """The newest first."""
    numbers = range(start + count - 1, start - 1, -1)
    return [chain_round(0, n, {"a": 10, "b": n}, root=ROOT) for n in numbers]


def walked(stage: StageRounds, rounds: list[ChainRound], at: float = 0.0, **options: bool) -> None:
    stage.add(walk_of(rounds, **options), at, ROOT)


def test_tokens_are_summed_over_the_chain_and_a_record_that_is_met_twice_counts_once() -> None:
    stage = StageRounds()
    walked(stage, chain_of(4))
    assert stage.tokens == Counter({"a": 40, "b": 0 + 1 + 2 + 3})
    assert stage.rounds == 4 and stage.head is not None and stage.head.round == 3
    walked(stage, chain_of(3, start=2))
    assert stage.tokens["a"] == 50 and stage.rounds == 5


def test_rounds_that_came_at_once_have_no_pace_yet() -> None:
    stage = StageRounds()
    walked(stage, chain_of(1), at=100.0)
    walked(stage, chain_of(2, start=1), at=110.0)
    assert stage.per_hour(110.0) is None and stage.per_hour(120.0) == pytest.approx(360.0)


def test_rounds_from_before_the_watch_have_no_time() -> None:
    stage = StageRounds()
    walked(stage, chain_of(3), at=100.0)
    assert stage.progress_at is None and stage.per_hour(200.0) is None
    walked(stage, chain_of(1, start=3), at=110.0)
    walked(stage, chain_of(1, start=4), at=120.0)
    walked(stage, chain_of(1, start=5), at=130.0)
    assert stage.progress_at == 130.0
    assert stage.per_hour(130.0) == pytest.approx(2 / 20 * 3600)
    assert stage.per_hour(150.0) == pytest.approx(2 / 40 * 3600)  # it gets slower
    assert stage.usual_s == 10.0
    walked(stage, chain_of(9, start=6), at=500.0)  # so long a walk was not followed as it came
    assert stage.progress_at == 130.0


def test_rounds_of_two_seconds_have_a_pace_though_each_look_finds_several() -> None:
    stage = StageRounds()
    walked(stage, chain_of(3), at=100.0)
    for look in range(6):
        walked(stage, chain_of(5, start=3 + 5 * look), at=110.0 + 10 * look)
    assert stage.progress_at == 160.0
    assert stage.per_hour(160.0) == pytest.approx(29 / 50 * 3600)


def test_what_a_chain_abandons_is_taken_away_again() -> None:
    stage = StageRounds()
    walked(stage, chain_of(3))
    fork = chain_round(0, 2, {"a": 10, "c": 5}, previous=digest(0, 1), branch="x", root=ROOT)
    walked(stage, [fork])
    assert stage.tokens == Counter({"a": 30, "b": 1, "c": 5})
    assert stage.rounds == 3 and digest(0, 2) not in stage.known
    assert stage.records_seen == 4  # what a counter shows never falls
    assert stage.head is not None and stage.head.digest == fork.digest


def test_a_fork_with_other_round_numbers_takes_away_all_after_its_base() -> None:
    stage = StageRounds()
    walked(stage, chain_of(6))
    fork = chain_round(0, 9, {"c": 7}, previous=digest(0, 2), branch="x", root=ROOT)
    walked(stage, [fork])
    assert stage.rounds == 4 and stage.tokens == Counter({"a": 30, "b": 3, "c": 7})


def test_when_the_operator_goes_back_later_rounds_are_taken_away_and_the_pace_begins_anew() -> None:
    stage = StageRounds()
    for number in range(6):
        made = chain_round(0, number, {"a": 10}, root=ROOT, chain_tokens=number)
        walked(stage, [made], at=float(number))
    stage.go_back(1, 600.0)
    assert stage.rounds == 2 and stage.tokens == Counter({"a": 20}) and 2 not in stage.recent
    assert stage.head is not None and (stage.head.round, stage.chain_tokens) == (1, 1)
    assert stage.per_hour(600.0) is None and stage.usual_s == 0
    before = digest(0, 1)
    for number in (6, 7, 8):
        made = chain_round(0, number, {"a": 10}, previous=before, branch="x", root=ROOT)
        walked(stage, [made], at=600.0 + 10 * number)
        before = made.digest
    assert stage.per_hour(680.0) == pytest.approx(2 / 20 * 3600) and stage.usual_s == 10
    assert sorted(stage.times) == [1, 6, 7, 8]  # the first one was there before


def test_going_back_before_the_first_round_leaves_nothing_and_the_next_one_has_a_time() -> None:
    stage = StageRounds()
    walked(stage, chain_of(2 * DETAILED), at=5.0)
    stage.go_back(-1, 600.0)
    assert (stage.head, stage.rounds, stage.chain_tokens, stage.times) == (None, 0, 0, {})
    walked(stage, [chain_round(0, 200, {"a": 1}, previous=ROOT, branch="x")], at=610.0)
    assert stage.rounds == 1 and stage.progress_at == 610.0


def test_a_walk_that_began_before_the_operator_went_back_takes_nothing_away() -> None:
    stage = StageRounds()
    walked(stage, chain_of(6))
    stage.go_back(2, 600.0)
    walked(stage, chain_of(1, start=6))  # it ends at round 5, which was known as it began
    assert stage.rounds == 3 and stage.head is not None and stage.head.round == 2


def test_what_nobody_gives_is_a_gap_that_is_filled_later() -> None:
    stage = StageRounds()
    newest = chain_of(2, start=5)
    walked(stage, newest, connected=False)
    assert stage.gaps == {digest(0, 4): 0} and stage.rounds == 2
    stage.add(replace(walk_of(chain_of(1)), start=digest(0, 4), rounds=()), 0.0, ROOT)
    assert stage.gaps == {digest(0, 4): 1}
    walked(stage, chain_of(5))
    assert stage.gaps == {} and stage.rounds == 7 and stage.tokens["a"] == 70
    assert stage.head is not None and stage.head.round == 6


def test_it_stays_bounded_and_keeps_its_sums() -> None:
    stage = StageRounds()
    older = {"folded": Counter({"a": 80, "z": 1}), "folded_seconds": Counter({"a": 5, "z": 7})}
    stage.add(replace(walk_of(chain_of(2)), **older), 0.0, ROOT)
    assert stage.tokens == Counter({"a": 100, "b": 1, "z": 1})
    assert stage.token_seconds["a"] == 5 + 2 * chain_of(1)[0].token_seconds
    stage.go_back(-1, 0.0)
    assert stage.token_seconds == Counter({"a": 5, "z": 7})
    stage = StageRounds()
    total = 3 * DETAILED
    for number in range(total):
        walked(stage, chain_of(1, start=number), at=float(number))
    assert (len(stage.times), len(stage.recent)) == (MAX_TIMES, DETAILED)
    assert stage.progress_at == total - 1
    assert stage.tokens["a"] == 10 * total and stage.rounds == total
