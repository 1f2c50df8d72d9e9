"""The driver of a send, with an averaging process that does what a test says."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.averaging.matchmaking import MatchmakingException

from dilocox.dht.records import MAX_DECLARATION_LIFETIME_S
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import AveragerStuck
from dilocox.peer.averaging.driver import (
    FROZEN_S,
    STRAY_LIFETIMES,
    STUCK_VOIDS,
    TAKEN_S,
    ExchangeDriver,
)
from dilocox.peer.averaging.events import EventQueue, Voided
from dilocox.peer.averaging.matchmaking import LATE_GROUP_S
from dilocox.peer.rounds.group import (
    MAX_UNRELIABLE,
    AttemptResult,
    ExchangeOrder,
    Plan,
    TooFew,
)
from dilocox.peer.rounds.record import SendFacts
from dilocox.peer.rounds.standing import Standing
from dilocox.peer.rounds.vote_count import Verdict
from tests.clocks import TestClock
from tests.peer.local_peers import MANIFEST, local_peer
from tests.pipeline.swarms import stage_record

VIEW = SwarmView(me="me")
WITH_ANOTHER = SwarmView(me="me", stage={"other": stage_record(state="training")})
AT_HOME = SwarmView(me="me", stage={"other": stage_record(state="training", client_mode=True)})
TICK_S = 0.1
FACTS = SendFacts(tokens=10, step_s=0.5, stall_s=0.25)


class World:
    """A driver, the monotonic clock that it sees, and the answers of its averaging process."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.answer: Future[Any] = Future()
        self.settle: Any = lambda: self.answer
        self.orders: list[ExchangeOrder] = []
        self.given_up = self.others_in_view = 0
        self.encoded: list[Plan] = []
        self.encoding: Future[float] = Future()
        self.view = VIEW
        self.meets_at: dict[int, float] = {}
        self.deadlines = MANIFEST.deadlines
        self.events = EventQueue()
        self.chain: Any = SimpleNamespace(
            head=SimpleNamespace(round=-1, digest=MANIFEST.digest, chain_tokens=0),
            last_record=None,
            anchor_sha256="",
            busy=False,
            delivering=False,
            states_taken=0,
            behind=lambda view: False,
            strays=lambda view: {},
            committed=lambda number, exchange_s, matchmaking_s: None,
        )
        averager: Any = SimpleNamespace(
            exchange=self.exchange,
            encode=self.encode,
            settle=lambda number, attempt: self.settle(),
            give_up_group=self.give_up_group,
        )
        local = local_peer(clock=self.clock)
        self.driver = ExchangeDriver(local, averager, self.events, self.chain)
        for _ in range(int(self.deadlines.record_lifetime_s)):
            self.look()
            self.clock.now += 1.0
        self.look()

    def look(self) -> None:
        observe, others = self.driver.alone.observe, self.others_in_view
        observe(self.clock.now, others_in_view=others, bootstrap_answered=True)

    def exchange(self, order: ExchangeOrder) -> Any:
        self.orders.append(order)
        return self.answer

    def give_up_group(self) -> None:
        self.given_up += 1

    def encode(self, plan: Plan, last: Any) -> Any:
        self.encoded.append(plan)
        return self.encoding

    def submit(self, scheduled_at: float | None = None, *, states_taken: int = 0) -> None:
        """The send of round 0; its group meets now unless said otherwise."""
        at = self.clock.now if scheduled_at is None else scheduled_at
        self.driver.submit(0, FACTS, scheduled_at=at, states_taken=states_taken)

    def tick(self, seconds: float = TICK_S) -> None:
        self.clock.now += seconds
        self.look()
        self.driver.tick(self.view, meets_at=self.meets_at.get, search_s=0.5)

    def void(self) -> None:
        """One attempt that nobody comes to."""
        self.answer = Future()
        self.answer.set_exception(TooFew("1 member"))
        self.submit()
        self.tick_for(3 * TICK_S)

    def tick_for(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.tick()


@pytest.fixture
def world() -> World:
    world = World()
    world.submit()
    world.tick()
    assert world.driver.exchanging
    return world


# ---- when it begins ------------------------------------------------------------------------------
def test_a_group_is_looked_for_shortly_before_its_time_and_not_from_the_send_on() -> None:
    world = World()
    meets_at = world.clock.now + 900.0
    world.submit(meets_at)
    world.tick_for(890.0)
    assert not world.orders and not world.driver.exchanging
    world.tick_for(10.0)
    assert [order.scheduled_at for order in world.orders] == [meets_at]
    assert world.driver.exchanging


def test_a_send_is_encoded_at_once_and_anew_when_its_ranks_and_basis_change() -> None:
    world = World()
    world.submit(world.clock.now + 900.0)
    world.tick_for(2.0)
    assert [plan.previous for plan in world.encoded] == [MANIFEST.digest] and not world.orders
    world.encoding.set_result(7.5)
    world.tick_for(1.0)
    assert world.driver.encoding_s == 7.5
    world.chain.head.digest = "b" * 64
    world.tick_for(2.0)
    assert [plan.previous for plan in world.encoded] == [MANIFEST.digest, "b" * 64]


def test_a_send_whose_record_is_here_and_to_be_applied_is_not_encoded_again(world: World) -> None:
    plans = len(world.encoded)
    world.answer.set_result(result(Verdict.COMMITTED, logged=True))
    world.tick()
    world.chain.head.digest, world.chain.head.round = "b" * 64, 0
    world.tick_for(2.0)
    assert len(world.encoded) == plans


def test_a_repeated_attempt_waits_for_the_others_and_not_for_those_who_are_blamed(
    world: World,
) -> None:
    """It is over when all must know that the first one was void; most know at once."""
    first = world.orders[0].scheduled_at
    world.view = WITH_ANOTHER
    world.answer.set_result(replace(result(Verdict.VOID), limit_s=111.0, blamed=("other",)))
    world.tick()
    world.answer = Future()
    world.tick_for(2 * TICK_S)
    again = world.orders[1]
    assert again.scheduled_at == first + 111.0 + world.deadlines.vote_s
    assert again.matchmaking_limit_s > 111.0
    assert again.blamed == ("other",) and "other" in again.counted


def test_a_repeated_attempt_begins_when_nodes_keep_the_word_of_who_looks_for_it(
    world: World,
) -> None:
    """The exchanges of some runs may take hours."""
    first = world.orders[0].scheduled_at
    world.answer.set_result(replace(result(Verdict.VOID), limit_s=7200.0))
    world.tick()
    world.answer = Future()
    meets_at = first + 7200.0 + world.deadlines.vote_s
    world.tick_for(meets_at - world.clock.now - MAX_DECLARATION_LIFETIME_S)
    assert len(world.orders) == 1 and world.driver.sent_round == 0
    world.tick_for(120.0)
    assert [order.scheduled_at for order in world.orders] == [first, meets_at]
    assert meets_at - world.clock.now > MAX_DECLARATION_LIFETIME_S - 180.0


def test_the_time_of_an_exchange_is_told_without_the_codec_and_stated_with_it(
    world: World,
) -> None:
    told = list[float]()
    world.chain.committed = lambda number, exchange_s, matchmaking_s: told.append(exchange_s)
    world.answer.set_result(replace(result(Verdict.COMMITTED, logged=True), codec_s=50.0))
    world.tick()
    assert told == [1.0]
    world.driver.closed_by_chain(0)
    world.answer = Future()
    world.submit()
    world.tick()
    assert world.orders[-1].exchange_s == 51.0


def test_a_send_that_waits_follows_its_group_to_an_earlier_time() -> None:
    """All have rung, and nobody needs the rest of the grace."""
    world = World()
    world.submit(world.clock.now + 900.0)
    world.tick()
    earlier = world.meets_at[0] = world.clock.now + 60.0
    world.tick_for(60.0)
    assert [order.scheduled_at for order in world.orders] == [earlier]


@pytest.mark.parametrize(("late_s", "tried"), [(4.0, True), (9.0, False)])
def test_who_is_a_little_late_still_looks_whether_the_group_is_open(
    late_s: float, tried: bool
) -> None:
    world = World()
    world.view = WITH_ANOTHER
    world.submit(world.clock.now - late_s)
    world.tick()
    assert bool(world.orders) is tried


@pytest.mark.parametrize("none_found", [MatchmakingException(), TooFew("1 member")])
def test_who_hears_of_a_newer_record_looks_for_the_group_of_another_plan(
    none_found: Exception,
) -> None:
    """It began before it heard of that record, where rounds are short, and would look until after
    the group's time: then the others are further again, and it never finds them."""
    world = World()
    world.view, meets_at, world.others_in_view = WITH_ANOTHER, world.clock.now + 4.0, 1
    world.submit(meets_at)
    world.tick_for(1.0)
    assert len(world.orders) == 1 and world.given_up == 0

    world.chain.behind = lambda view: True
    world.tick_for(1.0)
    assert world.given_up == 1
    answer, world.answer = world.answer, Future()
    answer.set_exception(none_found)
    world.tick_for(1.0)
    assert world.driver.sent_round == 0 and not world.driver.exchanging, "it is to be fetched"
    world.chain.behind = lambda view: False
    world.chain.head.digest = "b" * 64
    world.tick()
    assert [order.plan.previous for order in world.orders] == [MANIFEST.digest, "b" * 64]
    assert {order.scheduled_at for order in world.orders} == {meets_at}

    world.chain.behind = lambda view: True
    world.tick_for(0.5)
    assert world.given_up == 2
    world.answer.set_exception(MatchmakingException())
    world.tick_for(10.0)
    assert isinstance(world.events.get(), Voided), "a record that nobody gives is not waited for"


def test_nothing_is_given_up_once_the_time_of_the_group_is_over(world: World) -> None:
    """Others may have committed what this peer is exchanging still, for hours."""
    world.tick_for(world.orders[0].matchmaking_limit_s)
    world.chain.behind = lambda view: True
    world.tick_for(60.0)
    assert world.driver.exchanging
    assert world.given_up == 0


def test_nobody_who_is_new_keeps_the_last_peer_of_a_stage_from_going_on() -> None:
    """It says that it trains, and stays away: the group is tried, and then this peer is alone."""
    world = World()
    world.view = WITH_ANOTHER
    me = local_peer().me
    world.chain.last_record = last_record(me, credited=9)
    world.answer.set_exception(MatchmakingException("nobody came"))
    world.submit()
    world.tick()
    (first,) = world.orders
    assert set(first.counted) == {me, "other"} and not first.alone
    world.answer = Future()
    world.tick_for(2 * TICK_S)
    again = world.orders[-1]
    assert again.alone and again.counted == (me,)


def test_who_was_in_one_record_and_stays_away_need_not_be_there() -> None:
    """A crowd that came once, said that it trains, and never came again stopped the stage."""
    world = World()
    world.view = WITH_ANOTHER
    me, crowd = local_peer().me, [f"crowd {place}" for place in range(9)]
    record = last_record(me, "other", *crowd)
    old = Standing(peer="", round=record.round, credited=9)
    known = tuple(replace(old, peer=peer) for peer in sorted([me, "other"]))
    known += tuple(replace(old, peer=peer, credited=1) for peer in crowd)
    known += tuple(
        Standing(peer=peer, round=record.round - ago, credited=9)
        for peer, ago in (("left out of the last", 2), ("gone for long", 3))
    )
    world.chain.last_record = SimpleNamespace(**vars(record) | {"standings": known})
    world.submit()
    world.tick()
    assert set(world.orders[0].recent_voters) == {me, "other", "left out of the last"}
    assert set(world.orders[0].leaders) == {me, "other"}


def test_where_all_are_new_nobody_is_waited_for_for_ever() -> None:
    """Its voters died, and of two that are left one only says that it trains."""
    world = World()
    me = local_peer().me
    world.chain.last_record = last_record("gone", credited=9)
    assert world.driver.rivals(WITH_ANOTHER) == {"other"}
    for _ in range(2):
        world.void()
    assert world.driver.rivals(WITH_ANOTHER) == frozenset()
    world.chain.last_record = last_record(me, "other", credited=9)
    assert world.driver.rivals(WITH_ANOTHER) == {"other"}, "it is no stranger"


def test_who_is_as_old_as_this_peer_is_not_passed_over() -> None:
    world = World()
    world.view = WITH_ANOTHER
    me = local_peer().me
    world.chain.last_record = last_record(me, "other", credited=9)
    assert world.driver.rivals(WITH_ANOTHER) == {"other"}
    world.driver.alone.observe(world.clock.now, others_in_view=1, bootstrap_answered=True)
    world.driver.submit(0, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.driver.tick(WITH_ANOTHER, meets_at=world.meets_at.get, search_s=0.5)
    world.answer.set_exception(MatchmakingException("nobody came"))
    world.driver.tick(WITH_ANOTHER, meets_at=world.meets_at.get, search_s=0.5)
    assert world.driver.voids == 1 and not world.driver.undecided


@pytest.mark.parametrize(("known", "more_s"), [(False, 0.0), (True, TAKEN_S)])
def test_who_went_on_where_nobody_follows_is_not_waited_for_for_ever(
    known: bool, more_s: float
) -> None:
    """Two of two stood on two records, and each waited until the run's end for the other."""
    world = World()
    world.view = WITH_ANOTHER
    me = local_peer().me
    world.chain.last_record = last_record(me, "other", credited=9)

    def waits() -> bool:
        world.tick()
        return world.driver.rivals(WITH_ANOTHER) == {"other"}

    patience_s = STRAY_LIFETIMES * world.deadlines.record_lifetime_s + more_s
    for _ in range(STUCK_VOIDS):
        world.void()
    world.clock.now += 2 * patience_s
    world.chain.strays = lambda view: {"other": known}
    assert waits(), "it was not seen to have strayed before"
    world.clock.now += patience_s - TICK_S
    assert waits()
    world.clock.now += TICK_S
    assert not waits()
    world.tick_for(world.deadlines.record_lifetime_s + 1.0)
    world.void()
    assert world.orders[-1].counted == (me,)
    world.chain.strays = lambda view: {}
    assert waits()
    world.chain.strays = lambda view: {"other": known}
    assert waits(), "from now on"
    world.clock.now += patience_s + TICK_S
    assert not waits()
    world.chain.head.digest = "b" * 64  # a record came
    assert waits()


def test_a_peer_is_stuck_once_three_sends_came_to_nothing_on_one_record() -> None:
    world = World()

    def void_one() -> bool:
        world.void()
        return world.driver.stuck

    assert [void_one() for _ in range(4)] == [False, False, True, True]
    world.chain.head.digest = "b" * 64  # a record came
    assert not world.driver.stuck
    assert [void_one() for _ in range(3)] == [False, False, True]


def test_a_run_begins_with_who_comes_where_others_only_say_that_they_train() -> None:
    world = World()
    world.view = WITH_ANOTHER
    for number in range(4):
        if number == 3:  # the chain has begun: it says who must be there
            world.chain.last_record = last_record("other")
        world.answer = Future()
        world.answer.set_exception(TooFew("1 member"))
        world.driver.submit(number, FACTS, scheduled_at=world.clock.now, states_taken=0)
        world.tick_for(1.0)
        assert not world.driver.exchanging
    me = world.orders[0].counted[0]
    counted = [set(order.counted) for order in world.orders]
    assert counted == [{me, "other"}, {me, "other"}, {me}, {me, "other"}]


@pytest.mark.parametrize(
    ("last", "expected"), [(None, None), (("me",), None), (("gone", "me", "other"), 2)]
)
def test_a_group_is_closed_early_only_while_nobody_is_new(
    last: tuple[str, ...] | None, expected: int | None
) -> None:
    """Where somebody is, not all know of all: those that were missed met apart, too few."""
    world = World()
    world.view = WITH_ANOTHER
    if last is not None:
        world.chain.last_record = last_record(*last)
    world.submit()
    world.tick()
    assert world.orders[0].whole_with == expected


@pytest.mark.parametrize(
    ("last", "at_home", "leaders"),
    [
        ((), False, ()),
        (("gone",), False, ()),
        (("other",), False, ("other",)),
        (("other",), True, ()),  # nobody can join it
    ],
)
def test_who_was_in_a_record_gathers_the_group_where_one_of_them_can(
    last: tuple[str, ...], at_home: bool, leaders: tuple[str, ...]
) -> None:
    world = World()
    world.view = AT_HOME if at_home else WITH_ANOTHER
    world.chain.last_record = last_record(*last) if last else None
    world.submit()
    world.tick()
    assert world.orders[0].leaders == leaders


@pytest.mark.parametrize(
    ("members", "missed", "times", "leaders"),
    [
        (("other", "me"), ("other",), 0, ("me", "other")),  # of two neither leads alone
        (("other", "me", "third"), ("other",), 0, ("me", "third")),
        (("other", "me", "third"), (), 2, ("me", "third")),
    ],
)
def test_who_was_missed_or_sits_out_gathers_no_group_where_most_others_can(
    members: tuple[str, ...], missed: tuple[str, ...], times: int, leaders: tuple[str, ...]
) -> None:
    world = World()
    there = {peer: stage_record(state="training") for peer in members if peer != "me"}
    world.view = SwarmView(me="me", stage=there)
    world.chain.last_record = last = last_record(*members)
    last.standings = tuple(
        replace(each, times=times) if each.peer == "other" else each for each in last.standings
    )
    world.submit()
    world.tick()
    for _ in range(2):
        answer, world.answer = world.answer, Future()
        answer.set_result(result(Verdict.VOID, missed=missed))
        world.tick_for(60.0)
    world.driver.submit(1, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.tick()
    assert world.orders[-1].leaders == leaders


def last_record(*members: str, credited: int = 1) -> Any:
    standings = tuple(Standing(peer=peer, round=0, credited=credited) for peer in members)
    named = [SimpleNamespace(peer=peer) for peer in members]
    return SimpleNamespace(round=0, members=named, standings=standings, next_ranks=())


def result(
    verdict: Verdict,
    logged: bool = False,
    missed: tuple[str, ...] = (),
    digest: str = "",
) -> AttemptResult:
    return AttemptResult(
        verdict=verdict,
        missed=missed,
        record=None,
        digest=digest,
        certificate=None,
        logged=logged,
        abort=b"",
        members=("me",),
        seconds=1.0,
        limit_s=30.0,
    )


@pytest.mark.parametrize("refused", [False, True])
def test_who_was_missed_in_void_attempts_is_named_until_there_is_a_record_or_too_few_came(
    world: World, refused: bool
) -> None:
    """Also with the sends of later rounds: who falls silent in turns would stop them all. But of
    those that are left out nobody sees who else is at fault."""
    for missed in ("first", "second"):
        answer, world.answer = world.answer, Future()
        answer.set_result(result(Verdict.VOID, missed=(missed,)))
        world.tick_for(60.0)
    world.driver.submit(1, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.tick()
    assert [order.plan.attempt for order in world.orders] == [0, 1, 0]
    named = [order.unreliable for order in world.orders]
    assert named == [(), (), ("first", "second")]
    answer, world.answer = world.answer, Future()
    answer.set_result(result(Verdict.VOID, missed=("third",)))
    world.tick_for(60.0)
    assert world.orders[-1].plan.attempt == 1
    assert world.orders[-1].unreliable == ("first", "second"), "or they stopped each second one"
    answer, world.answer = world.answer, Future()
    if refused:
        answer.set_exception(TooFew("of those that must be there"))
        world.tick()
    else:
        answer.set_result(result(Verdict.COMMITTED, logged=True))
        world.tick()
        world.driver.closed_by_chain(1)
        world.chain.head.digest = "b" * 64
    world.driver.submit(2, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.tick()
    assert world.orders[-1].unreliable == ()


def test_who_gave_this_peer_no_mean_of_the_last_record_is_named_in_the_next_round(
    world: World,
) -> None:
    for number, (missed, named) in enumerate([(("keeper",), ("keeper",)), ((), ())]):
        answer, world.answer = world.answer, Future()
        digest = f"{number + 1:064x}"
        answer.set_result(result(Verdict.COMMITTED, True, missed, digest))
        world.tick()
        world.driver.closed_by_chain(number)
        world.chain.head.digest = digest
        world.driver.submit(number + 1, FACTS, scheduled_at=world.clock.now, states_taken=0)
        world.tick()
        assert world.orders[-1].unreliable == named
        assert world.orders[-1].leaders == world.orders[0].leaders, "or it finds no group alone"


def test_of_whom_it_missed_those_with_most_records_are_named_first(world: World) -> None:
    """A ticket has no room for all: a crowd of fresh keys is not to hide one that has a vote."""
    crowd = tuple(f"new-{number}" for number in range(MAX_UNRELIABLE))
    for _ in range(2):
        world.chain.last_record = last_record("me", "other", "who votes", credited=9)
        answer, world.answer = world.answer, Future()
        answer.set_result(result(Verdict.VOID, missed=(*crowd, "who votes")))
        world.tick_for(60.0)
    world.driver.submit(1, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.tick()
    assert world.orders[-1].unreliable == ("who votes", *sorted(crowd))


def test_an_averaging_process_that_never_answers_is_given_up(world: World) -> None:
    with pytest.raises(AveragerStuck):
        world.tick_for(600.0)


def test_an_attempt_whose_leader_told_late_of_the_group_has_all_its_time(world: World) -> None:
    attempts_s = world.deadlines.attempts_s
    world.tick_for(world.orders[0].matchmaking_limit_s + LATE_GROUP_S + attempts_s)
    assert world.driver.sent_round == 0


def test_a_peer_that_was_frozen_lets_its_averaging_process_answer(world: World) -> None:
    world.tick(1000.0)
    world.tick_for(FROZEN_S)
    assert world.driver.sent_round == 0
    with pytest.raises(AveragerStuck):
        world.tick_for(600.0)


def test_a_commit_whose_record_nobody_gives_is_presumed_void(world: World) -> None:
    world.answer.set_result(result(Verdict.COMMITTED))
    world.tick_for(world.deadlines.record_lifetime_s - 1.0)
    assert world.driver.sent_round == 0
    world.tick_for(2.0)
    assert world.driver.sent_round is None
    event = world.events.get()
    assert isinstance(event, Voided)
    assert not event.certain


@pytest.mark.parametrize("how", ["comes", "is claimed"])
def test_nothing_is_void_while_its_record_comes(world: World, how: str) -> None:
    """That of a billion parameters takes minutes; what was learnt meanwhile was lost with it."""
    world.answer.set_result(result(Verdict.COMMITTED))
    world.chain.busy, world.chain.behind = how == "comes", lambda view: how == "is claimed"
    world.tick_for(20 * world.deadlines.record_lifetime_s)
    assert world.driver.sent_round == 0 and world.events.get() is None
    world.chain.busy, world.chain.behind = False, lambda view: False
    world.tick_for(2.0)
    assert isinstance(world.events.get(), Voided), "it never came"


def test_a_member_that_answers_no_question_is_no_sign_of_a_stuck_averager(world: World) -> None:
    """Each question waits for it; one is under way whenever the time to ask is over."""
    silence_s = world.deadlines.silence_s

    class Slow(Future[AttemptResult]):
        def __init__(self) -> None:
            super().__init__()
            self.set_result(result(Verdict.UNDECIDED))
            self._due = world.clock.now + silence_s

        def done(self) -> bool:
            return world.clock.now >= self._due

    world.settle = Slow
    world.answer.set_result(result(Verdict.UNDECIDED))
    world.tick_for(world.deadlines.record_lifetime_s + 2 * silence_s)
    assert world.driver.sent_round is None
    event = world.events.get()
    assert isinstance(event, Voided)
    assert not event.certain


@pytest.mark.parametrize(("states_taken", "kept"), [(0, False), (1, True)])
def test_a_send_from_before_a_state_was_taken_is_dropped_and_one_from_after_it_is_not(
    states_taken: int, kept: bool
) -> None:
    world = World()
    world.chain.states_taken = 1
    world.submit(states_taken=states_taken)
    world.tick()
    assert (world.driver.sent_round == 0) is kept
    assert world.events.get() is None  # the loop has undone it itself


def test_what_a_peer_states_of_its_exchange_is_the_exchange_alone() -> None:
    """Neither the grace before it nor the wait for the group: H would settle at twice as much."""
    world = World()
    world.driver.submit(
        0, replace(FACTS, stall_s=0.0), scheduled_at=world.clock.now + 40.0, states_taken=0
    )
    world.tick_for(40.0)
    world.answer.set_result(result(Verdict.COMMITTED, logged=True))
    world.tick_for(60.0)
    world.driver.closed_by_chain(0)
    world.driver.submit(1, FACTS, scheduled_at=world.clock.now, states_taken=0)
    world.tick()
    first, second = world.orders[0], world.orders[-1]
    assert (first.exchange_s, first.stall_s) == (0.0, 0.0)
    assert (second.exchange_s, second.stall_s) == (1.0, 0.25)
    assert second.ticket().stall_s == 0.25
