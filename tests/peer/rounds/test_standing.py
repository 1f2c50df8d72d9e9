"""What the chain remembers of peers: who counts how much, and who sits out."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest

from dilocox.peer.rounds.standing import (
    FORGOTTEN_ROUNDS,
    MAX_STANDINGS,
    MOST_TOKENS,
    Standing,
    bounded_weights,
    credits,
    following_standings,
    follows,
    most_tokens,
    sitting_out,
    voters,
    voters_before,
)

Standings = tuple[Standing, ...]


def after(
    rounds: int,
    *,
    heard: Mapping[str, float],
    left_out: Collection[int] = (),
) -> Standings:
    """After so many rounds; in those of `left_out` without "a"."""
    known: Standings = ()
    for number in range(rounds):
        excluded = ["a"] if number in left_out else []
        there = {peer: share for peer, share in heard.items() if peer not in excluded}
        known = following_standings(known, number, there, excluded)
    return known


# ---- left out ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rounds", "sits"),
    [
        ([10], []),
        ([10, 17], [18, 19]),
        ([10, 18], []),  # too long ago
        ([10, 11, 14], [15, 16, 17, 18]),
        ([10, 11, 14, 19], [20, 21, 22, 23, 24, 25, 26, 27]),
    ],
)
def test_who_is_left_out_again_and_again_sits_out_for_longer_each_time(
    rounds: list[int], sits: list[int]
) -> None:
    known = after(rounds[-1] + 1, heard={"a": 1.0, "b": 1.0}, left_out=rounds)
    later = range(rounds[-1] + 1, rounds[-1] + 99)
    assert [number for number in later if sitting_out(known, number)] == sits


def test_who_was_left_out_often_sits_out_64_rounds_and_is_then_forgotten() -> None:
    known, sat = after(40, heard={"b": 1.0}, left_out=range(40)), list[int]()
    for number in range(40, 39 + 128 + 6):
        assert {each.peer for each in known} == {"a", "b"}
        sat += [number] * len(sitting_out(known, number))
        known = following_standings(known, number, {"b": 1.0}, ())
    assert sat == list(range(40, 39 + 64 + 1))
    known = following_standings(known, 39 + 128 + 6, {"b": 1.0}, ())
    assert {each.peer for each in known} == {"b"}


def test_a_record_remembers_the_newest_of_many() -> None:
    many = following_standings((), 1, {f"{place:03d}": 1.0 for place in range(300)}, ())
    more = following_standings(many, 2, {f"{place:03d}": 1.0 for place in range(250, 350)}, ())
    assert len(more) == 320 and list(more) == sorted(more, key=lambda each: each.peer)
    assert sum(each.round == 2 for each in more) == 100
    assert {each.credited for each in more if "250" <= each.peer < "300"} == {2}


def test_a_crowd_that_was_left_out_makes_nobody_forgotten() -> None:
    """Who is forgotten has no vote any more; where all are, the crowd has one, too."""
    known = after(3, heard={"x": 1.0, "y": 1.0, "z": 1.0})
    crowd = [f"{place:03d}" for place in range(MAX_STANDINGS)]
    known = following_standings(known, 3, {"x": 1.0, "y": 1.0}, crowd)
    assert credits([*"xyz", *crowd], known, 4) == {"x": 4, "y": 4, "z": 3} | dict.fromkeys(crowd, 0)
    assert len(known) == MAX_STANDINGS and follows(
        known, after(3, heard=dict.fromkeys("xyz", 1.0)), 3, dict.fromkeys("xy", 1.0)
    )


def test_a_crowd_that_was_in_two_records_makes_no_voter_forgotten() -> None:
    """By zeros, which cost nothing; whoever had a vote and was away meanwhile keeps it."""
    known = after(4, heard=dict.fromkeys("xyz", 1.0))
    for number in range(4, 16):
        crowd = {f"{number // 2:03d} {place:03d}": 1.0 for place in range(120)}
        known = following_standings(known, number, {"x": 1.0, "y": 1.0} | crowd, ())
    assert len(known) == MAX_STANDINGS
    assert credits("xyz", known, 16) == {"x": 10, "y": 10, "z": 4}


# ---- unheard -------------------------------------------------------------------------------------
def test_whose_values_most_averages_lack_sits_out_and_again_for_longer() -> None:
    known = after(6, heard={"liar": 0.4, "late": 0.6, "b": 1.0})
    assert [number for number in range(6, 99) if sitting_out(known, number)] == [6, 7]
    assert sitting_out(known, 6) == {"liar"}
    for number in range(8, 14):
        known = following_standings(known, number, {"liar": 0.0, "b": 1.0}, ())
    assert [number for number in range(14, 99) if sitting_out(known, number)] == [14, 15, 16, 17]


def test_who_was_in_no_average_yet_sits_out_after_two_that_lacked_it() -> None:
    """Keys that come to every group and give nothing make each exchange wait for them."""
    known, waited = after(4, heard={"b": 1.0}), list[int]()
    for number in range(4, 64):
        silent = {"fresh"} - sitting_out(known, number)
        waited += [number] * len(silent)
        known = following_standings(known, number, {"b": 1.0} | dict.fromkeys(silent, 0.0), ())
    assert waited == [4, 5, 8, 9, 14, 15, 24, 25, 42, 43]
    late = following_standings(known, 64, {"b": 1.0, "late": 0.0}, ())
    late = following_standings(late, 65, {"b": 1.0, "late": 0.3}, ())
    late = following_standings(late, 66, {"b": 1.0, "late": 0.0}, ())
    assert "late" not in sitting_out(late, 67)


@pytest.mark.parametrize(("lacking", "sits"), [(5, False), (6, True)])
def test_only_the_last_ten_rounds_of_a_peer_count(lacking: int, sits: bool) -> None:
    known: Standings = ()
    for number in range(30):
        share = 0.0 if number % 10 < lacking else 1.0
        known = following_standings(known, number, {"a": share, "b": 1.0}, ())
    assert any(each.times for each in known) == sits


def test_who_goes_on_well_is_forgiven() -> None:
    known = after(6, heard={"a": 0.0, "b": 1.0})
    for number in range(6, 30):
        known = following_standings(known, number, {"a": 1.0, "b": 1.0}, ())
    assert {(each.times, each.unheard) for each in known} == {(0, 0)}


# ---- who votes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("credited", "vote"),
    [
        ({"a": 0, "b": 0}, "ab"),  # a run begins
        ({"a": 1, "b": 0}, "ab"),
        ({"a": 2, "b": 1, "c": 0}, "ab"),
        ({"a": 10, "b": 3, "c": 2, "d": 0}, "ab"),
    ],
)
def test_who_was_in_three_records_votes_or_in_half_as_many_as_any_other(
    credited: dict[str, int], vote: str
) -> None:
    assert voters(credited) == frozenset(vote)


def test_those_who_are_not_here_are_no_measure_of_those_who_are() -> None:
    credited = {"gone": 10, "a": 1, "b": 0}
    assert voters(credited, among="ab") == {"gone", "a", "b"}
    assert voters(credited) == {"gone"}


def test_credit_is_forgotten_with_the_rest() -> None:
    known = after(5, heard={"a": 1.0})
    assert credits("ab", known, 6) == {"a": 5, "b": 0}
    for number in range(5, 5 + FORGOTTEN_ROUNDS):
        known = following_standings(known, number, {"c": 1.0}, ())
    assert credits("ac", known, 5 + FORGOTTEN_ROUNDS) == {"a": 0, "c": 10}


@pytest.mark.parametrize("back", [0, FORGOTTEN_ROUNDS // 2, FORGOTTEN_ROUNDS, 5000])
def test_rounds_that_a_rollback_takes_back_make_nobody_forgotten(back: int) -> None:
    """Round numbers go on behind them: all would be new, those who were known for lies as well."""
    known = after(20, heard={"a": 1.0, "b": 1.0, "away": 1.0})
    for number in (20, 21):
        known = following_standings(known, number, {"a": 1.0, "b": 1.0}, {"liar"})
    here = ["a", "b", "away", "liar", "new"]
    first = 22 + back
    assert credits(here, known, first) == dict(zip(here, (10, 10, 10, 0, 0), strict=True))
    if back in (0, FORGOTTEN_ROUNDS, 5000):  # in a shorter gap it passes as ever
        assert [sitting_out(known, first + more) for more in (0, 1)] == [{"liar"}] * 2
    for number in range(first, first + 3):  # and so they stand in the records after it
        before, heard = known, {"a": 1.0, "b": 1.0, "new": 1.0}
        known = following_standings(before, number, heard, ())
        assert follows(known, before, number, heard)
        credited = credits(here, known, number + 1)
        assert credited == dict(zip(here, (10, 10, 10, 0, number - first + 1), strict=True))
    assert not sitting_out(known, first + 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_record_says_who_voted_for_it(seed: int) -> None:
    """Whoever checks its certificate finds the voters of the group that made it, whatever was
    before: else all would refuse what was committed."""
    draw = random.Random(seed)
    known: Standings = ()
    number, peers = 0, [f"{place:03d}" for place in range(12)]
    for _ in range(60):
        number += draw.choice((1, 1, 1, 2, 40, FORGOTTEN_ROUNDS))
        members = draw.sample(peers, draw.randint(1, len(peers)))
        heard = {peer: draw.choice((0.0, 0.3, 1.0, 1.0)) for peer in members}
        left_out = [peer for peer in peers if peer not in members and draw.random() < 0.1]
        voted = voters(credits(members, known, number))
        known = following_standings(known, number, heard, left_out)
        assert voters_before(known, heard) == voted


def test_a_crowd_of_fresh_keys_neither_weighs_nor_states_for_those_who_vote() -> None:
    honest, crowd = dict.fromkeys("abc", 100), {f"fresh {place}": 1 for place in range(50)}
    credited = dict.fromkeys(honest, 10) | dict.fromkeys(crowd, 0)
    weight = bounded_weights(honest | crowd, credited)
    assert {weight[peer] for peer in honest} == {100 * 11}
    most = most_tokens(honest | crowd, voters(credited), 10**6)
    assert {most[peer] for peer in honest} == {MOST_TOKENS * 100}
    assert most_tokens(honest | crowd, voters(credited), 300)["a"] == 300


@pytest.mark.parametrize("count", [1, 2, 20])
def test_all_who_have_no_vote_are_together_believed_what_the_voters_learnt(count: int) -> None:
    """Eight times what one of those learnt of each would bring the run's end near."""
    honest = {"a": 100, "b": 80, "c": 5000}
    crowd = {f"fresh {place}": 10**6 for place in range(count)}
    most = most_tokens(honest | crowd, honest.keys(), 10**9)
    believed = {peer: min(tokens, most[peer]) for peer, tokens in (honest | crowd).items()}
    assert most_tokens(believed, honest.keys(), 10**9) == most  # what a record says holds again
    assert believed["c"] == MOST_TOKENS * 100
    learnt = 100 + 80 + believed["c"]
    total = sum(believed[peer] for peer in crowd)
    assert total == believed["c"] if count == 1 else learnt - count < total <= learnt
    assert most_tokens(dict.fromkeys(honest, 1) | crowd, honest.keys(), 10**9)["fresh 0"] >= 1


