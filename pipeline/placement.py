"""Whom a head asks to join its replica, and why there may be nobody to ask.

What: from the swarm's stage records, per stage the peers to reserve in the order in which to try
them; the best chain among those that said yes; one line for each stage that nobody can fill.
Why: records are hints, some seconds old, and the peers decide themselves (reservation.py), so the
order only has to be good: those that look free first, the nearest first, and where nothing is known
an order of each head's own, or all heads would run after the same peer.
How: pure functions over one look at the DHT. Two peers that can only dial out cannot be neighbours,
since no stream could be opened between them.

By the same records a peer hosts the emptiest stage when it joins, and later now and then another.

What: `choose_stage` for a joiner; `Mover` tells a spare when it is its turn to move to the stage
that has the fewest peers.
Why: a run has as many replicas as its emptiest stage has peers. All see about the same records and
would move at once, leaving another stage empty, and then all move back.
How: from the same records every peer derives the same target and the same one mover, nobody moves
to a stage that somebody is just joining, a move must level the stages (two peers apart or more, so
the way back is never open), and all that must hold for several looks in a row.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dilocox.dht.records import StageRecord

Records = Mapping[int, Mapping[str, StageRecord]]

# What stands against asking peers of a stage, as it follows their number: for one and for more.
_WORDS = {
    "taken": ("trains in another replica", "train in other replicas"),
    "joining": ("is still joining", "are still joining"),
    "avoided": ("failed lately", "failed lately"),
    "client": (
        "can only dial out, like its neighbour",
        "can only dial out, like their neighbour",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Vacancies:
    """What a head looks for.

    me: peer id of the head. num_stages: of the run.
    members: by stage, whether the member it has can only dial out; stage 0 is the head itself.
        All other stages are to be filled.
    round_trips: measured, in seconds, by peer. avoid: peers not to ask now, such as the dead.
    """

    me: str
    num_stages: int
    members: Mapping[int, bool]
    round_trips: Mapping[str, float] = field(default_factory=dict[str, float])
    avoid: Collection[str] = ()


def candidates(records: Records, vacancies: Vacancies) -> dict[int, tuple[str, ...]]:
    """For every vacant stage the peers to ask, the best first; empty where there is nobody.

    Spares first; then nearest first, those of unknown round trip last. Where other heads can only
    dial out, so that only peers that can be reached may stand beside them, those come last.
    """
    found: dict[int, tuple[str, ...]] = {}
    generous = _leaves_the_reachable(records, vacancies)
    for stage in sorted(set(range(vacancies.num_stages)) - set(vacancies.members)):
        here = records.get(stage, {})
        free = [peer for peer in here if not _obstacle(peer, stage, here[peer], vacancies)]
        found[stage] = tuple(
            sorted(free, key=lambda peer: _order(peer, here[peer], vacancies, generous))
        )
    return found


def best_chain(
    willing: Mapping[int, Sequence[str]], clients: Collection[str], vacancies: Vacancies
) -> dict[int, str] | None:
    """One peer for every vacant stage, as early in its list as can be; None if it cannot be done.

    willing: by stage the peers that said yes, the best first. clients: those that can only dial
    out. The sum of the positions is the least that leaves no two of `clients` neighbours.
    """
    # By whether the last stage's peer is a client: the least sum so far and the peers chosen.
    chains: dict[bool, tuple[int, dict[int, str]]] = {False: (0, {})}
    for stage in range(vacancies.num_stages):
        options: dict[bool, tuple[int, str | None]] = {}
        if stage in vacancies.members:
            options[vacancies.members[stage]] = (0, None)
        else:
            for position, peer in enumerate(willing.get(stage, ())):
                options.setdefault(peer in clients, (position, peer))
        longer: dict[bool, tuple[int, dict[int, str]]] = {}
        for is_client, (position, peer) in options.items():
            for after_client, (cost, chain) in chains.items():
                total = cost + position
                known = longer.get(is_client)
                if not (is_client and after_client) and (known is None or total < known[0]):
                    chosen = chain if peer is None else {**chain, stage: peer}
                    longer[is_client] = (total, chosen)
        chains = longer
    return min(chains.values(), key=lambda each: each[0])[1] if chains else None


def missing(records: Records, vacancies: Vacancies) -> tuple[str, ...]:
    """Why the replica cannot be complete, one line for each reason; empty if it may be.

    Such as "stage 2 has no peer" or "stage 2 has no free peer (3 train in other replicas)".
    """
    found = candidates(records, vacancies)
    lines = [
        _nobody(stage, records.get(stage, {}), vacancies) for stage in found if not found[stage]
    ]
    clients = {peer for here in records.values() for peer in here if here[peer].client_mode}
    if not lines and best_chain(found, clients, vacancies) is None:
        stages = ", ".join(str(stage) for stage in found)
        lines.append(f"stages {stages}: neighbours would be peers that can only dial out")
    return tuple(lines)


def unfilled(records: Records, num_stages: int) -> tuple[str, ...]:
    """Which stages have no peer that could take part, one line each: no replica can be formed.

    A stage whose records are not known is not counted.
    """
    return tuple(
        f"stage {stage} has no peer"
        for stage in range(num_stages)
        if stage in records
        and all(record.state in ("left", "joining") for record in records[stage].values())
    )


def cannot_be_reached(here: Mapping[str, StageRecord]) -> bool:
    """Whether a stage has peers and all of them can only dial out.

    Then no two of them can average, and nobody that only dials out finds a neighbour in it.
    """
    hosts = [record for record in here.values() if record.state not in ("left", "joining")]
    return bool(hosts) and all(record.client_mode for record in hosts)


def _obstacle(peer: str, stage: int, record: StageRecord, vacancies: Vacancies) -> str:
    """Why not to ask this peer, as one of `_WORDS`; empty if nothing stands against it."""
    members = vacancies.members
    if peer == vacancies.me or record.state == "left":
        return "gone"
    if record.replica not in ("", vacancies.me):
        return "taken"
    if record.state == "joining":
        return "joining"
    if peer in vacancies.avoid:
        return "avoided"
    if record.client_mode and (members.get(stage - 1) or members.get(stage + 1)):
        return "client"
    return ""


def _nobody(stage: int, here: Mapping[str, StageRecord], vacancies: Vacancies) -> str:
    obstacles = Counter(_obstacle(peer, stage, record, vacancies) for peer, record in here.items())
    del obstacles["gone"]
    if not obstacles:
        return f"stage {stage} has no peer"
    counts = ", ".join(
        f"{obstacles[each]} {words[obstacles[each] > 1]}"
        for each, words in _WORDS.items()
        if each in obstacles
    )
    return f"stage {stage} has no free peer ({counts})"


def _leaves_the_reachable(records: Records, vacancies: Vacancies) -> bool:
    """Whether this head has the choice, and there are others that have not."""
    heads = records.get(0, {}).items()
    others = any(head.client_mode for peer, head in heads if peer != vacancies.me)
    return others and not vacancies.members.get(0)


def _order(
    peer: str, record: StageRecord, vacancies: Vacancies, generous: bool
) -> tuple[bool, bool, float, bytes]:
    own_order = hashlib.sha256(f"{vacancies.me} {peer}".encode()).digest()
    wanted_elsewhere = generous and not record.client_mode
    round_trip_s = vacancies.round_trips.get(peer, math.inf)
    return record.state != "spare", wanted_elsewhere, round_trip_s, own_order


LEVEL = 1  # stages whose peers differ by so many are level: a move would only swap them
HOLD_LOOKS = 3


def choose_stage(records: Records, *, me: str, num_stages: int, key: str = "") -> int:
    """The stage that a joiner takes: the one with the fewest live peers, nobody's first of all.

    records: by stage; a stage whose records are not known is missing, and is chosen only if
    nothing is known. Own old records do not count. Ties are broken by `me` and `key`.
    """
    known = [stage for stage in range(num_stages) if stage in records] or list(range(num_stages))
    return min(
        known,
        key=lambda stage: (
            sum(peer != me for peer in live_peers(records.get(stage, {}))),
            _draw(me, key, stage),
        ),
    )


def live_peers(here: Mapping[str, StageRecord]) -> tuple[str, ...]:
    """The peers of a stage that have not left it: joining, spare or training."""
    return tuple(sorted(peer for peer, record in here.items() if record.state != "left"))


def next_move(records: Records, *, num_stages: int, turn: int) -> tuple[str, int] | None:
    """The one peer of the swarm that moves now, and the stage it moves to; None if none should.

    It is a spare in no replica, without unsent progress, of the fullest stage that has one, at
    least two peers fuller than the emptiest stage. Nobody moves while a stage is unknown.
    """
    if any(stage not in records for stage in range(num_stages)):
        return None
    counts = {stage: len(live_peers(records[stage])) for stage in range(num_stages)}
    target = min(counts, key=lambda stage: (counts[stage], stage))
    if any(record.state == "joining" for record in records[target].values()):
        return None
    free = [
        (-counts[stage], _draw(peer, turn, target), peer)
        for stage in range(num_stages)
        if counts[stage] - counts[target] > LEVEL
        for peer, record in records[stage].items()
        if record.state == "spare" and not record.replica and not record.tokens
    ]
    return (min(free)[2], target) if free else None


class Mover:
    """Tells one spare when to move; asked once at every look at the DHT.

    hold: looks in a row that must name this peer and the same target.
    """

    def __init__(self, *, me: str, stage: int, num_stages: int, hold: int = HOLD_LOOKS):
        self._me = me
        self._stage = stage
        self._num_stages = num_stages
        self._hold = hold
        self._target: int | None = None
        self._held = 0

    def observe(self, records: Records, *, free: bool, turn: int) -> int | None:
        """The stage to move to now, or None.

        free: whether this peer is a spare right now, in no replica and without unsent progress;
        what the records say of it is older. turn: a number that all peers count alike and that
        grows slowly, over many looks (the round, or run time in units of minutes): should the peer
        whose turn it is not be able to move, another has its turn later.
        """
        move = next_move(records, num_stages=self._num_stages, turn=turn) if free else None
        target = move[1] if move is not None and move[0] == self._me else None
        # Both would follow from an old record of its own under a stage that it has left.
        if target == self._stage or self._me not in records.get(self._stage, {}):
            target = None
        self._held = self._held + 1 if target is not None and target == self._target else 1
        self._target = target
        return target if self._held >= self._hold else None


def _draw(*what: object) -> bytes:
    return hashlib.sha256(" ".join(str(each) for each in what).encode()).digest()
