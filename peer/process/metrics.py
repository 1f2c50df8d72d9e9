"""What can be asked of a running peer over HTTP: metrics, health, readiness. Apart from peer.py: it
is a table, and what serves it.

`METRICS` is a table of what the parts of a peer count, each read where it is counted, in the thread
of the caller, while the peer trains: nothing waits, takes a lock for long, or asks another
process. Only what happens in events is counted here (`PeerMetrics.on_event`), as the reporter tells
it (peer/training/report.py). Base units; labels only of a few values each, never a peer id or a
round; no `_created` series, which would double their number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram

from dilocox.dht.addresses import ReachKind
from dilocox.dht.records import stage_figures
from dilocox.peer.averaging.averager import StageAverager, StageBuffers
from dilocox.peer.averaging.coordinator import Coordinator
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.http_pages import MetricSpec, MetricTable, Pages, by_source, one_of, usual_pages
from dilocox.peer.process.resting import ALWAYS, PREFIX, Allowance
from dilocox.peer.state_folder import STATES
from dilocox.peer.training.merge import Outcome
from dilocox.peer.training.report import LoopMeter
from dilocox.pipeline.network import Network
from dilocox.pipeline.reservation import Reservation

OUTCOMES = (*(outcome.value for outcome in Outcome), "void")
EXCHANGE_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
HEAL_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

prometheus_client.disable_created_metrics()


@dataclass(kw_only=True, eq=False)
class PeerMetrics:
    """What the reporter tells (`on_event`, `on_status`), and the pages of one peer.

    status: the newest. round: the facts of the newest committed round, committed_at: when, in
    Unix time. epoch: of its replica, or the last one.
    """

    local: LocalPeer
    averager: StageAverager
    buffers: StageBuffers
    meter: LoopMeter
    coordinator: Coordinator
    reservation: Reservation
    network: Network
    allowance: Allowance
    status: LoopStatus | None = None
    round: Mapping[str, Any] = field(default_factory=dict[str, Any])
    committed_at: float | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        self.run = self.local.run
        self._stage = str(self.local.stage)
        self._registry = CollectorRegistry()
        self._rounds = self._counter("rounds", "Rounds that ended, by outcome.", "outcome")
        self._faults = self._counter(
            "faults", "Members or heads of its replica that this peer lost.", "role", "kind"
        )
        self._started_over = self._counter(
            "started_over", "Times that its weights were not finite, and became the anchor's."
        ).labels(self._stage)  # shown from the start, with zero
        self._exchange = self._histogram(
            "exchange_duration", "Exchanges of committed rounds, from group to verdict."
        )
        self._matchmaking = self._histogram(
            "matchmaking_duration",
            "From the wish for an averaging group until it stood; the common time of a round is "
            "waited for in it.",
        )
        self._heal = self._histogram(
            "heal_duration",
            "From a member's last sign of life until the replica was whole again.",
            HEAL_BUCKETS_S,
        )
        for outcome in OUTCOMES:
            self._rounds.labels(self._stage, outcome)
        stage = {"stage": self._stage}
        self._registry.register(
            MetricTable(specs=METRICS, source=lambda: self, prefix=PREFIX, labels=stage)
        )

    def pages(self) -> Pages:
        """What is served; call it in the thread that trains, once all others run."""
        signs = {
            "training": threading.current_thread().is_alive,
            "coordinator": self.coordinator.is_alive,
            "replica network": lambda: self.network.running,
            "averaging process": lambda: bool(self.averager.is_alive()),
            "DHT process": lambda: bool(self.local.dht.running),
        }
        return usual_pages(self._registry, signs, lambda: self.not_ready)

    # ---- from the reporter, in the thread that trains --------------------------------------------
    def on_status(self, status: LoopStatus) -> None:
        self.status = status

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        match kind:
            case "round":
                self.round, self.committed_at = facts, time.time()
                self._rounds.labels(self._stage, facts["outcome"]).inc()
                if facts["exchange_s"] is not None:
                    self._exchange.observe(facts["exchange_s"])
                if facts["matchmaking_s"] is not None:
                    self._matchmaking.observe(facts["matchmaking_s"])
            case "void":
                self._rounds.labels(self._stage, "void").inc()
            case "started_over":
                self._started_over.inc()
            case "replica":
                self.epoch = facts["epoch"]
            case "fault":  # at the head: one of its members
                self._faults.labels(self._stage, "member", facts["reason"]).inc()
            case "lost":  # at a member: a neighbour
                role = "member" if facts["stage"] > 0 else "head"
                self._faults.labels(self._stage, role, facts["reason"]).inc()
            case "healed":
                self.epoch = facts["epoch"]
                self._heal.observe(facts["seconds"])
            case _:
                pass

    # ---- for the table, in the threads of callers ------------------------------------------------
    @property
    def not_ready(self) -> str:
        """Why this peer does not take part, or empty."""
        state = self.meter.state
        return "" if state == "training" else state

    @property
    def moved_bytes(self) -> Mapping[tuple[str, str], int]:
        """By direction, and by what they were for."""
        network, swarm = self.network, self.local.swarm
        sent, received = self.buffers.sent.read(), self.buffers.received.read()
        sent |= {"activations": network.sent_bytes, "dht": swarm.sent_bytes}
        received |= {"activations": network.received_bytes, "dht": swarm.received_bytes}
        moved = {("sent", kind): count for kind, count in sent.items()}
        return moved | {("received", kind): count for kind, count in received.items()}

    @property
    def refused(self) -> Mapping[str, int]:
        """Messages of others, by the part that refused them and why."""
        return by_source(
            {
                "pipeline": self.network.refused + self.reservation.refused.copy(),
                "averaging": self.buffers.refused.read(),
                "probe": self.buffers.probe_refused.read(),
                "dht": self.local.swarm.all_refused,
            }
        )

    # ---- pieces ----------------------------------------------------------------------------------
    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("stage", *labels), registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = EXCHANGE_BUCKETS_S
    ) -> Histogram:
        name = f"{PREFIX}{name}_seconds"
        made = Histogram(name, text, ("stage",), buckets=buckets, registry=self._registry)
        return made.labels(self._stage)  # shown from the start, with zeros


_Spec = MetricSpec[PeerMetrics]
METRICS = (
    *ALWAYS,
    _Spec("ready", "Whether this peer takes part in the run.", lambda p: not p.not_ready),
    _Spec(
        "reachable",
        "How others reach this peer.",
        lambda p: one_of(p.local.reach.kind, get_args(ReachKind)),
        ("kind",),
    ),
    _Spec(
        "manifest_revision",
        "Revision of the manifest that this peer follows.",
        lambda p: p.coordinator.revision,
    ),
    _Spec(
        "spares",
        "Peers of this stage that are in no replica.",
        lambda p: sum(host.state == "spare" for host in p.coordinator.view.stage.values()),
    ),
    # ---- its work
    _Spec("tokens_total", "Tokens that this peer trained on.", lambda p: p.meter.tokens),
    _Spec("inner_steps_total", "Inner steps that this peer took.", lambda p: p.meter.inner_steps),
    _Spec(
        "inner_steps_skipped_total",
        "Inner steps not taken, because something was not finite.",
        lambda p: p.meter.skipped_steps,
    ),
    _Spec(
        "computing_seconds_total", "Time that the stage computed.", lambda p: p.meter.computing_s()
    ),
    _Spec(
        "waiting_seconds_total",
        "Time this peer waited, by what for.",
        lambda p: dict(p.meter.waiting_s),
        ("reason",),
    ),
    # ---- where it is
    _Spec(
        "peer_state",
        "What this peer does, one of its states.",
        lambda p: one_of(p.status.state if p.status else "joining", STATES),
        ("state",),
    ),
    _Spec("round", "The round this peer is in.", lambda p: p.status and p.status.round),
    _Spec(
        "round_inner_steps",
        "Planned inner steps of the round (H).",
        lambda p: p.status and p.status.inner_steps,
    ),
    _Spec(
        "in_replica",
        "Whether this peer is in a replica.",
        lambda p: p.status and p.status.head != "",
    ),
    _Spec(
        "train_loss",
        "Training loss, smoothed, in nats a token.",
        lambda p: p.status and p.status.train_loss,
    ),
    *(
        _Spec(
            name.replace("_share", "_ratio"),
            text,
            lambda p, name=name: p.status and getattr(p.status, name),
        )
        for name, text in stage_figures().items()
    ),
    _Spec(
        "validation_loss",
        "Validation loss of the newest evaluated anchor, in nats a token.",
        lambda p: p.status and p.status.val_loss,
    ),
    _Spec("replica_epoch", "Epoch of its replica, or of the last one.", lambda p: p.epoch),
    # ---- the newest committed round
    _Spec("group_size", "Members of the last record.", lambda p: p.round.get("members")),
    _Spec(
        "rank",
        "Ranks of the factored tensors in the last record.",
        lambda p: dict(zip(("min", "median", "max"), p.round.get("ranks") or (), strict=False)),
        ("statistic",),
    ),
    _Spec(
        "compression_ratio",
        "Bytes of the stage in fp32 over payload bytes of the last record, one direction.",
        lambda p: (
            4 * p.local.layout.numel / size if (size := p.round.get("payload_bytes")) else None
        ),
    ),
    _Spec(
        "compression_error_ratio",
        "Norm of what the codec lost of the last message, over the norm of the message.",
        lambda p: p.meter.compression_error,
    ),
    _Spec(
        "residual_norm",
        "Norm of the residual after the last merge.",
        lambda p: p.round.get("residual_norm"),
    ),
    _Spec(
        "last_round_timestamp_seconds",
        "Time of the last merge of a record.",
        lambda p: p.committed_at,
    ),
    # ---- the network
    _Spec(
        "bytes_total",
        "Payload bytes, by what they were for.",
        lambda p: p.moved_bytes,
        ("direction", "kind"),
    ),
    _Spec(
        "state_download_bytes_total",
        "Bytes of states that this peer downloaded from others.",
        lambda p: p.buffers.received.read()["state"],
    ),
    _Spec(
        "hop_round_trip_seconds",
        "Round trip to a neighbour in the replica.",
        lambda p: p.network.round_trips_s(),
        ("direction",),
    ),
    _Spec(
        "refused_total",
        "Messages of others that were refused, by who refused them and why.",
        lambda p: p.refused,
        ("reason",),
    ),
)
