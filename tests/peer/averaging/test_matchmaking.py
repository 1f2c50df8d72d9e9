"""hivemind's matchmaking as it is used here, between members in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from dilocox.peer.averaging.matchmaking import (
    LEAD_S,
    PlanKeys,
    aim,
    as_leader,
    expect,
    give_up,
    own_time,
)

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
AHEAD_S = 1.0  # from the first call to the group's time
GIVE_UP_S = 2.5  # after it, as in the product
TOLD_S = 4.0  # longer than for an answer a leader that tells late is waited for
SOON_S = 0.6  # a group that stands so soon did not wait for its time


class Room:
    """A DHT without latency, and the calls among members. Counts searches and declarations."""

    def __init__(self) -> None:
        self._declared: dict[str, dict[bytes, float]] = {}
        self.earliest: list[bytes] = []  # whoever looks
        self.members: dict[PeerID, Matchmaking] = {}
        self.searches = self.stores = 0
        self.reads_late: set[PeerID] = set()  # of which group it is in
        self.late_s = AHEAD_S

    async def declared(self, key: str) -> dict[bytes, float]:
        self.searches += 1
        await asyncio.sleep(0.001)
        at: float = get_dht_time() + 0.05
        return self._declared.get(key, {}) | dict.fromkeys(self.earliest, at)

    async def declare(self, key: str, subkey: bytes, expires_at: float) -> bool:
        self.stores += 1
        self._declared.setdefault(key, {})[subkey] = expires_at
        return True

    async def rpc_join_group(self, request: Any, *, caller: PeerID, leader: PeerID) -> Any:
        matchmaking = self.members[leader]
        stated = int(request.gather.decode())
        expect(matchmaking, stated or None)
        answers = matchmaking.rpc_join_group(request, SimpleNamespace(remote_id=caller))  # type: ignore[arg-type]

        async def passed_on() -> AsyncIterator[Any]:
            async for answer in as_leader(matchmaking, caller, answers):
                if answer.ordered_peer_ids and caller in self.reads_late:
                    await asyncio.sleep(self.late_s)
                yield answer

        return passed_on()


class Servicer(ServicerBase):
    @classmethod
    def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
        async def rpc_join_group(request: Any) -> Any:
            return await p2p.room.rpc_join_group(request, caller=p2p.peer_id, leader=peer)

        return SimpleNamespace(rpc_join_group=rpc_join_group)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A member: when it calls, how many it expects (0: it does not know), its plan."""

    name: int
    expects: int
    after_s: float = 0.0
    key: str = KEY
    client_mode: bool = False
    leaders: tuple[int, ...] = ()  # who may gather its group; empty: anybody
    failed: int = 0  # who gathered the group before, which came to nothing
    stale_s: float = 0.0  # for which it looks for the group of another plan first


@dataclass
class Found:
    """When each caller's group stood, after its call, and who is in it; None: it found none."""

    seconds: dict[int, float] = field(default_factory=dict[int, float])
    groups: dict[int, frozenset[int] | None] = field(
        default_factory=dict[int, frozenset[int] | None]
    )
    room: Room = field(default_factory=Room)
    later: set[int] = field(default_factory=set[int])  # to one that gave up a group


def everybody(_: str) -> bool:
    return True


def peer_id(name: int) -> PeerID:
    return PeerID(bytes([18, 32]) + bytes([name]) * 32)


