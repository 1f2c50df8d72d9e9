"""Rounds, bells and common times, as small tables: a bell is (finish, how long the round took)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dilocox.dht.records import MAX_INDEX, BellRecord, ReplicaRecord, bell_key, parse_key
from dilocox.peer.rounds.round_end import (
    BELLS_READ,
    RoundView,
    Schedule,
    bells_to_read,
    newest_credible,
    waited_for,
)
from tests.pipeline.swarms import bell_record, replica_record

R = 7


def bell(
    finished_at: float, round_s: float = 40.0, times: tuple[float, float] | None = None
) -> BellRecord:
    return bell_record(finished_at, times, number=R, round_s=round_s)


def replica(step_s: float = 1.0, round_number: int = R) -> ReplicaRecord:
    return replica_record(members=("a",), round=round_number, step_s=step_s)


def view(
    bells: dict[str, BellRecord], heads: Iterable[str] = "abc", step_s: float = 1.0
) -> RoundView:
    return RoundView(round=R, bells=bells, replicas={head: replica(step_s) for head in heads})


# ---- the quorum --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "replicas, bells", [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4), (100, 50)]
)
def test_quorum_is_half_rounded_up_and_at_least_two_of_two(replicas: int, bells: int) -> None:
    heads = [str(number) for number in range(replicas)]
    seen = view({}, heads)
    for count in range(1, bells + 1):
        seen = replace(seen, bells={head: bell(100) for head in heads[:count]})
        assert seen.reached(110) == (count == bells)


def test_where_no_head_is_known_who_never_rings_is_waited_for_for_four_round_times() -> None:
    everybody = {"a", "b", "slow", *map(str, range(1000))}
    bells = {"a": bell(100, 40), "b": bell(105, 48)}

    def awaited(now_s: float, head: str = "a") -> set[str]:
        return waited_for(everybody, bells, head=head, now_s=now_s)

    assert awaited(297) == everybody
    assert awaited(298) == {"a", "b"}
    assert awaited(298, head="slow") == everybody, "it has not rung itself"
    # no single absurd statement decides
    for absurd in (bell(100, 1e9), bell(1, 0), bell(1e9, 40)):
        bells["c"] = absurd
        assert awaited(259) == everybody
        assert awaited(298) & {"a", "b", "slow"} == {"a", "b"}
    # nor does one for ever where it is one of two
    del bells["b"]
    bells["c"] = bell(100, 1e9)
    assert awaited(420) == everybody
    assert awaited(421) == {"a"}


def test_who_is_waited_for_no_longer_still_makes_its_inner_step() -> None:
    slow = replica(step_s=25.0)
    seen = replace(view({"a": bell(100, 40)}, heads="a"), silent=[slow])
    assert seen.proposal("a", 181) == Schedule(send_after=181, scheduled_at=208)


# ---- T_R ---------------------------------------------------------------------------------------
def test_t_r_is_the_quorums_finish_plus_grace_plus_longest_step_plus_notice() -> None:
    seen = view({"a": bell(100, 40), "b": bell(105, 48)}, heads="abcd", step_s=3)
    # the second finish 105, grace a quarter of 40 = 10, longest step 3, notice 2
    assert seen.proposal("b", 106) == Schedule(send_after=115, scheduled_at=120)


@pytest.mark.parametrize(
    ("heads", "finishes", "me", "now", "times"),
    [
        ("abcd", "abc", "c", 110, (115, 118)),  # a third bell does not move the quorum's finish
        ("abc", "abc", "c", 110, (110, 113)),  # all have rung: an inner step and two seconds later
        ("a", "a", "a", 100, (100, 103)),  # a single replica needs no grace
        ("abc", "ab", "a", 150, (115, 153)),  # who sees the quorum late still gives notice
    ],
)
def test_t_r_by_who_has_rung(
    heads: str, finishes: str, me: str, now: float, times: tuple[float, float]
) -> None:
    rung = dict(zip("abc", (bell(100), bell(105), bell(109)), strict=True))
    seen = view({head: rung[head] for head in finishes}, heads)
    assert seen.proposal(me, now) == Schedule(send_after=times[0], scheduled_at=times[1])


def test_last_bell_brings_t_r_forward_but_never_back() -> None:
    bells = {"a": bell(100, times=(110, 113)), "b": bell(101), "c": bell(102)}
    assert view(bells).proposal("c", 103) == Schedule(send_after=103, scheduled_at=106)
    assert view(bells).proposal("c", 112) is None  # 115 would be later than 113
    bells["c"] = bell(102, times=(103, 105))
    assert view(bells).proposal("a", 103.5) is None


def test_only_a_head_that_has_rung_writes_t_r() -> None:
    seen = view({"a": bell(100), "b": bell(105)})
    assert seen.proposal("c", 106) is None
    assert seen.proposal("a", 106) is not None


def test_nothing_is_proposed_before_the_quorum_or_where_t_r_stands() -> None:
    assert view({"a": bell(100)}).proposal("a", 101) is None
    stands = view({"a": bell(100, times=(115, 118)), "b": bell(105)}, heads="abcd")
    assert stands.proposal("b", 106) is None


def test_equal_finishes_need_no_order() -> None:
    left = view({"a": bell(100), "b": bell(100), "c": bell(100)}, heads="abcde")
    right = view({"c": bell(100), "b": bell(100), "a": bell(100)}, heads="edcba")
    assert left.proposal("a", 101) == right.proposal("c", 101)


# ---- the smallest T_R --------------------------------------------------------------------------
def test_all_use_the_smallest_t_r_and_of_equal_ones_the_earlier_end_of_grace() -> None:
    smallest = bell(101, times=(115, 118))
    for other in (bell(100, times=(116, 119)), bell(100, times=(116, 118))):
        seen = view({"a": other, "b": smallest, "c": bell(102)})
        for now in (110, 500):  # also in the past: it stands for those who are late
            assert seen.schedule(now) == Schedule(send_after=115, scheduled_at=118)


@pytest.mark.parametrize(
    "absurd",
    [
        bell(100, times=(90, 99)),  # before its own finish
        bell(100, times=(120, 118)),  # the grace ends after the group formed
        bell(100, times=(110, 200_000)),  # in two days
        bell(114, times=(1, 114)),  # a finish in the future, further than clocks may differ
        replace(bell(100, times=(115, 118)), round=R + 1),
        replace(bell(100, times=(115, 118)), send_after=None),
    ],
)
def test_absurd_times_do_not_count(absurd: BellRecord) -> None:
    honest = {"a": bell(105, times=(116, 119)), "c": bell(105)}
    assert view(honest | {"b": absurd}).schedule(110) == Schedule(send_after=116, scheduled_at=119)


def test_t_r_later_than_any_head_can_have_named_is_none_but_ones_own_head_s() -> None:
    """The others found it, named none of their own, and waited for the next day."""
    rung = {"b": bell(100)}
    # the grace is over at 110; an inner step of a round, 40 s, the longest notice, 20 s, and 3 s
    late = view(rung | {"a": bell(100, times=(110, 174))}, heads="abcd")
    assert late.schedule(110) is None
    assert late.proposal("b", 110) == Schedule(send_after=110, scheduled_at=113)
    assert late.schedule(111) is not None, "its head may have seen the quorum only now"
    assert view(rung | {"a": bell(100, times=(110, 173))}).schedule(110) is not None
    own = replace(view(rung | {"a": bell(100, times=(110, 86_510))}), head="a")
    assert own.schedule(110) is not None
    assert own.schedule(109) is None, "beyond the horizon"


def test_bell_from_the_future_counts_once_its_time_has_come() -> None:
    seen = view({"a": bell(100), "b": bell(120)})
    assert not seen.reached(116.9)
    assert seen.reached(117)  # clocks may be 3 s apart


def test_no_single_absurd_duration_delays_the_group() -> None:
    longest = {"a": bell(100, 1e12), "b": bell(105, 40)}
    assert view(longest).proposal("a", 106) == Schedule(send_after=115, scheduled_at=118)
    negative = {"a": bell(100, -1e12), "b": bell(105, 40)}
    assert view(negative).proposal("a", 106) == Schedule(send_after=105, scheduled_at=108)
    seen = view({"a": bell(100), "b": bell(105)}, step_s=1e12)  # counts as a round's time
    assert seen.proposal("a", 106) == Schedule(send_after=115, scheduled_at=157)


def test_where_all_state_absurd_durations_the_group_meets_within_the_horizon() -> None:
    seen = view({"a": bell(100, 1e12), "b": bell(105, 1e12)}, step_s=1e12)
    times = seen.proposal("a", 106)
    assert times is not None
    assert times.scheduled_at == 106 + 24 * 3600
    assert seen.schedule(106) is None
    told = replace(seen.bells["a"], **vars(times))
    assert view({"a": told, "b": seen.bells["b"]}).schedule(107)


# ---- which round -------------------------------------------------------------------------------
def test_bells_are_read_of_the_rounds_that_others_state_and_only_of_so_many() -> None:
    assert bells_to_read(3, []) == [4, 3]
    assert bells_to_read(3, [replica(round_number=3)]) == [4, 3]
    assert bells_to_read(3, [replica(round_number=9), replica(round_number=2)]) == [9, 8, 4, 3]
    many = [replica(round_number=10 * number) for number in range(1, 50)]
    assert len(bells_to_read(3, many)) == BELLS_READ
    assert bells_to_read(3, many)[-2:] == [4, 3]


def test_no_bell_is_looked_for_under_a_key_that_is_none() -> None:
    """Who was led to the last round that has a key ended with an error at its next look."""
    wanted = bells_to_read(MAX_INDEX, [replica(round_number=MAX_INDEX)])
    assert [parse_key(bell_key("f" * 32, number)).index for number in wanted] == [MAX_INDEX]


@pytest.mark.parametrize(
    ("own", "last_record", "stated", "newest"),
    [
        (7, 6, [], 6 + 64),  # so far ahead of the newest record others may be
        (7, 6, [9_999_999_999], 6 + 64),
        (7, 6, [2**53, 7, 8], 6 + 64),
        (0, 500, [503], 564),  # a joiner that has caught up
        (90, -1, [90, 91], 91),  # a swarm that trains without committing
        (0, -1, [500, 501, 502], 501),  # one that joins it
        (0, -1, [9_999_999_999] * 3, 99_999),  # a crowd of strangers is not believed in all
        (7, 6, [2**53] * 20, 100_006),
        (0, 9_999_999_990, [], 9_999_999_999),  # and no key has a larger one
    ],
)
def test_a_round_far_from_all_that_is_known_is_nobodys(
    own: int, last_record: int, stated: list[int], newest: int
) -> None:
    assert newest_credible(own, last_record, stated) == newest


@pytest.mark.parametrize(("hear_s", "notice_s"), [(0.0, 2.0), (1.5, 2.0), (7.0, 7.0), (1e9, 20.0)])
def test_the_notice_is_what_heads_state_of_their_hearing_within_bounds(
    hear_s: float, notice_s: float
) -> None:
    seen = view({"a": bell(100), "b": bell(101), "c": bell(102)})
    hears = replace(replica(), hear_s=hear_s)
    seen = replace(seen, replicas={**seen.replicas, "b": hears})
    assert seen.proposal("c", 102.5) == Schedule(
        send_after=102.5, scheduled_at=102.5 + 1.0 + notice_s
    )


def test_a_notice_of_a_minute_fits_into_a_round_of_an_hour() -> None:
    bells = {head: bell(100, round_s=3600.0) for head in "abc"}
    seen = view(bells)
    hears = replace(replica(), hear_s=63.0)
    seen = replace(seen, replicas={**seen.replicas, "b": hears})
    assert seen.proposal("c", 100) == Schedule(send_after=100, scheduled_at=164)
