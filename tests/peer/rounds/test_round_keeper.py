"""The keeper of a peer's round: when a head rings, and when heads, members and spares send."""

from __future__ import annotations

import pytest

from dilocox.dht.records import MAX_INDEX, BellRecord, ReplicaRecord, bell_key, parse_key
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.rounds.round_end import NEW_SHARE, NOTICE_S, RoundKeeper
from tests.clocks import TestClock
from tests.pipeline.swarms import bell_record, replica_record

VIEW = SwarmView(me="me")
NOW = 100.0
MEETING_S = 5.5


def keeper_of(clock: TestClock | None = None, *, first: int = 0) -> RoundKeeper:
    return RoundKeeper("me", clock or TestClock(), meeting_s=MEETING_S, first=first)


def replica(inner_step: int, *members: str) -> ReplicaRecord:
    return replica_record(members=members, inner_step=inner_step, step_s=0.1)


def follow(
    keeper: RoundKeeper,
    inner_step: int,
    view: SwarmView = VIEW,
    *,
    undecided: bool = False,
    now: float = NOW,
) -> bool:
    """Whether the head has rung after another look."""
    own = replica(inner_step)
    keeper.follow(view, own, now, head="me", inner_steps=10, tokens=1, undecided=undecided)
    return bool(keeper.bells)


# ---- where others lead ---------------------------------------------------------------------------
def heads_in(**rounds: int) -> dict[str, ReplicaRecord]:
    return {name: replica_record(members=(name,), round=number) for name, number in rounds.items()}


def test_one_head_alone_leads_nobody_to_a_far_round_and_half_of_them_do() -> None:
    keeper = keeper_of()
    heads = heads_in(me=0, a=0, b=0, c=0)
    far = {64: {"a": bell_record(NOW, (NOW, NOW), number=64)}}
    liar = SwarmView(me="me", replicas=heads | heads_in(a=64), bells=far)
    follow(keeper, 5, liar)
    assert keeper.round == 0
    assert keeper.send_due(NOW) is None
    follow(keeper, 5, SwarmView(me="me", replicas=heads | heads_in(a=64, b=64), bells=far))
    assert keeper.round == 64


def test_a_bell_of_the_next_round_is_believed_as_soon_as_half_have_rung_this_one() -> None:
    keeper = keeper_of()
    heads = heads_in(me=0, a=0, b=0, c=0)
    bells = {1: {"a": bell_record(NOW, number=1)}}
    follow(keeper, 5, SwarmView(me="me", replicas=heads, bells=bells))
    assert keeper.round == 0
    bells[0] = {"b": bell_record(NOW)}
    follow(keeper, 5, SwarmView(me="me", replicas=heads, bells=bells))
    assert keeper.round == 1


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_of_two_heads_that_are_rounds_apart_the_one_behind_goes_on(ahead: int) -> None:
    """One had been away while the other committed alone: they waited for each other for ever."""
    keeper = keeper_of()
    bells = {ahead: {"a": bell_record(NOW, number=ahead)}}
    follow(keeper, 5, SwarmView(me="me", replicas=heads_in(me=0, a=ahead), bells=bells))
    assert keeper.round == ahead


def test_a_time_counts_once_half_have_rung_and_not_before_the_last_of_them() -> None:
    def due(bells: dict[str, BellRecord], head: str = "me", inner_step: int = 9) -> bool:
        keeper = keeper_of()
        view = SwarmView(me="me", replicas=heads_in(me=0, a=0, b=0, c=0), bells={0: bells})
        own = replica(inner_step) if head == "me" else None
        keeper.follow(view, own, NOW, head=head, inner_steps=99, tokens=1, undecided=False)
        return keeper.send_due(NOW) is not None

    early = bell_record(NOW - 50.0, (NOW - 50.0, NOW - 50.0))
    assert not due({"a": early}), "one of four"
    assert not due({"a": early, "b": bell_record(NOW)}), "two could not meet before the second rang"
    assert due({"a": bell_record(NOW - 50.0, (NOW, NOW)), "b": bell_record(NOW - 1.0)})
    assert due({"a": early}, head="a"), "what one's own head says"


