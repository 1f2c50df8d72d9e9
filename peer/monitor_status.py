"""What the status page shows, as plain values for JSON. Pure: from a look and what is remembered.

No address of a peer is in it, and every text that a peer chose is cut to one short line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from dilocox import __version__
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ReplicaRecord, StageRecord
from dilocox.peer.health import Health, StageHealth, SwarmHealth, health_of
from dilocox.peer.monitor_history import SwarmHistory, cut
from dilocox.peer.monitor_look import SwarmLook, finite
from dilocox.peer.view import SwarmView
from dilocox.pipeline.candidates import cannot_be_reached

MAX_PEERS_SHOWN = 64  # of a stage; the others are counted
MAX_REPLICAS_SHOWN = 64
MAX_CONTRIBUTORS_SHOWN = 50
MAX_FAULTS_SHOWN = 12
SHORT = 24  # letters of a version or codec


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What does not change while the monitor runs."""

    run: str
    invite: str
    manifest: Manifest


def swarm_health(manifest: Manifest, look: SwarmLook, history: SwarmHistory) -> Health:
    """How the swarm is."""
    deadlines = manifest.deadlines
    view = SwarmView(me="", stages=look.stages, run_claims=look.claims.get(0, {}))
    stages: list[StageHealth] = []
    for number, chain in enumerate(history.stages):
        present = look.present(number).values()
        joining = sum(record.state == "joining" for record in present)
        claimed = any(claim.round >= 0 for claim in look.claims.get(number, {}).values())
        stages.append(
            StageHealth(
                hosts=len(present) - joining,
                joining=joining,
                rounds=max(chain.rounds, int(claimed)),
                progress_at=chain.progress_at,
            )
        )
    return health_of(
        SwarmHealth(
            now=look.at,
            watched_since=history.watched_since,
            stages=stages,
            replicas=len(look.replicas),
            round_s=_round_s(manifest, look, history),
            patience_s=deadlines.matchmaking_s + 2 * (deadlines.exchange_s + deadlines.vote_s),
            ended=manifest.operation.state == "ended"
            or (bool(look.claims.get(0)) and view.says_ended(manifest.end_tokens)),
            paused=manifest.operation.state == "paused",
            reachable=look.reachable,
            unreachable_since=history.seen_at,
            bootstraps=any(look.bootstraps.values()),
            held_at=history.held_at,
        )
    )


def _round_s(manifest: Manifest, look: SwarmLook, history: SwarmHistory) -> float:
    """How long a round takes: as those before, or as many inner steps as it has."""
    usual = max(chain.usual_s for chain in history.stages)
    head = history.stages[0].head
    inner_steps = manifest.rounds.inner_steps if head is None else head.next_inner_steps
    steps = [finite(each.step_s) for each in look.replicas.values()]
    return max(usual, inner_steps * (median(steps) if steps else 0.0))


def status_of(
    facts: RunFacts, look: SwarmLook, history: SwarmHistory, health: Health
) -> dict[str, Any]:
    """Everything that the page draws; see page/status.html."""
    manifest = facts.manifest
    validation, train = history.validation, history.train
    return {
        "run": facts.run,
        "name": manifest.name,
        "version": __version__,
        "invite": facts.invite,
        "now": round(look.at, 3),
        "since": round(history.since, 3),
        "health": {"state": health.state, "sentence": health.sentence, "warns": health.warns},
        "totals": {
            "tokens": history.stages[0].chain_tokens,
            "end_tokens": manifest.end_tokens,
            "tokens_per_s": round(look.tokens_per_s, 2),
            "rounds_per_hour": history.stages[0].per_hour(look.at),
            "peers": sum(len(look.present(stage)) for stage in range(manifest.stages)),
            "replicas": len(look.replicas),
            "waiting": look.waiting_share,
            "validation": None if validation is None else validation[1],
            "validation_round": None if validation is None else validation[0],
            "train": None if train is None else train[1],
            "faults": history.faults_total,
            "joined": history.peers_total,
            "left": history.away,
            "contributors": len(set[str]().union(*(each.tokens for each in history.stages))),
        },
        "bootstraps": list(look.bootstraps.values()),
        "stages": [_stage(number, look, history) for number in range(manifest.stages)],
        "replicas": [
            _replica(head, record)
            for head, record in islice(sorted(look.replicas.items()), MAX_REPLICAS_SHOWN)
        ],
        "losses": [
            [number, *(None if loss is None else round(loss, 5) for loss in row)]
            for number, row in sorted(history.losses.items())
        ],
        "throughput": [[round(at, 1), round(s, 2), n] for at, s, n in history.samples.rows],
        "faults": [
            {"at": round(each.at, 1), "text": each.text}
            for each in islice(reversed(history.faults), MAX_FAULTS_SHOWN)
        ],
        "contributions": _contributions(look, history),
    }


def _stage(number: int, look: SwarmLook, history: SwarmHistory) -> dict[str, Any]:
    present, chain = look.present(number), history.stages[number]
    head = chain.head
    order = sorted(present, key=lambda peer: (_STATE_ORDER.get(present[peer].state, 9), peer))
    return {
        "stage": number,
        "peers": [_peer(peer, present[peer]) for peer in order[:MAX_PEERS_SHOWN]],
        "more": max(0, len(order) - MAX_PEERS_SHOWN),
        "unreachable": cannot_be_reached(present),
        "rounds": chain.rounds,
        "round": None if head is None else head.round,
        "last_round_at": chain.progress_at,
        "record_bytes": None if head is None else head.record_bytes,
        "ranks": None if head is None else head.ranks,
        "inner_steps": None if head is None else head.next_inner_steps,
        "voids": round(history.voids[number], 2),
    }


_STATE_ORDER: Mapping[str, int] = {"training": 0, "spare": 1, "joining": 2}


def _peer(peer: str, record: StageRecord) -> dict[str, Any]:
    return {
        "id": peer,
        "state": record.state,
        "round": record.round,
        "dial_out": record.client_mode,
        "version": cut(record.version, SHORT),
        "blocked": cut(record.blocked),
    }


def _replica(head: str, record: ReplicaRecord) -> dict[str, Any]:
    return {
        "head": head,
        "members": list(record.members),
        "epoch": record.epoch,
        "round": record.round,
        "inner_step": record.inner_step,
        "tokens_per_s": round(finite(record.tokens_per_s), 2),
        "codec": cut(record.codec, SHORT),
    }


def _contributions(look: SwarmLook, history: SwarmHistory) -> list[dict[str, Any]]:
    """Peers by tokens of all their stages' records; `share` is of the tokens of those stages."""
    here = {peer for stage in look.stages for peer in look.present(stage)}
    sums: dict[str, dict[str, Any]] = {}
    for number, chain in enumerate(history.stages):
        for peer, tokens in chain.tokens.items():
            line = sums.setdefault(peer, {"peer": peer, "stages": [], "tokens": 0})
            line["stages"].append(number)
            line["tokens"] += tokens
    ordered = sorted(sums.values(), key=lambda line: (-line["tokens"], line["peer"]))
    total = sum(line["tokens"] for line in ordered)
    return [
        line | {"share": line["tokens"] / total if total else 0.0, "here": line["peer"] in here}
        for line in ordered[:MAX_CONTRIBUTORS_SHOWN]
    ]
