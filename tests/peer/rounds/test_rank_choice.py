"""Ranks and H of coming rounds: what follows from the rounds before, and that it comes to rest."""

import itertools
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.compression.layout import FlatLayout
from dilocox.peer.rounds.rank_choice import (
    RoundPlan,
    facts_of,
    following_window,
    next_inner_steps,
    next_ranks,
)
from dilocox.peer.rounds.record import WINDOW, RoundFacts, Times, stage_codec
from tests.peer.local_peers import MANIFEST

ENERGY = 0.95


def a_round(
    rank: int = 0, needed: int = 0, exchange_s: float = 0, step_s: float = 0, stall_s: float = 0
) -> RoundFacts:
    return RoundFacts(
        ranks=(rank,), needed=(needed,), exchange_s=exchange_s, step_s=step_s, stall_s=stall_s
    )


def next_rank(
    rank: int, needs: Sequence[tuple[int, int]], limit: int = 64, min_rank: int = 1
) -> int:
    """The rule for one matrix; `needs`: (rank, needed) of the rounds, the newest last."""
    window = [a_round(*pair) for pair in needs]
    return next_ranks((rank,), window, limits=(limit,), min_rank=min_rank)[0]


def next_h(
    current: int,
    *times: tuple[float, float],
    stall_s: float = 0,
    low: int = 1,
    high: int = 1_000_000,
) -> int:
    """`times`: exchange and step of the rounds; each stalled equally."""
    window = [
        a_round(exchange_s=exchange_s, step_s=step_s, stall_s=stall_s)
        for exchange_s, step_s in times
    ]
    return next_inner_steps(current, window, low=low, high=high)


@pytest.mark.parametrize(("exchange_s", "following"), [(0.0, 12), (49.0, 12), (51.0, 8)])
def test_no_rank_grows_where_an_exchange_takes_more_than_half_of_the_longest_round(
    exchange_s: float, following: int
) -> None:
    window = [a_round(8, 8, exchange_s=exchange_s, step_s=0.5)] * WINDOW
    (rank,) = next_ranks((8,), window, limits=(64,), min_rank=2, max_inner_steps=200)
    assert rank == following
    sinking = [a_round(8, 2, exchange_s=exchange_s, step_s=0.5)] * WINDOW
    assert next_ranks((8,), sinking, limits=(64,), min_rank=2, max_inner_steps=200) == (4,)


def test_what_a_member_of_a_replica_states_of_h_counts_within_the_manifests_bound() -> None:
    """A head whose member stated 2^53 never rang its bell."""
    rounds = MANIFEST.rounds
    plan = RoundPlan(MANIFEST, stage_codec(MANIFEST, FlatLayout.of([("w", (64, 64))])))
    assert plan.inner_steps_of(None, []) == rounds.inner_steps
    assert plan.inner_steps_of(None, [-1, rounds.inner_steps + 7, 1]) == rounds.inner_steps + 7
    assert plan.inner_steps_of(None, [2**53]) == rounds.max_inner_steps


# ---- ranks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rank", "needs", "following"),
    [
        (16, [(16, 12)] * 5, 16),  # it has some room
        (16, [(16, 14)] * 5, 16),
        (16, [(16, 15)] * 5, 24),  # almost used up: it grows by half
        (1, [(1, 1)], 2),
        (7, [(7, 7)], 10),
        (16, [(16, 10)] * 5, 13),  # much room: what is needed and a quarter
        (40, [(40, 27)] * 5, 34),
        (32, [(32, 1)] * 5, 16),  # at most by half
        (33, [(33, 0)] * 5, 17),
        (16, [(16, 5)] * 4 + [(16, 8)], 8),
        (16, [(16, 5)] * 4 + [(16, 16)], 16),  # the newest round used all of it
        (24, [(16, 16)] * 4 + [(24, 20)], 24),  # used up at a smaller rank: no growth is undone
        (24, [(16, 16)] * 3 + [(24, 20)] * 2, 24),
        (24, [(16, 16)] * 4 + [(24, 24)], 36),
    ],
)
def test_a_rank_follows_what_the_last_rounds_needed(
    rank: int, needs: list[tuple[int, int]], following: int
) -> None:
    assert next_rank(rank, needs) == following