@pytest.mark.parametrize("beginning", [True, False])
def test_heads_that_never_ring_keep_nobody_from_the_first_round(beginning: bool) -> None:
    crowd = heads_in(a=0, **{f"fresh{number}": 0 for number in range(50)})
    view = SwarmView(me="me", replicas=crowd, bells={0: {"a": bell_record(NOW - 1.0)}})
    keeper = keeper_of(TestClock())

    def due(now: float) -> bool:
        keeper.follow(
            view,
            replica(10),
            now,
            head="me",
            beginning=beginning,
            inner_steps=10,
            tokens=1,
            undecided=False,
        )
        return keeper.send_due(now) is not None

    assert not due(NOW)
    assert due(NOW + 1e4) is beginning


def test_who_does_not_count_yet_meets_with_those_who_do_and_holds_nobody_up() -> None:
    """With a quorum of its own it met earlier than the others in every round, and was in none."""
    counting = frozenset("ab")
    everybody = heads_in(me=0, a=0, b=0) | {
        "x": replica_record(members=("x",), step_s=1e6, hear_s=1e6)
    }
    keeper = keeper_of()

    def due(**bells: BellRecord) -> bool:
        view = SwarmView(me="me", replicas=everybody, bells={0: bells})
        keeper.follow(
            view,
            replica(10),
            NOW,
            head="me",
            heads=counting,
            inner_steps=10,
            tokens=1,
            undecided=False,
        )
        return keeper.send_due(NOW) is not None

    assert not due(a=bell_record(NOW)) and keeper.bells, "it has rung, and of two one"
    assert keeper.bells[0].scheduled_at is None
    assert due(a=bell_record(NOW), b=bell_record(NOW, (NOW, NOW + 9.0)))
    assert keeper.meets_at(0) == NOW + 9.0


@pytest.mark.parametrize("stated_s", [1.0, 1e6])
def test_for_a_new_and_slow_head_a_share_of_the_round_is_waited_and_no_more(
    stated_s: float,
) -> None:
    new = replica_record(members=("x",), step_s=stated_s, hear_s=stated_s)
    clock = TestClock()
    keeper = keeper_of(clock)
    clock.now += 100.0  # so long the round took this head, too
    bells = {0: {"a": bell_record(NOW, round_s=100.0)}}
    view = SwarmView(me="me", replicas=heads_in(me=0, a=0) | {"x": new}, bells=bells)
    keeper.follow(
        view,
        replica(10),
        NOW,
        head="me",
        heads=frozenset({"me", "a"}),
        inner_steps=10,
        tokens=1,
        undecided=False,
    )
    usual = NOW + 0.1 + NOTICE_S
    extra = 2 * NEW_SHARE * 100.0
    at = keeper.meets_at(0)
    assert at is not None and usual <= at <= usual + extra


# ---- heads ---------------------------------------------------------------------------------------
def test_a_head_rings_after_its_inner_steps() -> None:
    keeper = keeper_of()
    assert not follow(keeper, 9)
    assert follow(keeper, 10)


def test_a_head_does_not_ring_while_its_last_send_is_undecided() -> None:
    keeper = keeper_of()
    assert not follow(keeper, 25, undecided=True)
    assert follow(keeper, 26)


def test_a_send_that_becomes_undecided_does_not_take_a_bell_back() -> None:
    keeper = keeper_of()
    assert follow(keeper, 10)
    assert follow(keeper, 11, undecided=True)


def test_a_head_that_has_rung_sends_once_the_time_of_the_group_is_known() -> None:
    keeper = keeper_of()
    two = {"me": replica(10), "other": replica(5)}
    view = SwarmView(me="me", replicas=two)
    follow(keeper, 10, view)
    assert keeper.bells
    assert keeper.send_due(NOW) is None  # of two, two make the quorum
    late = SwarmView(
        me="me", replicas=two, bells={0: {"other": bell_record(NOW, (NOW + 9, NOW + 12))}}
    )
    follow(keeper, 11, late)
    assert keeper.send_due(NOW) is not None


def test_the_group_of_a_round_that_was_left_may_meet_as_long_as_one_can_form() -> None:
    keeper = keeper_of()
    follow(keeper, 10)  # alone it rings, and the time is known
    number, scheduled_at = keeper.send_due(NOW) or pytest.fail("no time")
    assert not keeper.may_meet(after=number - 1), "it has not sent in it"
    keeper.end(number)
    assert keeper.may_meet(after=number - 1)
    assert not keeper.may_meet(after=number), "whose anchor is of that round has sent"
    follow(keeper, 0, now=scheduled_at + MEETING_S - 0.1)
    assert keeper.may_meet(after=number - 1)
    follow(keeper, 0, now=scheduled_at + MEETING_S + 0.1)
    assert not keeper.may_meet(after=number - 1)


