"""The vote under every pattern of lost votes, the exclusion, who may start and who alone."""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import combinations, permutations, product

import pytest

from dilocox.peer.rounds.vote_count import (
    AloneWatch,
    Decision,
    Verdict,
    Vote,
    decide,
    exclusion,
    may_start,
)
from tests.sweeps import sweep

D1, D2 = "1" * 64, "2" * 64
MANY = "abcdefghij"  # who vote
COMMITTED, VOID, UNDECIDED = Verdict.COMMITTED, Verdict.VOID, Verdict.UNDECIDED


def members_of(size: int) -> tuple[str, ...]:
    return tuple("abcdefgh"[:size])


def votes_of(choices: str) -> list[Vote]:
    """One vote a letter: 1 and 2 for a digest, x to abort, - for none."""
    digests = {"1": D1, "2": D2, "x": None}
    return [
        Vote(voter=voter, digest=digests[choice])
        for voter, choice in zip("abcdefgh", choices, strict=False)
        if choice != "-"
    ]


# ---- the majority ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "choices, verdict",
    [
        ("1", COMMITTED),
        ("x", VOID),
        ("-", UNDECIDED),
        ("11", COMMITTED),
        ("1-", UNDECIDED),  # the dead count: one of two is not more than half
        ("1x", VOID),
        ("12", UNDECIDED),
        ("11-", COMMITTED),
        ("1--", UNDECIDED),
        ("12x", UNDECIDED),
        ("1122", UNDECIDED),
        ("112x", UNDECIDED),
        ("111x", COMMITTED),
        ("11xx", VOID),
        ("--xx", VOID),
        ("11111---", COMMITTED),
        ("1111xxx-", UNDECIDED),
        ("1111xxxx", VOID),
    ],
)
def test_small_groups_by_hand(choices: str, verdict: Verdict) -> None:
    decision = decide(members_of(len(choices)), votes_of(choices))
    assert decision == Decision(verdict=verdict, digest=D1 if verdict is COMMITTED else None)


def test_votes_of_strangers_and_repeated_votes_do_not_count() -> None:
    votes = [*votes_of("1-----"), *votes_of("1"), Vote(voter="z", digest=D1)]
    assert decide(("a", "b", "c"), votes).verdict is UNDECIDED


def test_two_different_votes_of_one_member_count_for_neither_in_any_order() -> None:
    votes = [*votes_of("11x"), Vote(voter="b", digest=None)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [3, 0, 1, 2]):
        assert decide("abc", [votes[index] for index in order]).verdict is UNDECIDED
    votes = [*votes_of("11-"), Vote(voter="b", digest=D2)]
    assert decide("abc", votes).verdict is UNDECIDED


# ---- all cut patterns --------------------------------------------------------------------------
@cache
def verdict_of(seen: str) -> Verdict:
    return decide(members_of(len(seen)), votes_of(seen)).verdict


def verdicts_under(cast: str, lost: frozenset[tuple[int, int]]) -> set[Verdict]:
    """What the members that cast a vote decide, each from its own and those not lost on the way."""
    return {
        verdict_of(
            "".join("-" if (voter, reader) in lost else cast[voter] for voter in range(len(cast)))
        )
        for reader in range(len(cast))
        if cast[reader] != "-"
    }


def patterns(size: int, *, one_way: bool) -> list[frozenset[tuple[int, int]]]:
    """Every set of lost directions; without `one_way` a link loses both or none."""
    pairs = list(combinations(range(size), 2))
    cuts = (
        [[pair] for pair in permutations(range(size), 2)]
        if one_way
        else [[p, p[::-1]] for p in pairs]
    )
    return [
        frozenset(way for cut in chosen for way in cut)
        for count in range(len(cuts) + 1)
        for chosen in combinations(cuts, count)
    ]


@pytest.mark.parametrize(
    "size, one_way, cases",
    sweep([(3, False, 8), (3, True, 64), (4, False, 64), (4, True, 4096)], 3),
)
def test_no_cut_pattern_commits_on_one_member_and_voids_on_another(
    size: int, one_way: bool, cases: int
) -> None:
    lost_patterns = patterns(size, one_way=one_way)
    assert len(lost_patterns) == cases
    for cast in {"".join(sorted(cast)) for cast in product("12x-", repeat=size)}:
        for lost in lost_patterns:  # all patterns stand for all orders of the same votes
            assert not {COMMITTED, VOID} <= verdicts_under(cast, lost)


# ---- whom a retry leaves out -------------------------------------------------------------------
def abort(voter: str, *missed: str) -> Vote:
    return Vote(voter=voter, digest=None, missed=missed)