def test_one_odd_round_changes_nothing() -> None:
    usual, low, high = (16, 13), (16, 2), (16, 16)
    for place in range(WINDOW):
        for odd in (low, high):
            needs = [usual] * WINDOW
            needs[place] = odd
            assert next_rank(16, needs) == 16


def test_ranks_stay_inside_their_bounds() -> None:
    assert next_rank(16, [(16, 16)] * 5, limit=20) == 20
    assert next_rank(20, [(20, 20)] * 5, limit=20) == 20
    assert next_rank(16, [(16, 0)] * 5, min_rank=12) == 12
    assert next_rank(16, [(16, 0)] * 5, min_rank=12, limit=10) == 10
    assert next_rank(99, [], limit=20) == 20


def test_a_tensor_that_goes_dense_stays_dense_beside_others() -> None:
    window = [RoundFacts(ranks=(0, 8, 0), needed=(0, 8, 0), exchange_s=1, step_s=1)]
    assert next_ranks((0, 8, 0), window, limits=(0, 64, 0), min_rank=4) == (0, 12, 0)


def test_without_rounds_the_ranks_stay_and_without_ranks_there_are_none() -> None:
    assert next_ranks((3, 0, 7), [], limits=(9, 0, 9), min_rank=1) == (3, 0, 7)
    window = [RoundFacts(ranks=(), needed=(), exchange_s=1, step_s=1)] * 5
    assert next_ranks((), window, limits=(), min_rank=1) == ()


@pytest.mark.parametrize(
    ("ranks", "limits", "needed"),
    [((4,), (9, 9), (4,)), ((4, 4), (9, 9), (4,)), ((4,), (9,), (4, 4))],
)
def test_windows_about_other_tensors_are_refused(
    ranks: tuple[int, ...], limits: tuple[int, ...], needed: tuple[int, ...]
) -> None:
    window = [RoundFacts(ranks=(4,) * len(ranks), needed=needed, exchange_s=1, step_s=1)]
    with pytest.raises(ValueError, match="zip"):
        next_ranks(ranks, window, limits=limits, min_rank=1)


def needed_in(energies: Sequence[float], rank: int) -> int:
    """The smallest count of the first `rank` energies, largest first, that holds 95 % of them."""
    sums = list(itertools.accumulate(energies[:rank]))
    return next(count for count, held in enumerate(sums, 1) if held >= ENERGY * sums[-1])


def ranks_over(energies: Sequence[float], first: int, limit: int, rounds: int = 60) -> list[int]:
    """The ranks of `rounds` rounds on a matrix whose spectrum stands still."""
    window, ranks = tuple[RoundFacts, ...](), [first]
    for _ in range(rounds):
        rank = ranks[-1]
        window = following_window(window, a_round(rank, needed_in(energies, rank)))
        ranks += next_ranks((rank,), window, limits=(limit,), min_rank=1)
    return ranks


def assert_settles(ranks: Sequence[int], energies: Sequence[float], limit: int) -> None:
    final = ranks[-1]
    assert set(ranks[-20:]) == {final}, "it swings"
    moves = [after - before for before, after in itertools.pairwise(ranks) if after != before]
    turns = sum(before * after < 0 for before, after in itertools.pairwise(moves))
    assert turns <= 1, f"it turned {turns} times: {ranks}"
    needed = needed_in(energies, final)
    assert final == limit or needed < 0.9 * final, "it rests where the rank is used up"
    assert final <= 2 or needed >= 0.6 * final, "it rests where the rank is mostly unused"


SPECTRA: dict[str, Callable[[int], float]] = {
    "flat": lambda k: 1.0,
    "slow exponential": lambda k: 0.97**k,
    "exponential": lambda k: 0.9**k,
    "steep exponential": lambda k: 0.3**k,
    "power law": lambda k: 1 / (k + 1),
    "steep power law": lambda k: (k + 1) ** -2.0,
    "exact rank 8": lambda k: float(k < 8),
    "one column": lambda k: float(k == 0),
}


