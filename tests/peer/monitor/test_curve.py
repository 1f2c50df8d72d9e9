"""The curve of a run: bounded for any number of rounds, and what was joined keeps its range."""

from __future__ import annotations

import random
from itertools import pairwise

from dilocox.peer.chain.round_history import HistoryRow
from dilocox.peer.chain.stated_facts import Spread
from dilocox.peer.monitor.history import MAX_POINTS, WHOLE, Curve, Point

ROUNDS = 100_000


def row(number: int, validation: float | None = None) -> HistoryRow:
    return HistoryRow(
        number, 0, "", 10.0 * number, 100 * (number + 1), 3.0, validation, 10.0, number % 7
    )


def points(curve: Curve) -> list[Point]:
    return [point for _, point in sorted(curve.points.items())]


def test_a_run_of_a_hundred_thousand_rounds_is_drawn_from_the_first_evenly() -> None:
    curve, chance = Curve(), random.Random(0)
    losses = [5.0 - 4.0 * number / ROUNDS + chance.gauss(0, 0.1) for number in range(ROUNDS)]
    losses[40_000], losses[60_000] = 9.0, 0.5
    for start in range(0, ROUNDS, 8192):  # as the pages come
        curve.take(
            row(number, losses[number]) for number in range(start, min(ROUNDS, start + 8192))
        )
    made = points(curve)
    assert MAX_POINTS // 4 < len(made) <= MAX_POINTS
    assert [each.round for each in made[:WHOLE]] == list(range(WHOLE))
    assert [each.round for each in made[-WHOLE:]] == list(range(ROUNDS - WHOLE, ROUNDS))
    gaps = [late.round - early.round for early, late in pairwise(made)]
    assert max(gaps) <= 2 * ROUNDS / (MAX_POINTS // 4)
    assert curve.told == ROUNDS - 1
    highs = [each.high for each in made if each.high is not None]
    lows = [each.low for each in made if each.low is not None]
    assert (max(highs), min(lows)) == (9.0, 0.5)
    assert all(each.validation == losses[each.round] for each in made)


def test_points_that_are_seen_one_by_one_stay_within_the_limit_too() -> None:
    curve = Curve()
    for number in range(5 * MAX_POINTS):
        loss = float(number % 5)
        seen = Point(number, number, validation=loss, low=loss, high=loss)
        curve.see(seen._replace(train_low=2.0 - loss / 10, train_high=2.0 + loss / 10))
        assert len(curve.points) <= MAX_POINTS
    joined = points(curve)[len(curve.points) // 2]
    assert (joined.low, joined.high) == (0.0, 4.0)
    assert (joined.train_low, joined.train_high) == (1.6, 2.4)


def test_what_a_bootstrap_does_not_know_is_not_forgotten() -> None:
    curve = Curve()
    curve.see(Point(3, 400, 7.0))
    curve.see(Point(3, validation=2.5, low=2.5, high=2.5))
    curve.take([HistoryRow(3, 0, "", None, 400, 2.0)])
    assert curve.points[3] == (3, 400, 7.0, 2.0, 2.5, 2.5, 2.5, None, None, None, None)
    curve.take([row(3, 2.25)])
    known = (3, 400, 30.0, 3.0, 2.25, 2.25, 2.25, 10.0, 3)
    assert curve.points[3] == (*known, None, None)
    curve.take([row(3, 2.25)._replace(train_low=2.75, train_high=3.5)])
    assert curve.points[3] == (*known, 2.75, 3.5)


def test_heads_that_stay_do_not_speak_for_those_that_left() -> None:
    curve = Curve()
    curve.hear(4, Spread.of([2.5, 2.25]))
    curve.hear(4, Spread.of([2.5]))
    assert (curve.points[4].train, curve.points[4].train_high) == (2.25, 2.5)
    curve.hear(4, Spread.of([2.0, 2.5]))
    curve.hear(5, Spread.of([1.5]))
    assert (curve.points[4].train, curve.newest("train")) == (2.0, (5, 1.5))
    curve.go_back(3)
    curve.hear(4, Spread.of([3.0]))
    assert curve.newest("train") == (4, 3.0)
