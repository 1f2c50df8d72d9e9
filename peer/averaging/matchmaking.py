"""How the members of an attempt find each other: hivemind's matchmaking, made cheap and prompt.
Apart from averager.py: it overrides hivemind's own classes, and must follow their changes.

hivemind takes one group key and one schema for all of an averager's life, lets a group wait until
its time even if everybody is in it, and its leader asks the DHT for others without a pause: seen
with four members on loopback, 6.7 MB in the three seconds before an exchange of 0.3 MB. Here

- each plan has its own key, so that peers with another one are never found;
- a group closes as soon as it has as many members as any of them expects. A member that expects
  too many makes it wait until its time, as does one that does not know how many, since some peer
  is new (driver.py), or one that the leader does not know; one that expects too few is overruled
  by the others, and by the voters of late that are counted;
- the first peer to ask leads: later callers find the leader with one search and join it, and it
  need not look for others. Only where two ask at once, or clocks differ, do leaders meet by
  searching. A peer without a vote leads nobody where another one has a vote: it could gather all,
  and never begin;
- a follower waits longer for what its leader tells than for an answer whether it may join: a leader
  tells each member the tickets of all, megabytes in a large group, over what may be a slow line.
  In a small one it waits no longer for that: a leader that never begins would hold it so long;
- searches have growing pauses between them and ask only the keepers of the key (dht/keepers.py),
  and nobody takes a declaration back: its key is of this attempt alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.p2p import PeerID

FIRST_PAUSE_S = 0.2  # between two searches
PAUSE_GROWTH = 1.6
LONGEST_PAUSE_S = 2.0
EARLY_S = 60.0  # before a group's time, and more, all are equally early
LEAD_S = 0.2  # by so much later is the group's time of a peer that asks at the last moment
LATER_S = 0.5  # by so much at least, that of a peer whose last group came to nothing
LATE_GROUP_S = 30.0  # for which a group's leader may tell its members of it, at most
SLOW_LINE = 125_000  # bytes a second: a large group's leader on a slower one is not waited for
LACKING_GROUPS = 2  # in which a peer that gathered one without somebody gathers none
MOST_DOUBLINGS = 6  # of the number of groups in which a peer whose groups failed gathers none


def own_time(scheduled_at: float, now: float, *, may_lead: bool = True) -> float:
    """The group's time (run time) for a peer that asks for it now: a peer that asks earlier has an
    earlier one, and hivemind lets the earliest lead. A peer that may not lead (it only dials out,
    or is new) joins any other.
    """
    early_s = min(max(scheduled_at - now, 0.0), EARLY_S) if may_lead else 0.0
    return scheduled_at + LEAD_S * (1.0 - early_s / EARLY_S)


def aim(
    matchmaking: Any,
    key: str,
    *,
    scheduled_at: float,
    expected: int | None,
    may_lead: Callable[[str], bool],
    leaders: int,
    told_s: float,
) -> PlanKeys:
    """Look for the group of a plan (`key`, in hex); peers with another one are not found.

    scheduled_at: the group's time (run time). expected: members with which the group closes before
    it; None: it waits. may_lead: whether to join a group that a peer (its id) gathers. leaders: how
    many may. told_s: how much longer than an answer what the group's leader tells may take.
    """
    if not isinstance(matchmaking.group_key_manager, PlanKeys):
        matchmaking.group_key_manager = PlanKeys(matchmaking.group_key_manager)
        _follow_patiently(matchmaking, matchmaking.group_key_manager)
    matchmaking.schema_hash = bytes.fromhex(key)
    keys: PlanKeys = matchmaking.group_key_manager
    keys.aim(key, scheduled_at, may_lead, leaders)
    keys.told_s = told_s
    matchmaking.target_group_size = None if expected is None else max(2, expected)
    return keys


def expect(matchmaking: Any, expected: int | None) -> None:
    """One that asks to join the group expects so many members, or does not know."""
    target: int | None = matchmaking.target_group_size
    if target is not None:
        matchmaking.target_group_size = None if expected is None else max(target, expected)


def give_up(matchmaking: Any) -> None:
    """Look no further for the group; one that this peer was let in to is waited for."""
    if isinstance(matchmaking.group_key_manager, PlanKeys):
        matchmaking.group_key_manager.give_up()


async def as_leader(
    matchmaking: Any, follower: PeerID, told: AsyncIterator[Any]
) -> AsyncIterator[Any]:
    """What hivemind's leader tells a follower. It begins once each has been told the members of
    the group, and not once each has read them: one may read nothing.
    """
    async for message in told:
        if message.ordered_peer_ids:  # of the group
            matchmaking.current_followers.pop(follower, None)
            matchmaking.follower_was_discarded.set()
        yield message


def _follow_patiently(matchmaking: Any, keys: PlanKeys) -> None:
    """Wait as long as the keys say for what the leader tells of this peer's group, also beyond the
    deadline of the step; and let them know which peer that is.
    """
    look, lead = matchmaking.look_for_group, matchmaking.leader_assemble_group
    follow, answers_s = matchmaking._request_join_group, matchmaking.request_timeout
    asking = set[PeerID]()  # this leader, and before it those that sent this peer on to it
    over = True  # no step is under way, or its deadline has come, or it was given up

    class Accepted(asyncio.Event):
        def set(self) -> None:
            keys.led_by(str(matchmaking.current_leader))
            # hivemind reads it for the leader's first message, and after this for the second
            matchmaking.request_timeout = answers_s + keys.told_s
            super().set()

    async def following(leader: PeerID) -> Any:
        # it may be sent on to anybody, and late
        if over or leader in asking or not keys.may_lead(str(leader)):
            return None
        asking.add(leader)
        matchmaking.request_timeout = answers_s
        try:
            return await follow(leader)
        finally:
            asking.remove(leader)
            matchmaking.request_timeout = answers_s
            end_if_over()

    async def leading() -> Any:
        keys.led_by(str(matchmaking.peer_id))
        return await lead()

    async def looking(step: Any) -> Any:
        nonlocal over
        over = False
        left_s: float = step.get_timeout()
        step.get_timeout = lambda: left_s + keys.told_s
        ending = asyncio.get_running_loop().call_later(left_s, end)
        try:
            return await look(step)
        finally:
            ending.cancel()
            over = True

    def end() -> None:
        nonlocal over
        if not over:
            over = True
            end_if_over()

    def end_if_over() -> None:
        group: asyncio.Future[Any] = matchmaking.assembled_group
        if over and matchmaking.current_leader is None and not group.done():
            group.set_exception(asyncio.TimeoutError())  # as where hivemind's own wait ends

    matchmaking.was_accepted_to_group = Accepted()
    matchmaking._request_join_group, matchmaking.leader_assemble_group = following, leading
    matchmaking.look_for_group = looking
    keys.give_up = end


class PlanKeys(GroupKeyManager):
    """Looks for the group of a plan in the DHT, of one plan after the other.

    A peer that gathered a group that came to nothing, no matter through whose fault, is later than
    all others in the next 2, 4, 8, ... groups: it may have told each member something else. So is a
    peer that let this one in before and is not in that group: it may have held this peer until it
    was late, or sent it on to anybody. A peer that gathered a group without some member of the last
    record is later in the next two groups, for it may not have let that member in. At most half of
    those that may lead are later, those that failed most often: so one always leads. The others
    join a leader that does not count itself as later once their group's time is over.

    Attributes:
        may_lead: whether to join the groups that a peer gathers.
        told_s: how much longer than an answer what the leader of this plan's group tells may take.
        give_up: look no further for the group of this plan.
    """

    def __init__(self, of: GroupKeyManager):
        """`of`: the averager's own one, in whose place this comes."""
        super().__init__(of.dht, of.prefix, "", None)
        self._dht: Any = of.dht  # with futures, as it is asked here, hivemind types it wrongly
        self._plain_prefix = of.prefix
        self._pause_s = 0.0
        self.may_lead: Callable[[str], bool] = lambda peer: False
        self.told_s = 0.0
        self.give_up: Callable[[], None] = lambda: None
        self._scheduled_at = 0.0
        self._leader = ""  # the peer that gathered the group, or was the last to let this one in
        self._before = set[str]()  # the others that did
        self._groups = 0  # that were looked for
        self._failed = Counter[str]()
        self._later = dict[str, int]()  # peers that failed, and up to which group they are later
        self._most_later = 0

    def aim(
        self, key: str, scheduled_at: float, may_lead: Callable[[str], bool], leaders: int
    ) -> None:
        """From now on it is the plan with this key; the first search waits for nothing."""
        self.may_lead = may_lead
        self._scheduled_at = scheduled_at
        self._most_later = leaders // 2
        self.excuse()
        self._groups += 1
        self.prefix = f"{self._plain_prefix}-{key[:24]}"
        self._pause_s = 0.0

    def led_by(self, peer: str) -> None:
        """It gathers the group that this peer is in now."""
        self._before |= {self._leader} - {""}
        self._leader = peer

    def stands(self, members: Collection[str]) -> None:
        """The group is there: its members that let this peer in before follow the same leader."""
        self._before -= set(members)

    def excuse(self) -> None:
        """Nobody was at fault so far."""
        self._leader = ""
        self._before = set[str]()

    def ended(self, *, committed: bool, lacking: bool = False) -> None:
        """The exchange of the group is over, or none stood. lacking: somebody was not in it."""
        if committed:
            del self._failed[self._leader]
            if lacking:  # it may as well have stayed away for that: this never grows
                self._later[self._leader] = max(
                    self._later.get(self._leader, 0), self._groups + LACKING_GROUPS
                )
            return
        for peer in sorted({self._leader, *self._before} - {""}):
            self._failed[peer] += 1
            self._later[peer] = self._groups + 2 ** min(self._failed[peer], MOST_DOUBLINGS)

    def is_later(self, peer: str) -> bool:
        """Whether groups that it gathered failed of late, and others gather the next ones."""
        self._later = {each: until for each, until in self._later.items() if self._groups <= until}
        later = sorted(
            filter(self.may_lead, self._later),
            key=lambda each: (self._failed[each], self._later[each]),
            reverse=True,
        )
        return peer in later[: self._most_later]

    async def get_averagers(self, group_key: str, only_active: bool) -> list[Any]:
        """Peer ids and expirations (run time) of those that have declared themselves under the key.

        The pauses between searches grow.
        """
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, PAUSE_GROWTH * self._pause_s), LONGEST_PAUSE_S)
        leaders = list[tuple[PeerID, float]]()
        for name, at in (await self._dht.declared(group_key)).items():
            if self.may_lead(str(peer := PeerID(name))):
                later = self.is_later(str(peer))
                leaders.append((peer, max(at, self._scheduled_at + LATER_S) if later else at))
        return leaders

    async def declare_averager(
        self, group_key: str, peer_id: Any, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Say that this peer looks for the group; the end of that is not worth a message."""
        if not looking_for_group:
            return True
        return await self._dht.declare(group_key, peer_id.to_bytes(), expiration_time)