@pytest.mark.parametrize(
    "aborts, silent, left_out",
    [
        ([], [], ()),
        ([abort("a")], [], ()),  # it aborted and blames nobody
        ([abort("a", "c"), abort("b", "c")], ["c"], ("c",)),
        ([abort("a", "b")], [], ("b",)),  # a tie: the larger id
        ([abort("b", "a")], [], ("b",)),
        ([abort("b", "a")], ["a"], ("a",)),  # a tie: the silent one
        ([abort("c", "a", "b"), abort("a", "c")], [], ("c",)),  # one covers all
        ([abort("a", "b"), abort("c", "d")], [], ("b", "d")),
        ([abort("a", "b"), abort("c", "d")], ["a"], ("a", "d")),
        ([abort("a", "b", "c"), abort("b", "c")], [], ("b", "c")),
    ],
)
def test_exclusion_is_the_smallest_cover_silent_first_then_larger_ids(
    aborts: list[Vote], silent: list[str], left_out: tuple[str, ...]
) -> None:
    assert exclusion(aborts, silent, MANY) == left_out


def test_votes_for_a_digest_blame_nobody() -> None:
    assert exclusion([Vote(voter="a", digest=D1, missed=("b",))], [], MANY) == ()


def test_exclusion_depends_neither_on_the_order_nor_on_repeats() -> None:
    aborts = [abort("a", "b", "e"), abort("c", "d"), abort("d", "a"), abort("e", "b")]
    expected = exclusion(aborts, ["e"], MANY)
    for seed in range(20):
        shuffled = random.Random(seed).sample(aborts * 2, k=2 * len(aborts))
        assert exclusion(shuffled, ["e"], MANY) == expected


@pytest.mark.parametrize("seed", range(30))
def test_exclusion_is_a_smallest_cover_for_up_to_twelve_peers(seed: int) -> None:
    chance = random.Random(seed)
    peers = [f"p{index:02d}" for index in range(chance.randint(2, 12))]
    pairs = {tuple(chance.sample(peers, 2)) for _ in range(chance.randint(1, 25))}
    left_out = set(exclusion([abort(voter, missed) for voter, missed in pairs], [], peers))
    assert all(left_out & set(pair) for pair in pairs)
    smaller = combinations(peers, len(left_out) - 1)
    assert not any(all(set(few) & set(pair) for pair in pairs) for few in smaller)


def test_exclusion_finds_the_few_to_blame_in_a_large_group_exactly() -> None:
    peers = [f"p{index:03d}" for index in range(60)]
    aborts = [abort(peer, "p007", "p031") for peer in peers if peer not in ("p007", "p031")]
    assert exclusion(aborts, [], peers) == ("p007", "p031")


def test_exclusion_of_a_large_group_in_pieces_is_bounded_and_still_covers() -> None:
    chance = random.Random(5)
    peers = [f"p{index:03d}" for index in range(64)]
    aborts = [abort(peer, *chance.sample(peers, 6)) for peer in peers]
    started = time.process_time()
    left_out = set(exclusion(aborts, peers[:5], peers))
    assert time.process_time() - started < 10  # and not 2 ** 64 sets
    assert all(vote.voter in left_out or set(vote.missed) <= left_out for vote in aborts)
    assert len(left_out) < len(peers)


@pytest.mark.parametrize("voters", ["a", "ab", "abcd"])
def test_a_crowd_without_votes_is_left_out_and_not_the_fewer_who_missed_it(voters: str) -> None:
    """Six silent keys, which cost nothing, beside four members: the four were the smaller set."""
    crowd = [f"key {number}" for number in range(6)]
    aborts = [abort(voter, *crowd) for voter in voters]
    assert exclusion(aborts, crowd, voters) == tuple(crowd)
    with_one_of_them = [abort(voter, *crowd, "e") for voter in voters]
    assert exclusion(with_one_of_them, [*crowd, "e"], f"{voters}e") == ("e", *crowd)
    told = [abort("a", *crowd, "b"), abort("c", "a"), abort("d", "a")]
    assert exclusion(told, [], "abcd") == ("a",), "nobody else missed the crowd"
    sound_to_others = [abort(voter, "all", f"1 to {voter}", f"2 to {voter}") for voter in voters]
    if len(voters) > 1:
        assert exclusion(sound_to_others, [], voters) == ("all",), "the others void nothing"