# ---- probation -----------------------------------------------------------------------------------
def test_who_states_ten_times_the_tokens_counts_twice_at_most() -> None:
    stated = {"a": 1000, "b": 100, "c": 90, "d": 110}
    assert bounded_weights(stated, {}) == {"a": 210, "b": 100, "c": 90, "d": 110}
    assert bounded_weights({"a": 7}, {}) == {"a": 7}


def test_all_that_begin_together_count_alike_at_every_time() -> None:
    tokens = dict.fromkeys("abcd", 100)
    for rounds in (0, 1, 5, 20):
        known = after(rounds, heard=dict.fromkeys("abcd", 1.0))
        weight = bounded_weights(tokens, credits(tokens, known, rounds))
        assert len(set(weight.values())) == 1


def test_a_fresh_key_counts_more_with_each_round_and_in_full_after_ten() -> None:
    known = after(20, heard=dict.fromkeys("abc", 1.0))
    shares: list[float] = []
    for number in range(20, 31):
        weight = bounded_weights(dict.fromkeys("abcd", 100), credits("abcd", known, number))
        shares.append(weight["d"] / weight["a"])
        known = following_standings(known, number, dict.fromkeys("abcd", 1.0), ())
    assert shares == [(1 + rounds) / 11 for rounds in range(11)]