# ---- who leads nothing ---------------------------------------------------------------------------
HEADS = {"h": replica(10, "h", "me"), "g": replica(7, "g", "a"), "f": replica(7, "f", "b")}
TIMES = (NOW + 10, NOW + 20)


def look(keeper: RoundKeeper, head: str, bells: dict[str, BellRecord]) -> bool:
    """One look of a peer that is no head, in the replica of `head` or in none; "f" has rung."""
    bells = {"f": bell_record(NOW)} | bells
    view = SwarmView(me="me", replicas=HEADS, bells={0: bells})
    # more inner steps than a round has, and tokens: a head would ring
    return keeper.follow(view, None, NOW, head=head, inner_steps=1, tokens=99, undecided=False)


@pytest.mark.parametrize("head", ["", "h"])
def test_who_leads_no_replica_never_rings(head: str) -> None:
    keeper = keeper_of()
    assert not look(keeper, head, {})
    assert not look(keeper, head, {"h": bell_record(NOW), "g": bell_record(NOW)})
    assert not keeper.bells


def test_a_member_sends_when_its_head_has_rung_and_the_group_has_a_time() -> None:
    keeper = keeper_of()
    look(keeper, "h", {"h": bell_record(NOW)})
    assert keeper.send_due(NOW) is None  # no time yet
    look(keeper, "h", {"h": bell_record(NOW), "g": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) == (0, TIMES[1])


def test_a_member_whose_head_is_late_sends_only_at_the_end_of_the_grace() -> None:
    keeper = keeper_of()
    look(keeper, "h", {"g": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) is None
    assert keeper.send_due(TIMES[0] - 0.1) is None
    assert keeper.send_due(TIMES[0]) == (0, TIMES[1])


def test_a_peer_in_no_replica_sends_as_soon_as_the_time_is_known() -> None:
    keeper = keeper_of()
    look(keeper, "", {"h": bell_record(NOW)})
    assert keeper.send_due(NOW) is None
    look(keeper, "", {"h": bell_record(NOW), "g": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) == (0, TIMES[1])


def test_a_member_that_lost_its_replica_waits_for_no_heads_bell() -> None:
    keeper = keeper_of()
    look(keeper, "h", {"g": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) is None
    look(keeper, "", {"g": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) == (0, TIMES[1])


@pytest.mark.parametrize(
    ("replicas", "tokens", "stopped", "rings"),
    [
        ({}, 99, True, True),
        ({}, 99, False, False),  # somebody will recruit it
        ({}, 0, True, False),  # it has nothing to send
        (HEADS, 99, True, False),  # these ring
    ],
)
def test_in_a_run_that_is_ended_who_is_left_with_something_rings(
    replicas: dict[str, ReplicaRecord], tokens: int, stopped: bool, rings: bool
) -> None:
    """A member that heard of the end later than its head waited for half an hour, for nobody."""
    keeper, view = keeper_of(), SwarmView(me="me", replicas=replicas)
    keeper.follow(
        view,
        None,
        NOW,
        head="",
        inner_steps=None,
        tokens=tokens,
        undecided=False,
        stopped=stopped,
    )
    assert (keeper.send_due(NOW) is not None) is rings


def test_in_the_next_round_the_bells_of_the_last_one_are_forgotten() -> None:
    keeper = keeper_of()
    look(keeper, "h", {"h": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW) is not None
    keeper.end(0)
    assert keeper.round == 1
    assert keeper.send_due(NOW + 1000) is None
    look(keeper, "h", {"h": bell_record(NOW, TIMES)})
    assert keeper.send_due(NOW + 1000) is None


@pytest.mark.parametrize("stale", [True, False])
def test_a_head_that_has_rung_and_lost_its_replica_keeps_its_appointment(stale: bool) -> None:
    keeper = keeper_of()
    replicas = {"me": replica(10, "me", "gone")}
    view = SwarmView(me="me", replicas=replicas)
    keeper.follow(view, replicas["me"], NOW, head="me", inner_steps=10, tokens=1, undecided=False)
    due = keeper.send_due(NOW)
    assert due is not None
    after = SwarmView(me="me", replicas=replicas if stale else {})  # until its record expires
    keeper.follow(after, None, NOW + 1, head="", inner_steps=10, tokens=1, undecided=False)
    assert keeper.send_due(NOW + 1) == due


# ---- what lasts longer than a record in the DHT -------------------------------------------------
def long_rounds(times: tuple[float, float]) -> dict[str, BellRecord]:
    """Of an hour; one bell has the times."""
    return {"f": bell_record(NOW, round_s=3600.0), "g": bell_record(NOW, times, round_s=3600.0)}


def test_the_time_of_a_group_stands_though_the_bell_that_told_it_has_expired() -> None:
    """A round of an hour has a grace of fifteen minutes, and its bells live for half a minute."""
    keeper = keeper_of()
    far = (NOW + 600, NOW + 640)
    look(keeper, "h", long_rounds(far))
    look(keeper, "h", {})
    assert keeper.send_due(NOW + 599) is None
    assert keeper.send_due(NOW + 600) == (0, far[1])


def test_a_bell_that_has_expired_still_counts_for_the_quorum() -> None:
    keeper = keeper_of()
    two = {"me": replica(10), "other": replica(5)}
    view = SwarmView(me="me", replicas=two, bells={0: {"other": bell_record(NOW)}})
    follow(keeper, 5, view)
    view = SwarmView(me="me", replicas=two)
    follow(keeper, 10, view)
    assert keeper.send_due(NOW) is not None


def test_a_head_that_has_gone_on_keeps_its_bell_alive_until_the_group_has_met() -> None:
    keeper = keeper_of()
    three = {"me": replica(10), "other": replica(5), "slow": replica(1)}
    view = SwarmView(me="me", replicas=three, bells={0: {"other": bell_record(NOW)}})
    follow(keeper, 10, view)
    due = keeper.send_due(NOW)
    assert due is not None
    keeper.end(0)
    for now in (NOW + 1, due[1], due[1] + MEETING_S):
        assert not follow(keeper, 0, undecided=True, now=now) or keeper.round == 1
        assert [each.round for each in keeper.bells] == [0]
        assert 0 in keeper.wanted_bells(view), "the group's time may yet become an earlier one"
    follow(keeper, 0, undecided=True, now=due[1] + MEETING_S + 0.1)
    assert not keeper.bells


def test_who_has_sent_hears_that_its_group_meets_earlier() -> None:
    keeper = keeper_of()
    look(keeper, "", long_rounds((NOW + 100, NOW + 200)))
    keeper.end(0)
    assert keeper.meets_at(0) == NOW + 200
    look(keeper, "", long_rounds((NOW + 20, NOW + 50)))
    assert keeper.meets_at(0) == NOW + 50
    look(keeper, "", long_rounds((NOW + 100, NOW + 300)))
    assert keeper.meets_at(0) == NOW + 50


def test_a_head_tells_the_time_that_another_one_found() -> None:
    """Should that one be gone, those who have not heard it learn it from here."""
    keeper = keeper_of()
    two = {"me": replica(10), "other": replica(10)}
    view = SwarmView(
        me="me", replicas=two, bells={0: {"other": bell_record(NOW, (NOW + 1, NOW + 2))}}
    )
    follow(keeper, 10, view)
    assert [each.scheduled_at for each in keeper.bells] == [NOW + 2]


# ---- how often bells are looked for --------------------------------------------------------------
@pytest.mark.parametrize(
    ("round_s", "look_s"), [(5.0, 1.0), (60.0, 1.875), (600.0, 18.75), (3600.0, 60.0)]
)
def test_bells_are_looked_for_in_the_measure_of_a_round(round_s: float, look_s: float) -> None:
    clock = TestClock()
    keeper = keeper_of(clock)
    assert keeper.look_s() == 1.0
    clock.now += round_s
    assert keeper.look_s() == look_s
    assert look_s <= max(1.0, 0.25 * round_s / 4), "three quarters of a grace are left"
    keeper.end(0)
    assert keeper.look_s() == look_s, "the next round will be about as long"


def test_a_run_that_rests_is_not_listened_to_for_bells() -> None:
    clock = TestClock()
    keeper = keeper_of(clock)
    clock.now += 160.0
    assert follow(keeper, 10), "it rang before the pause"
    assert keeper.look_s(resting=True) == float("inf")


# ---- which round ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("own", "rung", "now_in"),
    [
        (3, None, 3),
        (3, 3, 3),  # the bell of its own round
        (3, 5, 5),  # one bell 5 proves that bell 4 reached its quorum: skip
        (6, 4, 6),  # never back
    ],
)
def test_a_replica_follows_the_bells_to_a_later_round(
    own: int, rung: int | None, now_in: int
) -> None:
    keeper = keeper_of(first=own)
    bells = {} if rung is None else {rung: {"other": bell_record(NOW, number=rung)}}
    follow(keeper, 0, SwarmView(me="me", bells=bells))
    assert keeper.round == now_in


def follow_records(
    keeper: RoundKeeper, view: SwarmView, *, inner_step: int = 10, run_record: int, now: float = NOW
) -> None:
    keeper.follow(
        view,
        replica(inner_step),
        now,
        head="me",
        last_record=3,
        run_record=run_record,
        inner_steps=10,
        tokens=1,
        undecided=False,
    )


@pytest.mark.parametrize(("run_record", "number"), [(2, 4), (3, 4), (9, 10), (2**53 - 1, 68)])
def test_a_record_leads_to_the_round_after_it_and_none_beyond_all_numbers(
    run_record: int, number: int
) -> None:
    clock, view = TestClock(), SwarmView(me="me", replicas=heads_in(me=4, a=4, b=4))
    keeper = keeper_of(clock, first=4)
    clock.now += 60.0
    for _ in range(3):
        follow_records(keeper, view, run_record=run_record)
    assert keeper.round == number
    (bell,) = keeper.bells
    assert bell.round == number, "its inner steps count there"
    assert bell.round_s == 60.0, "and the time that they took"


def test_a_record_of_another_stage_leads_nobody_away_from_a_group_that_may_still_meet() -> None:
    keeper = keeper_of(first=4)
    follow(keeper, 10)  # alone it rings, and the time is known
    due = keeper.send_due(NOW) or pytest.fail("no time")
    meets_until = due[1] + MEETING_S
    follow_records(keeper, VIEW, run_record=4, now=meets_until - 0.1)
    assert keeper.send_due(NOW) == due
    follow_records(keeper, VIEW, inner_step=0, run_record=4, now=meets_until + 0.1)
    assert keeper.round == 5


def test_a_joiner_starts_in_the_current_round() -> None:
    def first(view: SwarmView, last_record: int = -1) -> int:
        keeper = keeper_of()
        keeper.start(view, last_record)
        return keeper.round

    stated = heads_in(a=4, b=4, c=5)
    rung = {4: {"a": bell_record(NOW, number=4)}}
    assert first(VIEW) == 0
    assert first(SwarmView(me="me", replicas=stated)) == 4, "one alone is not the run"
    assert first(SwarmView(me="me", replicas=stated, bells=rung)) == 5, "another one goes on, too"
    rung |= {number: {name: bell_record(NOW, number=number) for name in "ab"} for number in (5, 6)}
    assert first(SwarmView(me="me", replicas=stated, bells=rung)) == 6
    assert first(VIEW, last_record=8) == 9  # nobody trains: after the chain's last record


def test_after_a_rollback_no_round_number_comes_again_though_nobody_knows_it_any_more() -> None:
    keeper = keeper_of(first=25)  # its newest record from before was of round 24
    keeper.start(VIEW, last_record=1)
    assert keeper.round == 25
    keeper.end(25)
    keeper.start(VIEW, last_record=30)  # later it goes on from its chain, as ever
    assert keeper.round == 31


def test_a_peer_stays_in_the_last_round_that_a_bell_can_name() -> None:
    """Whatever record led it there: a bell of a later one could not be told."""
    keeper = keeper_of()
    keeper.start(VIEW, MAX_INDEX)
    keeper.end(keeper.round)
    assert follow(keeper, 10)
    assert [bell.round for bell in keeper.bells] == [MAX_INDEX]
    for number in keeper.wanted_bells(VIEW):
        parse_key(bell_key("f" * 32, number))