@pytest.mark.parametrize("first", [1, 2, 5, 16, 40, 64])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_rank_of_a_spectrum_that_stands_still_comes_to_rest(name: str, first: int) -> None:
    energies = [SPECTRA[name](k) for k in range(64)]
    assert_settles(ranks_over(energies, first, 64), energies, 64)


@given(
    steps=st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=64),
    first=st.integers(1, 64),
)
def test_the_rank_of_any_spectrum_comes_to_rest(steps: list[float], first: int) -> None:
    energies = [max(value, 1e-9) for value in itertools.accumulate(steps, lambda a, b: a * b)]
    limit = len(energies)
    assert_settles(ranks_over(energies, min(first, limit), limit), energies, limit)


def test_a_flat_spectrum_ends_at_the_limit_and_a_steep_one_far_below() -> None:
    flat = [1.0] * 64
    assert ranks_over(flat, 4, 48)[-1] == 48
    steep = [0.5**k for k in range(64)]
    assert 5 <= ranks_over(steep, 64, 64)[-1] <= 8  # 5 hold 97 %


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), max_size=5), st.integers(1, 64))
def test_ranks_change_by_half_at_most_and_never_leave_their_bounds(
    needs: list[tuple[int, int]], rank: int
) -> None:
    following = next_rank(rank, [(r, min(n, r)) for r, n in needs], limit=64)
    assert 1 <= following <= 64
    assert rank - rank // 2 <= following <= rank + max(rank // 2, 1)


# ---- H -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("current", "times", "stall_s", "following"),
    [
        *((steps, (50.0, 1.0), 0.0, steps) for steps in (100, 120, 144)),  # two exchanges, and room
        (99, (50.0, 1.0), 0.0, 120),
        (146, (50.0, 1.0), 0.0, 120),
        (100, (25.25, 0.5), 0.0, 122),
        *((steps, (5.0, 1.0), 1.0, steps) for steps in (100, 120, 144)),  # a stall of a hundredth
        (99, (5.0, 1.0), 1.0, 120),
        (146, (5.0, 1.0), 1.0, 120),
        (100, (60.0, 1.0), 1.0, 144),  # the exchange wants more
        (100, (0.0, 1.0), 9.0, 150),  # by half at most
        (100, (1000.0, 1.0), 0.0, 150),
        (100, (1.0, 1.0), 0.0, 50),
        (1, (1.0, 1.0), 0.0, 2),
        (2, (1.0, 1.0), 0.0, 2),
        (100, (0.0, 1.0), 0.0, 100),  # nothing is known that costs time, or no step
        (100, (500.0, 0.0), 9.0, 100),
    ],
)
def test_h_follows_what_exchanges_and_stalls_take(
    current: int, times: tuple[float, float], stall_s: float, following: int
) -> None:
    assert next_h(current, times, stall_s=stall_s) == following


def test_a_short_exchange_does_not_shorten_the_rounds_of_a_small_swarm() -> None:
    """Two peers of 3.4 M parameters on loopback: H fell from 110 to 37 and they trained 95 % of the
    time, for 0.15 s of each round stood still."""
    times, steps = [(0.3, 0.12)] * WINDOW, 110
    for _ in range(20):
        steps = next_h(steps, *times, stall_s=0.15)
    assert 0.15 / (steps * 0.12) < 0.01
    assert 125 <= steps <= 180


def test_h_stays_inside_the_manifests_bounds() -> None:
    assert next_h(100, (1000.0, 1.0), high=120) == 120
    assert next_h(100, (0.1, 1.0), low=80) == 80
    assert next_h(100, (50.0, 1.0), low=110) == 110
    assert next_h(100, (50.0, 1.0), high=90) == 90


def test_rounds_of_unknown_times_and_one_long_exchange_do_not_change_h() -> None:
    assert next_h(100) == 100
    assert next_h(100, (0, 0), (500.0, 1.0), (0, 0)) == 150
    assert next_h(100, low=120) == 120
    assert next_h(100, *[(50.0, 1.0)] * 4, (5000.0, 1.0)) == 100


