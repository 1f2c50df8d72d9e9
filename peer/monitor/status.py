"""What a monitor shows of the swarm. Pure: from a look and what is remembered.

`status_of` is for the status page: plain values for JSON. No address of a peer is in it, and every
text that a peer chose is cut to one short line.

`exposition` is for Prometheus: figures by run, stage and rank. Volunteers behind address
translation cannot be scraped, so this is what the dashboard reads. No peer id and no text of a peer
is a label, but for versions, which are few and of a fixed form. The text format is our own
(http_pages.py): it is short, and the client library knows one process's own figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median, median_low
from typing import Any, Literal

from dilocox import __version__
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ReplicaRecord, StageRecord
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.http_pages import Family
from dilocox.peer.monitor.health import STATES, Health, StageHealth, SwarmHealth, health_of
from dilocox.peer.monitor.history import StageRounds, SwarmHistory, cut
from dilocox.peer.monitor.look import SwarmLook, finite
from dilocox.pipeline.placement import cannot_be_reached

PEER_STATES = ("joining", "spare", "training")
MAX_RANKS = 50
MAX_VERSIONS = 10
OTHER = "other"

_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,24}")


def exposition(run: str, look: SwarmLook, history: SwarmHistory, health: Health) -> bytes:
    """Everything as Prometheus reads it; run: the label's value."""
    families = [
        *_swarm(look, history, health),
        *_stages(look, history, health),
        *_chains(look, history),
        *_contribution(history),
    ]
    lines = [line for family in families if family.series for line in family.lines(run)]
    return ("\n".join(lines) + "\n").encode()


def _swarm(look: SwarmLook, history: SwarmHistory, health: Health) -> Iterable[Family]:
    def one(
        name: str, text: str, value: float | None, kind: Literal["gauge", "counter"] = "gauge"
    ) -> Family:
        family = Family(name, kind, text)
        family.add(value)
        return family

    validation, train = history.validation, history.train
    yield one("healthy", "1 if the run trains, is paused or has ended.", float(health.good))
    states = Family("state", "gauge", "1 for the state that the status page says, 0 for others.")
    for state in STATES:
        states.add(float(state == health.state), state=state)
    yield states
    yield one("replicas", "Replicas that train now.", len(look.replicas))
    yield one("tokens_per_second", "Tokens a second that all replicas state.", look.tokens_per_s)
    revision = "Of the operator's newest manifest."
    yield one("manifest_revision", revision, look.revision)
    tokens = history.stages[0].chain_tokens  # it falls when the operator goes back
    yield one("tokens_total", "Tokens behind the records of stage 0.", tokens, "counter")
    loss = "of the newest round that has one, in nats a token."
    yield one("validation_loss", f"Validation loss {loss}", validation and validation[1])
    yield one("train_loss", f"Mean train loss {loss}", train and train[1])
    lost = "Heads whose newest validation loss is not finite."
    yield one("losses_not_finite", lost, history.losses_not_finite)
    waiting = "Share of their last round that replicas waited for averages, a mean."
    yield one("waiting_ratio", waiting, look.waiting_share)
    faults = "Faults that heads of replicas told."
    yield one("faults_total", faults, history.faults_total, "counter")
    came = "Times that a peer came into view, for the first time or again."
    yield one("joined_total", came, history.joined_total, "counter")
    went = "Times that a peer left or went silent."
    yield one("left_total", went, history.left_total, "counter")
    bootstraps = Family("bootstrap_up", "gauge", "1 if the bootstrap answers, in invite's order.")
    for index, answers in enumerate(look.bootstraps.values()):
        bootstraps.add(float(answers), bootstrap=index)
    yield bootstraps
    versions = Family("peer_versions", "gauge", "Peers by version of their dilocox.")
    for version, count in _versions(look, len(history.stages)).items():
        versions.add(count, version=version)
    yield versions


def _stages(look: SwarmLook, history: SwarmHistory, health: Health) -> Iterable[Family]:
    peers = Family("peers", "gauge", "Peers in view, by stage and state.")
    spares = Family("spares", "gauge", "Peers of a stage that are in no replica.")
    blocked = Family("blocked", "gauge", "1 if this stage stops the run for want of a peer.")
    unreachable = Family(
        "stage_unreachable", "gauge", "1 if all peers of this stage can only dial out."
    )
    voids = Family("voids", "gauge", "Void rounds that peers told, a mean over the stage's peers.")
    error = Family(
        "compression_error_ratio",
        "gauge",
        "What the codec left unsent of a peer's newest message, by norm, a median over peers.",
    )
    for stage in range(len(history.stages)):
        states = Counter(record.state for record in look.present(stage).values())
        for state in PEER_STATES:
            peers.add(states[state], stage=stage, state=state)
        spares.add(states["spare"], stage=stage)
        blocked.add(float(stage in health.blocked), stage=stage)
        unreachable.add(float(cannot_be_reached(look.present(stage))), stage=stage)
        voids.add(history.voids[stage], stage=stage)
        stated = [record.compression_error for record in look.present(stage).values()]
        if errors := [each for each in stated if each is not None]:
            error.add(median_low(errors), stage=stage)
    return peers, spares, blocked, unreachable, voids, error


def _chains(look: SwarmLook, history: SwarmHistory) -> Iterable[Family]:
    rounds = Family("rounds_total", "counter", "Records of committed rounds that were seen.")
    per_hour = Family("rounds_per_hour", "gauge", "Rounds an hour, over the last hour.")
    number = Family("round", "gauge", "Number of the newest committed round.")
    size = Family("round_bytes", "gauge", "Bytes of the newest round record.")
    rank = Family("rank", "gauge", "Ranks of the newest round record, over its matrices.")
    steps = "H, inner steps of the next round, as the newest record says."
    inner_steps = Family("inner_steps", "gauge", steps)
    last = Family(
        "last_round_timestamp_seconds", "gauge", "When the newest round was seen to come."
    )
    for stage, chain in enumerate(history.stages):
        rounds.add(chain.records_seen, stage=stage)
        per_hour.add(chain.per_hour(look.at), stage=stage)
        last.add(chain.progress_at, stage=stage)
        head = chain.head
        if head is None:
            continue
        number.add(head.round, stage=stage)
        size.add(head.record_bytes, stage=stage)
        inner_steps.add(head.next_inner_steps, stage=stage)
        for statistic, value in zip(("min", "median", "max"), head.ranks or (), strict=False):
            rank.add(value, stage=stage, statistic=statistic)
    return rounds, per_hour, number, size, rank, inner_steps, last


def _contribution(history: SwarmHistory) -> Iterable[Family]:
    shares = Family(
        "contribution_tokens", "gauge", "Tokens of a peer in the records of stage 0, by its rank."
    )
    first: StageRounds = history.stages[0]
    for index, (_, tokens) in enumerate(first.tokens.most_common(MAX_RANKS), start=1):
        shares.add(tokens, rank=index)
    everybody = set[str]().union(*(each.tokens for each in history.stages))
    contributors = Family("contributors", "gauge", "Peers that are in a record of any stage.")
    contributors.add(len(everybody))
    return shares, contributors


def _versions(look: SwarmLook, stages: int) -> Mapping[str, int]:
    told = Counter(
        record.version if _VERSION.fullmatch(record.version) else OTHER
        for stage in range(stages)
        for record in look.present(stage).values()
    )
    shown = dict(told.most_common(MAX_VERSIONS))
    rest = sum(told.values()) - sum(shown.values())
    if rest:
        shown[OTHER] = shown.get(OTHER, 0) + rest
    return shown


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
