"""The peers that a head asks to join its replica, and why there may be none to ask.

What: from the swarm's stage records, per stage the peers to reserve in the order in which to try
them; the best chain among those that said yes; one line for each stage that nobody can fill.
Why: records are hints, some seconds old, and the peers decide themselves (reservation.py), so the
order only has to be good: those that look free first, the nearest first, and where nothing is known
an order of each head's own, or all heads would run after the same peer.
How: pure functions over one look at the DHT. Two peers that can only dial out cannot be neighbours,
since no stream could be opened between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dilocox.dht.records import StageRecord
from dilocox.dht.swarm_view import own_order

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
    round_trips: measured, in seconds, by peer. helped: peers that the head has trained with.
        said_no: when a peer did so last, of any clock. avoid: peers not to ask now, such as the
        dead.
    """

    me: str
    num_stages: int
    members: Mapping[int, bool]
    round_trips: Mapping[str, float] = field(default_factory=dict[str, float])
    helped: Collection[str] = ()
    said_no: Mapping[str, float] = field(default_factory=dict[str, float])
    avoid: Collection[str] = ()


def candidates(records: Records, vacancies: Vacancies) -> dict[int, tuple[str, ...]]:
    """For every vacant stage the peers to ask, the best first; empty where there is nobody.

    Spares first; then those that have helped, then those that never said no or longest ago: a crowd
    may say that it is spare, near, and busy just now. Then nearest first, those of unknown round
    trip last. Where other heads can only dial out, so that only peers that can be reached may stand
    beside them, those come last of all spares.
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
        if stage in records and not any(record.can_train for record in records[stage].values())
    )


def cannot_be_reached(here: Mapping[str, StageRecord]) -> bool:
    """Whether a stage has peers and all of them can only dial out.

    Then no two of them can average, and nobody that only dials out finds a neighbour in it.
    """
    hosts = [record for record in here.values() if record.can_train]
    return bool(hosts) and all(record.client_mode for record in hosts)


def _obstacle(peer: str, stage: int, record: StageRecord, vacancies: Vacancies) -> str:
    """Why not to ask this peer, as one of `_WORDS`; empty if nothing stands against it."""
    members = vacancies.members
    if peer == vacancies.me or not record.present:
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
) -> tuple[bool, bool, bool, float, float, bytes]:
    drawn = own_order(vacancies.me, peer)
    wanted_elsewhere = generous and not record.client_mode
    round_trip_s = vacancies.round_trips.get(peer, math.inf)
    new, said_no = peer not in vacancies.helped, vacancies.said_no.get(peer, -math.inf)
    return record.state != "spare", wanted_elsewhere, new, said_no, round_trip_s, drawn