async def call(caller: Caller, room: Room, scheduled_at: float, found: Found) -> None:
    me = peer_id(caller.name)
    dht: Any = SimpleNamespace(peer_id=me, declared=room.declared, declare=room.declare)
    p2p: Any = SimpleNamespace(peer_id=me, room=room)
    matchmaking = room.members[me] = Matchmaking(
        p2p,
        b"",
        dht,
        servicer_type=Servicer,
        prefix="run_stage0_averager",
        target_group_size=None,
        min_group_size=2,
        min_matchmaking_time=0.3,
        request_timeout=0.2,
        client_mode=caller.client_mode,
    )
    await asyncio.sleep(caller.after_s)
    leaders = [str(peer_id(name)) for name in caller.leaders]

    def may_lead(peer: str) -> bool:
        return not leaders or peer in leaders

    deadline = scheduled_at + GIVE_UP_S

    async def look() -> Any:
        leads = not caller.client_mode and may_lead(str(me))
        step: Any = SimpleNamespace(
            scheduled_time=own_time(scheduled_at, get_dht_time(), may_lead=leads),
            deadline=deadline,
            data_for_gather=str(caller.expects).encode(),
            get_timeout=lambda: max(0.0, deadline - get_dht_time()),
        )
        return await matchmaking.look_for_group(step)

    for key, told_s in ((OTHER_KEY, 10 * TOLD_S), (caller.key, TOLD_S)):
        keys = aim(
            matchmaking,
            key,
            scheduled_at=scheduled_at,
            expected=caller.expects or None,
            may_lead=may_lead,
            leaders=len(leaders) or 9,
            told_s=told_s,
        )
        if caller.failed and key == OTHER_KEY:
            keys.led_by(str(peer_id(caller.failed)))
            keys.ended(committed=False)
        if caller.stale_s and key == OTHER_KEY:
            asyncio.get_running_loop().call_later(caller.stale_s, give_up, matchmaking)
            assert await look() is None
            give_up(matchmaking)  # once more, too late
            keys.ended(committed=False)
            found.later = {name for name in range(1, 20) if keys.is_later(str(peer_id(name)))}
    began = time.monotonic()
    group = await look()
    found.seconds[caller.name] = time.monotonic() - began
    ids = {peer_id(name): name for name in range(1, 20)}
    found.groups[caller.name] = (
        None if group is None else frozenset(ids[each] for each in group.peer_ids)
    )


class Idle:
    """One that gathers a group, as the earliest of all whenever one looks, and never begins."""

    target_group_size: int | None = None

    def __init__(self, sends_to: int = 0, after_s: float = 10 * AHEAD_S):
        """sends_to: where it sends on those that it let in, so long after that."""
        self.sends_to, self.after_s, self.asked = sends_to, after_s, 0

    async def rpc_join_group(self, *_: Any) -> AsyncIterator[Any]:
        self.asked += 1
        codes: Any = averaging_pb2
        yield averaging_pb2.MessageFromLeader(code=codes.ACCEPTED)
        await asyncio.sleep(self.after_s)
        yield averaging_pb2.MessageFromLeader(
            code=codes.GROUP_DISBANDED, suggested_leader=peer_id(self.sends_to).to_bytes()
        )


def search(
    callers: Iterable[Caller],
    *,
    idle: Iterable[int] = (),
    reads_late: Iterable[int] = (),
    late_s: float = AHEAD_S,
    sending: Mapping[int, Idle] | None = None,
) -> Found:
    """idle: the names of those that never begin. reads_late: that take so long to read which group
    they are in. sending: those, by name, that send others on.
    """

    async def together() -> Found:
        found = Found()
        scheduled_at = get_dht_time() + AHEAD_S
        found.room.reads_late, found.room.late_s = set(map(peer_id, reads_late)), late_s
        for name in idle:
            found.room.members[peer_id(name)] = Idle()  # type: ignore[assignment]
            found.room.earliest.append(peer_id(name).to_bytes())
        for name, leader in (sending or {}).items():
            found.room.members[peer_id(name)] = leader  # type: ignore[assignment]
        await asyncio.gather(*(call(each, found.room, scheduled_at, found) for each in callers))
        return found

    return asyncio.run(together())


def in_one_group(found: Found, names: Iterable[int]) -> bool:
    return set(found.groups.values()) == {frozenset(names)}