@given(st.floats(0.01, 1000), st.floats(0.001, 10), st.floats(0.01, 1000), st.integers(1, 10_000))
def test_h_of_times_that_stand_still_comes_to_rest(
    exchange_s: float, stall_s: float, step_s: float, first: int
) -> None:
    steps = [first]
    for _ in range(40):
        following = next_h(steps[-1], (exchange_s, step_s), stall_s=stall_s, low=5, high=2000)
        steps.append(following)
    least = max(2 * exchange_s, 100 * stall_s) / step_s
    assert len(set(steps[-10:])) == 1
    assert min(least, 2000) <= steps[-1] <= max(5, 1.45 * least + 2)
    assert sorted(steps[1:]) in (steps[1:], steps[:0:-1])  # never back and forth


@given(st.randoms(use_true_random=False))
def test_times_that_scatter_by_a_tenth_do_not_swing_h(random: Random) -> None:
    window: tuple[RoundFacts, ...] = ()
    steps = [100]
    for _ in range(60):
        exchange_s, stall_s = (each * random.uniform(0.9, 1.1) for each in (20.0, 0.7))
        window = following_window(window, a_round(1, 1, exchange_s, 1.0, stall_s))
        steps.append(next_inner_steps(steps[-1], window, low=1, high=10_000))
    moves = [(a, b) for a, b in itertools.pairwise(steps[5:]) if a != b]
    assert len(moves) <= 2
    assert steps[-1] >= 0.9 * 70


@given(
    st.lists(st.tuples(st.floats(0, 1e308), st.floats(0, 1e308)), max_size=5), st.integers(1, 10**6)
)
def test_no_stated_time_takes_h_out_of_its_bounds(
    times: list[tuple[float, float]], current: int
) -> None:
    for stall_s in (0.0, 1e308):
        assert 3 <= next_h(current, *times, stall_s=stall_s, low=3, high=999) <= 999


def seconds(*stated: tuple[float, ...]) -> list[Times]:
    """Times of members: exchange, inner step, stall."""
    return [Times(**dict(zip(Times().times, each, strict=False))) for each in stated]


# ---- facts ---------------------------------------------------------------------------------------
def test_a_slow_member_and_a_far_one_do_not_move_the_medians() -> None:
    usual = [(10.0, 1.0, 0.3), (11.0, 1.1, 0.1), (12.0, 1.2, 0.2)]
    times = [*usual, (900.0, 1.0, 60.0), (10.5, 50.0, 0.2)]
    facts = facts_of(ranks=(4,), needed=(3,), times=seconds(*times))
    assert (facts.exchange_s, facts.step_s, facts.stall_s) == (11.0, 1.1, 0.2)
    assert (facts.ranks, facts.needed) == ((4,), (3,))


def test_a_median_is_one_of_the_stated_numbers_and_unknown_times_do_not_count() -> None:
    times = seconds((0, 2.0, 0), (30.0, 0, 4.0), (20.0, 0, 0), (0, 0, 3.0))
    facts = facts_of(ranks=(), needed=(), times=times)
    assert (facts.exchange_s, facts.step_s, facts.stall_s) == (20.0, 2.0, 3.0)
    nobody = facts_of(ranks=(), needed=(), times=seconds((0, 0, 0)))
    assert (nobody.exchange_s, nobody.step_s, nobody.stall_s) == (0.0, 0.0, 0.0)


@given(st.permutations([(1.0, 9.0), (2.0, 0.0), (0.0, 7.0), (4.0, 6.0), (5.0, 5.0)]))
def test_the_order_of_the_members_does_not_matter(times: list[tuple[float, float]]) -> None:
    facts = facts_of(ranks=(1,), needed=(1,), times=seconds(*times))
    assert facts == RoundFacts(ranks=(1,), needed=(1,), exchange_s=2.0, step_s=6.0)


def test_a_window_holds_the_newest_five_rounds() -> None:
    window = tuple[RoundFacts, ...]()
    for rank in range(1, 8):
        window = following_window(window, a_round(rank))
    assert [facts.ranks for facts in window] == [(3,), (4,), (5,), (6,), (7,)]
