"""How the members of an attempt find each other: hivemind's matchmaking, made cheap and prompt.
Apart from averager.py: it overrides hivemind's own classes, and must follow their changes.

hivemind takes one group key and one schema for all of an averager's life, lets a group wait until
its time even if everybody is in it, and its leader asks the DHT for others without a pause: seen
with four members on loopback, 6.7 MB in the three seconds before an exchange of 0.3 MB. Here

- each plan has its own key, so that peers with another one are never found;
- a group closes as soon as it has as many members as any of them expects. A member that expects
  too many lets it wait until its time, as does one that does not know, for somebody is new
  (driver.py); one that expects too few is overruled by the others, and by the last contributors
  that are counted;
- who asks first leads: later callers find the leader with one search and join it, and it need not
  look for others. Only where two ask at once, or clocks differ, do leaders meet by searching. Who
  was in no record leads nobody where one is there that was: it could gather all, and never begin;
- searches have growing pauses between them and ask few nodes, and nobody takes a declaration back:
  its key is of this attempt alone.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.p2p import PeerID

FIRST_PAUSE_S = 0.2  # between two searches
PAUSE_GROWTH = 1.6
LONGEST_PAUSE_S = 2.0
BEAM = 5  # nodes that a search or a declaration minds: a declaration lies on so many
EARLY_S = 60.0  # before a group's time, and more, all are equally early
LEAD_S = 0.2  # by so much the group's time of who asks at the last moment is later
LATER_S = 0.5  # likewise, of who gathered a group that came to nothing
MOST_DOUBLINGS = 6  # of the groups that it gathers none of then


def own_time(scheduled_at: float, now: float, *, may_lead: bool = True) -> float:
    """The group's time (run time) for who asks for it now: who asks earlier has the earlier one,
    and hivemind lets the earliest lead. Who may not (it only dials out, or is new) joins everybody.
    """
    early_s = min(max(scheduled_at - now, 0.0), EARLY_S) if may_lead else 0.0
    return scheduled_at + LEAD_S * (1.0 - early_s / EARLY_S)


def aim(
    matchmaking: Any,
    key: str,
    *,
    expected: int | None,
    may_lead: Callable[[str], bool],
    leaders: int,
) -> PlanKeys:
    """Look for the group of a plan (`key`, in hex); peers with another one are not found.

    expected: members with which the group closes before its time; None: it waits for its time.
    may_lead: whether to join a group that a peer (its id) gathers. leaders: how many may.
    """
    if not isinstance(matchmaking.group_key_manager, PlanKeys):
        matchmaking.group_key_manager = PlanKeys(matchmaking.group_key_manager)
        _note_leaders(matchmaking, matchmaking.group_key_manager)
    matchmaking.schema_hash = bytes.fromhex(key)
    keys: PlanKeys = matchmaking.group_key_manager
    keys.aim(key, may_lead, leaders)
    matchmaking.target_group_size = None if expected is None else max(2, expected)
    return keys


def expect(matchmaking: Any, expected: int | None) -> None:
    """One that asks to join the group expects so many members, or does not know."""
    target: int | None = matchmaking.target_group_size
    if target is not None:
        matchmaking.target_group_size = None if expected is None else max(target, expected)


def _note_leaders(matchmaking: Any, keys: PlanKeys) -> None:
    """Let the keys know who gathers this peer's groups."""
    follow, lead = matchmaking._request_join_group, matchmaking.leader_assemble_group
    asked: list[str] = []  # by whom it was sent on, the first one first

    async def following(leader: PeerID) -> Any:
        if not keys.may_lead(str(leader)):  # whom a leader names that has found another one
            return None
        asked.append(str(leader))
        keys.led_by = tuple(asked)
        try:
            return await follow(leader)
        finally:
            asked.pop()

    async def leading() -> Any:
        keys.led_by = (str(matchmaking.peer_id),)
        return await lead()

    matchmaking._request_join_group, matchmaking.leader_assemble_group = following, leading


class PlanKeys(GroupKeyManager):
    """Who looks for the group of a plan, of one after the other, in the DHT.

    Who gathered a group that came to nothing, whoever's fault that was, is later than all others in
    the next 2, 4, 8, ... groups: it may have told each member something else. Only of the last such
    leaders that is remembered, fewer than half of those that may lead, or of two one: so that one
    always leads.

    Attributes:
        may_lead: whether to join the groups that a peer gathers.
        led_by: peer ids: of who gathered the group or was the last that this peer asked to, and
            before it of who sent this peer on to it, as it could to anybody.
    """

    def __init__(self, of: GroupKeyManager):
        """`of`: the averager's own one, in whose place this comes."""
        super().__init__(of.dht, of.prefix, "", None)
        self._dht: Any = of.dht  # with futures, as it is asked here, hivemind types it wrongly
        self._plain_prefix = of.prefix
        self._pause_s = 0.0
        self.may_lead: Callable[[str], bool] = lambda peer: False
        self.led_by: tuple[str, ...] = ()
        self._groups = 0  # that were looked for
        self._failed = Counter[str]()
        self._later = dict[str, int]()  # who failed, the last one last, up to which group
        self._most_later = 1

    def aim(self, key: str, may_lead: Callable[[str], bool], leaders: int) -> None:
        """From now on it is the plan with this key; the first search waits for nothing."""
        self.may_lead = may_lead
        self._most_later = max(1, (leaders - 1) // 2)
        self.led_by = ()
        self._groups += 1
        self.prefix = f"{self._plain_prefix}-{key[:24]}"
        self._pause_s = 0.0

    def ended(self, *, committed: bool) -> None:
        """The exchange of the group is over, or none stood."""
        if committed:
            for leader in self.led_by:
                del self._failed[leader]
            return
        for leader in reversed(self.led_by):
            self._failed[leader] += 1
            doublings = min(self._failed[leader], MOST_DOUBLINGS)
            self._later.pop(leader, None)
            self._later[leader] = self._groups + 2**doublings

    def is_later(self, peer: str) -> bool:
        """Whether one of the last groups that failed was this peer's, and others gather the next
        ones."""
        last = list(self._later)[-self._most_later :]
        return peer in last and self._groups <= self._later[peer]

    async def get_averagers(self, group_key: str, only_active: bool) -> list[Any]:
        """Peer ids and expirations (run time) of those that have declared themselves under the key.

        The pauses between searches grow.
        """
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, PAUSE_GROWTH * self._pause_s), LONGEST_PAUSE_S)
        found = await self._dht.get(group_key, latest=True, return_future=True, beam_size=BEAM)
        if found is None or not isinstance(found.value, dict):
            return []
        return [
            (peer, declared.expiration_time + EARLY_S * self.is_later(str(peer)))
            for peer, declared in ((PeerID(name), each) for name, each in found.value.items())
            if (declared.value or not only_active) and self.may_lead(str(peer))
        ]

    async def declare_averager(
        self, group_key: str, peer_id: Any, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Say that this peer looks for the group; the end of that is not worth a message."""
        if not looking_for_group:
            return True
        return await self._dht.store(
            key=group_key,
            subkey=peer_id.to_bytes(),
            value=True,
            expiration_time=expiration_time,
            return_future=True,
            beam_size=BEAM,
        )
