"""Heads whose replicas learn, as far as a peer can see: they go first where several want the same
spare (pipeline/reservation.py), and what they state decides when a round ends. Apart from
coordinator.py: a rule of its own over records.

A head is in the records of stage 0 alone, which peers of other stages do not keep. But those that
train with it are in theirs, and say in the DHT, signed, whose replica they are in. Keys that never
trained anything have no such members in the chain, however many they are; a new head has some after
a few rounds. Until any head has, all count.

`others_pace` says how fast the other replicas train, as far as records and what heads say show it.
"""

from __future__ import annotations

from collections.abc import Mapping

from dilocox.dht.records import StageRecord
from dilocox.dht.swarm_view import Heads, SwarmView
from dilocox.peer.averaging.announcer import COUNTED_FIRST
from dilocox.peer.rounds.record import RoundRecord
from dilocox.peer.rounds.standing import FORGOTTEN_ROUNDS, credits, voters

KNOWN_RECORDS = 2  # that somebody must be in before new keys count less
PROVEN_ROUNDS = 3  # a spare may bring what it learnt before into the first one with a new head


def anybody_known(newest: RoundRecord | None) -> bool:
    """Whether new keys count less after this record: after a single one they count as others do."""
    standings = () if newest is None else newest.standings
    return any(each.credited >= KNOWN_RECORDS for each in standings)


class ProvenHeads:
    """Attributes: peers, the ids of the heads; set whole, so that any thread may read it."""

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._seen = ""  # digest of the record before the newest one that was looked at
        self._rounds: dict[str, tuple[int, int]] = {}  # how many, and the last one, by head

    def see(self, newest: RoundRecord | None, hosts: Mapping[str, StageRecord]) -> None:
        """Look at the newest record of this peer's stage; `hosts`: what its peers say now."""
        if newest is None or newest.previous == self._seen:
            return
        self._seen, now = newest.previous, newest.round
        members = [hosts[each.peer] for each in newest.contributions if each.peer in hosts]
        for head in {each.replica for each in members} - {""}:
            self._rounds[head] = self._rounds.get(head, (0, 0))[0] + 1, now
        kept = {h: each for h, each in self._rounds.items() if each[1] > now - FORGOTTEN_ROUNDS}
        self._rounds = kept
        self.peers = frozenset(h for h, (count, _) in kept.items() if count >= PROVEN_ROUNDS)

    def counting(self, view: SwarmView, newest: RoundRecord | None, *, stage: int) -> Heads:
        """The heads whose replicas and bells count in the round after a record of this peer's
        stage. Anybody can say that it leads a replica, and ring: the others would wait for as many
        of them again, or follow them to their times.
        """
        if newest is None or not anybody_known(newest):  # a run begins
            return None
        following = newest.round + 1
        if stage:
            voting = voters(credits(view.stage, newest.standings, following))
            named = frozenset(view.stage[peer].replica for peer in voting)
            return named - {""} or None
        leading = view.leading.keys() | {view.me}
        told = {peer for bells in view.bells.values() for peer in bells}
        known = credits({*leading, *told, *view.run_claims}, newest.standings, following)
        return voters(known, among=leading)


def others_pace(view: SwarmView, newest: RoundRecord | None) -> float:
    """On how many tokens all other replicas train while that of this peer, of stage 0, trains on
    one: by its newest record, but at most on as many each, since this one may have come late to
    that round. Before the first record each head in view counts, of a crowd a few.
    """
    if newest is None:
        return min(len(view.leading.keys() - {view.me}), COUNTED_FIRST - 1)
    others = [each.tokens for each in newest.contributions if each.peer != view.me]
    own = newest.member(view.me)
    return len(others) if own is None else min(len(others), sum(others) / own.tokens)
