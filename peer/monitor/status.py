"""What a monitor shows of the swarm. Pure: from a look and what is remembered. Apart from
monitor.py, which looks and serves.

`status_of` is for the status page: plain values for JSON. No address of a peer is in it, and every
text that a peer chose is cut to one short line.

`metrics_of` is for Prometheus: metrics by run, stage and rank. Volunteers behind address
translation cannot be scraped, so this is what the dashboard reads. No peer id and no text of a peer
is a label, but for versions, which are few and of a fixed form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from statistics import median_low
from typing import Any

from dilocox import PROJECT_URL, __version__
from dilocox.dht.names import MAX_NAME, cut
from dilocox.dht.records import ReplicaRecord, StageRecord, stage_figures
from dilocox.peer.chain.round_history import ModelSample
from dilocox.peer.chain.stated_facts import finite
from dilocox.peer.chain.summary import ChainRound, grouped
from dilocox.peer.http_pages import RUN_LABEL, MetricSpec, MetricTable, Value, one_of
from dilocox.peer.monitor.health import STATES, Health
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.look import SwarmLook
from dilocox.pipeline.candidates import cannot_be_reached

PREFIX = "dilocox_swarm_"
PEER_STATES = ("training", "spare", "joining")  # as they are shown
MAX_RANKS = 50
MAX_VERSIONS = 10
OTHER = "other"
MAX_PEERS_SHOWN = 64  # of a stage; the others are counted
MAX_REPLICAS_SHOWN = 64
MAX_CONTRIBUTORS_SHOWN = 50
MAX_EVENTS_SHOWN = 40
SAMPLES_SHOWN = (0, 1, 2, 4, 8, 16, 32)  # the newest first; and the oldest
SHORT = 24  # letters of a version or codec

_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,24}")


@dataclass(frozen=True)
class Seen:
    """All that one look says; what the metrics and the page are made of."""

    run: str
    invite: str
    look: SwarmLook
    history: SwarmHistory
    health: Health

    @property
    def stages(self) -> range:
        """Of the run."""
        return range(len(self.history.stages))

    @cached_property
    def contributions(self) -> list[dict[str, Any]]:
        """Of all peers that are in a record of any stage."""
        return self.history.contributions(self.look.manifest.batch.tokens_per_step)


def metrics_of(seen: Seen) -> MetricTable[Seen]:
    """What `/metrics` says."""
    labels = {"run": seen.run[:RUN_LABEL]}
    return MetricTable(specs=METRICS, source=lambda: seen, prefix=PREFIX, labels=labels)


def _count(seen: Seen, stage: int, state: str) -> int:
    return sum(record.state == state for record in seen.look.present(stage).values())


def _compression_error(present: Mapping[str, StageRecord]) -> Value:
    told = (record.compression_error for record in present.values())
    errors = [each for each in told if each is not None]
    return median_low(errors) if errors else None


def _ranks(seen: Seen) -> Mapping[tuple[int, str], Value]:
    return {
        (stage, statistic): rank
        for stage, chain in enumerate(seen.history.stages)
        if chain.head is not None
        for statistic, rank in zip(("min", "median", "max"), chain.head.ranks or (), strict=False)
    }


def _versions(seen: Seen) -> Mapping[str, int]:
    told = Counter(
        record.version if _VERSION.fullmatch(record.version) else OTHER
        for stage in seen.stages
        for record in seen.look.present(stage).values()
    )
    shown = Counter(dict(told.most_common(MAX_VERSIONS)))
    shown[OTHER] += told.total() - shown.total()
    return +shown


_Spec = MetricSpec[Seen]


def _by_stage(name: str, text: str, read: Callable[[Seen, int], Value]) -> _Spec:
    return _Spec(name, text, lambda s: {stage: read(s, stage) for stage in s.stages}, ("stage",))


def _of_head(name: str, text: str, read: Callable[[ChainRound], Value]) -> _Spec:
    """By stage, of its newest round."""

    def read_head(seen: Seen, stage: int) -> Value:
        head = seen.history.stages[stage].head
        return None if head is None else read(head)

    return _by_stage(name, text, read_head)


def _info(seen: Seen) -> Mapping[tuple[str, str, str], Value]:
    manifest = seen.look.manifest
    model = manifest.preset or str(manifest.model["model_type"])
    return {(manifest.name, __version__, cut(model, SHORT)): 1}


METRICS = (
    _Spec(
        "info",
        "What is trained: the run's name, the monitor's version, the preset or model family.",
        _info,
        ("name", "version", "model"),
    ),
    _Spec(
        "end_tokens",
        "The run ends when it has trained on so many tokens.",
        lambda s: s.look.manifest.end_tokens,
    ),
    _Spec("healthy", "1 if the run trains, is paused or has ended.", lambda s: s.health.good),
    _Spec(
        "state",
        "1 for the state that the status page says, 0 for others.",
        lambda s: one_of(s.health.state, STATES),
        ("state",),
    ),
    _Spec("replicas", "Replicas that train now.", lambda s: len(s.look.replicas)),
    _Spec(
        "tokens_per_second",
        "Tokens a second that all replicas state.",
        lambda s: s.look.tokens_per_s,
    ),
    _Spec(
        "manifest_revision",
        "Revision of the operator's newest manifest.",
        lambda s: s.look.manifest.operation.revision,
    ),
    _Spec(  # it falls when the operator goes back
        "tokens_total",
        "Tokens behind the records of stage 0.",
        lambda s: s.history.stages[0].chain_tokens,
    ),
    _Spec(
        "validation_loss",
        "Validation loss of the newest round that has one, in nats a token.",
        lambda s: s.history.validation and s.history.validation[1],
    ),
    _Spec(
        "train_loss",
        "Median train loss of the newest round that has one, in nats a token.",
        lambda s: s.history.train and s.history.train[1],
    ),
    _Spec(
        "losses_not_finite",
        "Heads whose newest validation loss is not finite.",
        lambda s: s.history.losses_not_finite,
    ),
    _Spec(
        "waiting_ratio",
        "Share of their last round that replicas waited for averages, a mean.",
        lambda s: s.look.waiting_share,
    ),
    _Spec("faults_total", "Faults that heads of replicas told.", lambda s: s.history.faults_total),
    _Spec(
        "joined_total",
        "Times that a peer came into view, for the first time or again.",
        lambda s: s.history.joined_total,
    ),
    _Spec("left_total", "Times that a peer left or went silent.", lambda s: s.history.left_total),
    _Spec(
        "bootstrap_up",
        "1 if the bootstrap answers, in invite's order.",
        lambda s: dict(enumerate(s.look.bootstraps.values())),
        ("bootstrap",),
    ),
    _Spec("peer_versions", "Peers by version of their dilocox.", _versions, ("version",)),
    # ---- the peers of a stage
    _Spec(
        "peers",
        "Peers in view, by stage and state.",
        lambda s: {(n, state): _count(s, n, state) for n in s.stages for state in PEER_STATES},
        ("stage", "state"),
    ),
    _by_stage(
        "spares", "Peers of a stage that are in no replica.", lambda s, n: _count(s, n, "spare")
    ),
    _by_stage(
        "blocked",
        "1 if this stage stops the run for want of a peer.",
        lambda s, n: n in s.health.blocked,
    ),
    _by_stage(
        "stage_unreachable",
        "1 if all peers of this stage can only dial out.",
        lambda s, n: cannot_be_reached(s.look.present(n)),
    ),
    _by_stage(
        "voids",
        "Void rounds that peers told, a mean over the stage's peers.",
        lambda s, n: s.history.voids[n],
    ),
    _by_stage(
        "compression_error_ratio",
        "What the codec left unsent of a peer's newest message, by norm, a median over peers.",
        lambda s, n: _compression_error(s.look.present(n)),
    ),
    # ---- the chain of a stage
    _by_stage(
        "rounds_total",
        "Records of committed rounds that were seen.",
        lambda s, n: s.history.stages[n].records_seen,
    ),
    _by_stage(
        "rounds_per_hour",
        "Rounds an hour, over the last hour.",
        lambda s, n: s.history.stages[n].per_hour(s.look.at),
    ),
    _by_stage(
        "last_round_timestamp_seconds",
        "When the newest round was seen to come.",
        lambda s, n: s.history.stages[n].progress_at,
    ),
    _of_head("round", "Number of the newest committed round.", lambda head: head.round),
    _of_head(
        "sitting_out",
        "Peers that take no part in the next round, as what they sent was left out or came late.",
        lambda head: len(head.sits_out),
    ),
    _of_head("round_bytes", "Bytes of the newest round record.", lambda head: head.record_bytes),
    _of_head(
        "inner_steps",
        "H, inner steps of the next round, as the newest record says.",
        lambda head: head.next_inner_steps,
    ),
    _Spec(
        "rank",
        "Ranks of the newest round record, over its matrices.",
        _ranks,
        ("stage", "statistic"),
    ),
    # ---- contributions
    _Spec(
        "contribution_tokens",
        "Tokens of a peer in the records of stage 0, by its rank.",
        lambda s: {
            rank: tokens
            for rank, (_, tokens) in enumerate(
                s.history.stages[0].tokens.most_common(MAX_RANKS), start=1
            )
        },
        ("rank",),
    ),
    _Spec(
        "contributors", "Peers that are in a record of any stage.", lambda s: len(s.contributions)
    ),
)


# ---- the status page -----------------------------------------------------------------------------
def status_of(seen: Seen) -> dict[str, Any]:
    """Everything that the page draws; see page/status.html."""
    manifest, look, history, health = seen.look.manifest, seen.look, seen.history, seen.health
    validation, train = history.validation, history.train
    replicas = sorted(look.replicas.items())[:MAX_REPLICAS_SHOWN]
    members = {peer for _, replica in replicas for peer in replica.members}
    curve = [
        [round(value, 5) if isinstance(value, float) else value for value in point]
        for _, point in sorted(history.curve.points.items())
    ]
    return {
        "run": seen.run,
        "name": manifest.name,
        "version": __version__,
        "invite": seen.invite,
        "now": round(look.at, 3),
        "since": round(history.since, 3),
        "health": {"state": health.state, "sentence": health.sentence, "warns": health.warns},
        "totals": {
            "tokens": history.stages[0].chain_tokens,
            "end_tokens": manifest.end_tokens,
            "tokens_per_s": round(look.tokens_per_s, 2),
            "rounds_per_hour": history.stages[0].per_hour(look.at),
            "peers": sum(len(look.present(stage)) for stage in seen.stages),
            "replicas": len(look.replicas),
            "waiting": look.waiting_share,
            "validation": None if validation is None else validation[1],
            "validation_round": None if validation is None else validation[0],
            "train": None if train is None else train[1],
            "faults": history.faults_total,
            "joined": history.peers_total,
            "left": max(0, history.peers_total - len(history.present)),
            "contributors": len(seen.contributions),
        },
        "bootstraps": list(look.bootstraps.values()),
        "stages": [_stage(number, look, history, members) for number in seen.stages],
        "replicas": [_replica(head, record) for head, record in replicas],
        "curve": curve,
        "throughput": [[round(at, 1), round(s, 2), n] for at, s, n in history.samples.rows],
        "rollbacks": [number for _, number in manifest.operation.rollbacks],
        "events": [
            {"at": round(each.at, 1), "kind": each.kind, "text": each.text, "count": each.count}
            for each in islice(reversed(history.events.rows), MAX_EVENTS_SHOWN)
        ],
        "trained": _trained(seen),
        "samples": _samples(history.samples_of(manifest.samples.prompt)),
        "contributions": seen.contributions[:MAX_CONTRIBUTORS_SHOWN],
        "names": grouped(seen.contributions, "name")[:MAX_CONTRIBUTORS_SHOWN],
        "teams": grouped(seen.contributions, "team")[:MAX_CONTRIBUTORS_SHOWN],
    }


def _trained(seen: Seen) -> dict[str, Any]:
    """What the run trains, as its operator signed it."""
    manifest = seen.look.manifest
    return {
        "about": manifest.about,
        "licence": manifest.licence,
        "model": cut(str(manifest.model["model_type"]), SHORT),
        "preset": manifest.preset,
        "checkpoint": cut(manifest.initial.source),
        "parameters": seen.history.parameters,
        "stages": manifest.stages,
        "data": [cut(each.source) for each in (manifest.data, *manifest.data.more)],
        "project": PROJECT_URL,
    }


def _samples(rows: Sequence[ModelSample]) -> list[dict[str, Any]]:
    found = [rows[n] for n in SAMPLES_SHOWN if n < len(rows)]
    shown = [each._asdict() for each in dict.fromkeys([*found, *rows[-1:]])]
    return [{name: each[name] for name in each if name != "rules"} for each in shown]


def _stage(
    number: int, look: SwarmLook, history: SwarmHistory, members: Collection[str]
) -> dict[str, Any]:
    """members: of the replicas that are shown, which come first."""
    present, chain = look.present(number), history.stages[number]
    head = chain.head
    states = {peer: PEER_STATES.index(record.state) for peer, record in present.items()}
    order = sorted(present, key=lambda peer: (peer not in members, states[peer], peer))
    return {
        "stage": number,
        "peers": [_peer(peer, present[peer]) for peer in order[:MAX_PEERS_SHOWN]],
        "sits_out": [] if head is None else list(head.sits_out[:MAX_PEERS_SHOWN]),
        "more": max(0, len(order) - MAX_PEERS_SHOWN),
        "spares": sum(record.state == "spare" for record in present.values()),
        "unreachable": cannot_be_reached(present),
        "rounds": chain.rounds,
        "round": None if head is None else head.round,
        "last_round_at": chain.progress_at,
        "record_bytes": None if head is None else head.record_bytes,
        "ranks": None if head is None else head.ranks,
        "inner_steps": None if head is None else head.next_inner_steps,
        "voids": round(history.voids[number], 2),
    }


def _peer(peer: str, record: StageRecord) -> dict[str, Any]:
    return {
        "id": peer,
        "name": cut(record.name, MAX_NAME),
        "team": cut(record.team, MAX_NAME),
        "state": record.state,
        "round": record.round,
        "dial_out": record.client_mode,
        "version": cut(record.version, SHORT),
        "blocked": cut(record.blocked),
        "figures": {
            name.removesuffix("_share"): min(1.0, finite(told))
            for name in stage_figures()
            if (told := getattr(record, name)) is not None
        },
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