# ---- who must be there -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "group, counted, contributors, starts",
    [
        ("ab", "abc", "", True),  # record -1: two of three counted
        ("a", "abc", "", False),
        ("ab", "abcd", "", False),  # half is not more than half
        ("abc", "abcd", "", True),
        ("a", "a", "", True),
        ("ab", "abcd", "abc", True),  # two of three contributors
        ("ad", "abcd", "abc", False),
        ("ab", "abde", "abc", True),  # c is gone: both of the two that are left
        ("ad", "abde", "abc", False),
        ("de", "def", "abc", True),  # all contributors are gone: more than half of all
        ("d", "def", "abc", False),
        ("", "abc", "", False),
    ],
)
def test_group_starts_with_more_than_half_of_the_recent_voters(
    group: str, counted: str, contributors: str, starts: bool
) -> None:
    views = {member: set(counted) for member in group}
    assert may_start(group, views, contributors) is starts


def test_one_member_whose_view_is_not_satisfied_stops_the_group() -> None:
    views = {"a": set("ab"), "b": set("abcd")}
    assert not may_start("ab", views, "")
    assert not may_start("ab", views, "abcd")
    assert may_start("ab", views | {"b": set("ab")}, "")
    assert not may_start("ab", {"a": set("ab")}, "")  # b says nothing


@pytest.mark.parametrize("last", ["", "abc", "abcl", "abclxy", "xyz"])
@pytest.mark.parametrize("counts", ["uvwxyz", "l", "xyz", "lxyzuvw", "abclxyzuvw"])
def test_one_member_that_counts_whom_it_likes_stops_no_group_of_most(
    last: str, counts: str
) -> None:
    """x, y and z are gone, u, v and w have never been."""
    views: dict[str, set[str]] = {member: set("abcl") for member in "abc"}
    assert may_start("abcl", views | {"l": set(counts)}, last)


@pytest.mark.parametrize("here", ["ab", "abc"])
def test_who_is_new_stops_nobody_and_one_of_three_neither(here: str) -> None:
    """x, y and z of the last record are gone: one fresh key had each group wait for them."""
    views: dict[str, set[str]] = {member: set(here) | {"l"} for member in here}
    assert may_start(f"{here}l", views | {"l": set("abcxyzl")}, f"{here}xyz")
    told = views | {"l": set("l"), "a": set("abcxyzl")}
    assert may_start(f"{here}l", told, f"{here}xyz") is (len(here) == 3), "half may be right"


def test_two_disjoint_groups_with_one_view_never_both_start() -> None:
    everyone = "abcde"
    for contributors in ("", "abc", "abcde", "ab"):
        view = {member: set(everyone) for member in everyone}
        groups = ["".join(g) for n in range(1, 6) for g in combinations(everyone, n)]
        started = [set(g) for g in groups if may_start(g, view, contributors)]
        assert started
        assert all(left & right for left, right in combinations(started, 2))


# ---- alone -------------------------------------------------------------------------------------
def watch(*observations: tuple[float, int, bool]) -> AloneWatch:
    alone = AloneWatch(record_lifetime_s=15, heartbeat_s=5)
    for now_s, others, answered in observations:
        alone.observe(now_s, others_in_view=others, bootstrap_answered=answered)
    return alone


def test_alone_for_a_record_lifetime_may_commit() -> None:
    steps = [(time_s, 0, True) for time_s in (0.0, 5.0, 10.0, 15.0)]
    assert not watch().may_commit(1e6), "before any observation"
    assert not watch(*steps[:3]).may_commit(14.9)
    assert watch(*steps).may_commit(15)


def test_another_peer_in_view_or_a_silent_bootstrap_starts_the_wait_anew() -> None:
    alone = watch(*[(5.0 * n, int(n == 2), True) for n in range(6)])
    assert not alone.may_commit(25)  # alone since 15 only
    alone.observe(30, others_in_view=0, bootstrap_answered=True)
    assert alone.may_commit(30)
    assert not watch(*[(5.0 * n, 0, n != 3) for n in range(5)]).may_commit(20)


def test_freeze_of_two_heartbeats_starts_the_wait_anew() -> None:
    alone = watch(*[(5.0 * n, 0, True) for n in range(4)])
    assert alone.may_commit(15)
    assert not alone.may_commit(25)  # frozen for ten seconds: what it saw is stale
    alone.observe(25, others_in_view=0, bootstrap_answered=True)
    assert not alone.may_commit(25)
    for time_s in (30, 35):
        alone.observe(time_s, others_in_view=0, bootstrap_answered=True)
    assert not alone.may_commit(35)
    alone.observe(40, others_in_view=0, bootstrap_answered=True)
    assert alone.may_commit(40)