def test_who_is_not_heard_gains_nothing() -> None:
    known = after(20, heard={"a": 1.0, "d": 0.0})
    assert {each.peer: each.credited for each in known} == {"a": 10, "d": 0}


@pytest.mark.parametrize("sybils", [1, 2, 10, 100])
def test_all_fresh_keys_together_are_at_most_a_third(sybils: int) -> None:
    known = after(20, heard=dict.fromkeys("abc", 1.0))
    fresh = [f"sybil {place}" for place in range(sybils)]
    for rounds in range(10):
        tokens = dict.fromkeys("abc", 50) | dict.fromkeys(fresh, 99)
        weight = bounded_weights(tokens, credits(tokens, known, 20 + rounds))
        share = sum(weight[peer] for peer in fresh) / sum(weight.values())
        assert share <= 1 / 3 + 1e-9
        heard = dict.fromkeys([*"abc", *fresh], 1.0)
        known = following_standings(known, 20 + rounds, heard, ())


def test_who_was_away_for_long_is_fresh_again_and_not_before() -> None:
    known = after(20, heard={"a": 1.0, "b": 1.0})
    for number in range(20, 120):
        known = following_standings(known, number, {"b": 1.0}, ())
    assert {each.peer for each in known} == {"a", "b"}
    assert {each.peer for each in following_standings(known, 120, {"b": 1.0}, ())} == {"b"}