def callers(*names: int, expects: int, apart_s: float = 0.02) -> list[Caller]:
    return [
        Caller(name=name, expects=expects, after_s=apart_s * index)
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    "members",
    [
        callers(1, 2, expects=2),
        callers(2, 1, expects=2),
        callers(1, 2, 3, expects=3),
        callers(*range(8, 0, -1), expects=8),
        callers(3, 1, 4, 2, expects=4, apart_s=0.0),
        # a leader that expects too few is overruled by a member
        [Caller(name=1, expects=2), *callers(1, 2, 3, expects=3, apart_s=0.12)[1:]],
        [Caller(name=3, expects=2), *callers(3, 2, 1, expects=3, apart_s=0.12)[1:]],
        # who only dials out joins and never leads
        [Caller(name=1, expects=3, client_mode=True), *callers(1, 3, 2, expects=3)[1:]],
    ],
    ids=lambda members: "-".join(str(each.name) for each in members),
)
def test_a_group_closes_when_all_that_are_expected_are_in_it(members: list[Caller]) -> None:
    found = search(members)
    assert in_one_group(found, [each.name for each in members])
    if not any(each.client_mode for each in members):
        assert max(found.seconds.values()) < SOON_S
    assert max(found.seconds.values()) < AHEAD_S


@pytest.mark.parametrize("leaders", [(), (1, 2, 3)], ids=["anybody leads", "who was in a record"])
def test_who_was_in_no_record_gathers_nobody_where_others_can(leaders: tuple[int, ...]) -> None:
    """Keys that are in no record say that they are the earliest, and never begin."""
    members = [Caller(name=name, expects=4, leaders=leaders) for name in (4, 1, 3, 2)]
    found = search(members, idle=(9, 10, 11, 12))
    if leaders:
        assert in_one_group(found, (1, 2, 3, 4)) and max(found.seconds.values()) < SOON_S
    else:
        assert not in_one_group(found, (1, 2, 3, 4)), "the idle ones gathered nobody"


def test_a_member_that_does_not_read_of_its_group_keeps_no_other_from_beginning() -> None:
    found = search(callers(1, 2, 3, expects=3), reads_late=(2,))
    assert in_one_group(found, (1, 2, 3))
    assert max(found.seconds[1], found.seconds[3]) < SOON_S < found.seconds[2]


@pytest.mark.parametrize("late_s", [0.5, GIVE_UP_S + 0.5])
def test_whom_its_leader_tells_late_of_the_group_is_in_it(late_s: float) -> None:
    """A leader tells all the tickets of all: megabytes, over what may be a slow line."""
    found = search(callers(1, 2, 3, expects=4), reads_late=(2, 3), late_s=late_s)
    assert in_one_group(found, (1, 2, 3))
    assert found.seconds[1] < AHEAD_S + 0.4 < found.seconds[2]


def test_a_peer_waits_long_for_a_leader_alone() -> None:
    """One that follows nobody gives up at its deadline, one whose leader is silent later."""
    found = search([Caller(name=1, expects=2, leaders=(9,))], idle=(9,))
    assert found.groups == {1: None}
    assert found.seconds[1] == pytest.approx(AHEAD_S + TOLD_S, abs=SOON_S)
    found = search([Caller(name=1, expects=2)])
    assert found.groups == {1: None}
    assert found.seconds[1] == pytest.approx(AHEAD_S + GIVE_UP_S, abs=SOON_S)


def test_a_peer_is_not_sent_on_to_another_leader_once_it_is_late() -> None:
    """Each could hold it as long again."""
    late_s = AHEAD_S + GIVE_UP_S + 0.5
    sending = {9: Idle(10, 0.3), 10: Idle(11, late_s - 0.3), 11: Idle()}
    found = search([Caller(name=1, expects=2, leaders=(9, 10, 11))], idle=(9,), sending=sending)
    assert [sending[name].asked for name in (9, 10, 11)] == [1, 1, 0]
    assert found.groups == {1: None}
    assert found.seconds[1] == pytest.approx(late_s, abs=SOON_S)


def test_where_one_does_not_come_the_group_stands_at_its_time() -> None:
    found = search(callers(1, 2, 3, expects=4))
    assert in_one_group(found, (1, 2, 3))
    assert found.seconds[1] == pytest.approx(AHEAD_S, abs=LEAD_S + 0.15)


@pytest.mark.parametrize("first", [1, 2])
def test_two_meet_though_one_thinks_that_the_other_is_to_be_later(first: int) -> None:
    """As where the other has started again and does not know: neither would ask the other."""
    members = [Caller(name=1, expects=2), Caller(name=2, expects=2, failed=1)]
    members = [replace(each, after_s=0.1 * (each.name != first)) for each in members]
    assert in_one_group(search(members), (1, 2))


def test_where_one_does_not_know_whom_to_expect_the_group_waits_for_its_time() -> None:
    found = search([Caller(name=1, expects=2), Caller(name=2, expects=0, after_s=0.05)])
    assert in_one_group(found, (1, 2))
    assert found.seconds[1] > AHEAD_S - 0.1


def test_peers_with_another_plan_are_not_met() -> None:
    found = search(
        [
            Caller(name=1, expects=2),
            Caller(name=2, expects=2, key=OTHER_KEY),
            Caller(name=3, expects=2, after_s=0.05),
        ]
    )
    assert found.groups == {1: frozenset({1, 3}), 2: None, 3: frozenset({1, 3})}


@pytest.mark.parametrize("stale_s", [(0.3,), (0.3, 0.4), (0.5, 0.3)])
def test_who_gives_up_a_group_is_in_the_next_one_in_time(stale_s: tuple[float, ...]) -> None:
    """One alone, or one that gathered another one, and that one, whichever gives up first."""
    expects, late = 2 + len(stale_s), (2, 4)[: len(stale_s)]
    fresh = [Caller(name=name, expects=expects) for name in (1, 3)]
    stale = [
        Caller(name=name, expects=expects + 1, stale_s=seconds, after_s=0.05 * index)
        for index, (name, seconds) in enumerate(zip(late, stale_s, strict=True))
    ]
    found = search([*fresh, *stale])
    assert in_one_group(found, (1, 3, *late))


def test_who_held_a_peer_that_gave_up_is_later() -> None:
    """The others may have met without this peer meanwhile, and have the record of that."""
    holding = Idle(sends_to=9, after_s=0.8)
    found = search([Caller(name=2, expects=3, stale_s=0.4)], idle=[9], sending={9: holding})
    assert holding.asked
    assert 9 in found.later


def test_a_search_costs_few_messages() -> None:
    """Stock hivemind searches without a pause: hundreds of times in the second here."""
    met = search(callers(1, 2, 3, 4, expects=4)).room
    assert met.searches <= 4 * 4
    assert met.stores <= 4, "a declaration each, and none is taken back"
    waited = search(callers(1, 2, expects=9)).room
    assert waited.searches <= 2 * 6


def test_who_asks_earlier_leads() -> None:
    times = [own_time(1000.0, now) for now in (0.0, 941.0, 990.0, 999.99, 1000.0, 1002.0)]
    assert times == sorted(times)
    assert len(set(times[1:-1])) == 4
    assert own_time(1000.0, 0.0, may_lead=False) == times[-1]
    assert (times[0], times[-1]) == (1000.0, 1000.0 + LEAD_S)


def test_who_gathered_a_group_that_failed_is_later_for_a_while() -> None:
    """It may have told each member something else, which nobody can prove."""
    dht: Any = SimpleNamespace(peer_id=None)
    keys = PlanKeys(cast("Any", SimpleNamespace(dht=dht, prefix="run_stage0_averager")))

    leaders = 2

    def later_of(*peers: str) -> list[str]:
        keys.aim(KEY, 0.0, everybody, leaders)
        return [each for each in peers if keys.is_later(each)]

    def groups_of(leader: str, *, committed: bool) -> list[bool]:
        """It gathers one; whether it is later in each of those that others gather after that."""
        keys.led_by(leader)
        keys.ended(committed=committed)
        found: list[bool] = []
        for _ in range(20):
            keys.aim(KEY, 0.0, everybody, leaders)
            found.append(keys.is_later(leader))
            keys.ended(committed=False)  # nobody was asked
        return found

    assert groups_of("a", committed=True) == [False] * 20
    for later in (2, 4, 8, 16):
        assert groups_of("liar", committed=False) == [True] * later + [False] * (20 - later)
    keys.led_by("liar")
    keys.ended(committed=False)
    keys.aim(KEY, 0.0, everybody, leaders)
    assert groups_of("a", committed=False) == [False] * 20
    assert later_of("a", "liar") == ["liar"], "one of two leads, whatever fails"
    assert groups_of("liar", committed=True)[10:] == [False] * 10
    assert sum(groups_of("liar", committed=False)) == 2
    leaders = 1
    keys.led_by("liar")
    keys.ended(committed=False)
    assert later_of("liar") == [], "nobody else may lead"


@pytest.mark.parametrize("leaders, later", [(3, ["held"]), (4, ["held", "leads"]), (1, [])])
def test_who_held_a_peer_until_it_was_late_is_later_than_the_leader_it_found(
    leaders: int, later: list[str]
) -> None:
    """It let it go, and the others of the group it gathered late knew of no other leader."""
    dht: Any = SimpleNamespace(peer_id=None)
    keys = PlanKeys(cast("Any", SimpleNamespace(dht=dht, prefix="run_stage0_averager")))
    for leader in ("another", "leads"):
        keys.aim(KEY, 0.0, everybody, leaders)
        keys.led_by("held")
        keys.led_by("sent on, and follows itself")
        keys.led_by(leader)
        keys.stands(("me", "sent on, and follows itself", leader))
        keys.ended(committed=False)
    keys.aim(KEY, 0.0, everybody, leaders)
    peers = ("held", "sent on, and follows itself", "leads", "another")
    assert [each for each in peers if keys.is_later(each)] == later


def test_who_gathers_a_group_that_lacks_somebody_is_later_in_the_next_two() -> None:
    """It may leave out whom it likes; and others may stay away for that, again and again."""
    dht: Any = SimpleNamespace(peer_id=None)
    keys = PlanKeys(cast("Any", SimpleNamespace(dht=dht, prefix="run_stage0_averager")))

    def later_after(leader: str, *, committed: bool = True, lacking: bool = False) -> list[str]:
        keys.led_by(leader)
        keys.ended(committed=committed, lacking=lacking)
        keys.aim(KEY, 0.0, everybody, 4)
        return [each for each in "abcd" if keys.is_later(each)]

    keys.aim(KEY, 0.0, everybody, 4)
    assert later_after("a") == []
    for _ in range(3):
        assert later_after("a", lacking=True) == ["a"]
        assert later_after("b") == ["a"]
        assert later_after("b") == []
    for leader in "bcd" * 3:
        later_after(leader, lacking=True)
    assert "a" in later_after("a", committed=False), "it failed, and they did not"
    later_after("a", committed=False)
    later_after("a", lacking=True)
    assert ["a" in later_after("b") for _ in range(3)] == [True, True, False], "of 4 for failures"


def test_the_pauses_between_searches_grow_and_begin_anew_with_each_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    room = Room()
    dht: Any = SimpleNamespace(peer_id=None, declared=room.declared, declare=room.declare)
    of: Any = SimpleNamespace(dht=dht, prefix="run_stage0_averager")
    keys = PlanKeys(of)

    async def searches(count: int) -> list[float]:
        pauses.clear()
        for _ in range(count):
            await keys.get_averagers(keys.current_key, only_active=True)
        return [each for each in pauses if each != 0.001]

    keys.aim(KEY, 0.0, everybody, 2)
    first = asyncio.run(searches(12))
    assert first[0] == 0.0, "the first one waits for nothing"
    assert first == sorted(first)
    assert 1.0 <= first[-1] <= 3.0
    assert keys.current_key.startswith("run_stage0_averager-abab")
    assert keys.current_key.count(".") == 1, "hivemind splits keys at dots"
    keys.aim(OTHER_KEY, 0.0, everybody, 2)
    assert asyncio.run(searches(2)) == first[:2]
