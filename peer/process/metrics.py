"""What can be asked of a running peer over HTTP: figures, health, readiness.

Everything here is read in the threads of those who ask, while the peer trains: nothing waits, takes
a lock for long, or asks another process.

What: `Figures` gathers what is known (`PeerFacts`) when somebody looks. `PeerMetrics`, which alone
knows Prometheus's client library, hears what the reporter tells (peer/training/report.py) and makes
the text of `/metrics`. Base units; labels only of a few values each, never a peer id or a round.
Why: code below returns facts and knows nothing of metrics.
How: what is counted elsewhere is read at each look, so that it is exact then; only what happens in
events is kept here. A figure that is not known yet is left out. The registry is our own, and there
are no `_created` series, which would double their number.
"""

# hivemind and its generated protocol classes carry no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dilocox import __version__
from dilocox.dht.addresses import Reachability
from dilocox.dht.join import Joined
from dilocox.dht.manifest import PROTOCOL_VERSION
from dilocox.peer.averaging.averager import StageAverager, StageBuffers
from dilocox.peer.averaging.connectivity import LocalPeer
from dilocox.peer.averaging.coordinator import Coordinator
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.http_pages import CONTENT_TYPE, Page, Pages, health_page, readiness_page
from dilocox.peer.process.resting import Allowance
from dilocox.peer.state_folder import STATES
from dilocox.peer.training.merge import Outcome
from dilocox.peer.training.report import LoopMeter, Waiting
from dilocox.pipeline.network import Network
from dilocox.pipeline.reservation import Reservation


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What is not told as an event. Counts are since this process started.

    not_ready: why this peer does not take part, or empty.
    tokens, inner_steps: trained; skipped_steps: inner steps that were not taken.
    computing_s: of the stage; waiting_s: by what was waited for.
    sent_bytes, received_bytes: by what they were for.
    refused: messages of others, by who refused them and why.
    round_trips_s: to the neighbours whose links stand ("upper", "lower") and back.
    revision: of the manifest, the newest that this peer follows.
    spares: peers of this stage that are in no replica, as far as this peer knows.
    month_bytes: sent and received in this calendar month; month_limit_bytes: its limit, if any.
    """

    not_ready: str
    tokens: int
    inner_steps: int
    skipped_steps: int
    computing_s: float
    waiting_s: Mapping[Waiting, float]
    sent_bytes: Mapping[str, int]
    received_bytes: Mapping[str, int]
    refused: Mapping[str, int]
    round_trips_s: Mapping[str, float]
    revision: int
    spares: int
    reachability: Reachability
    month_bytes: int
    month_limit_bytes: float | None


OUTCOMES = (*(outcome.value for outcome in Outcome), "void")
EXCHANGE_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
HEAL_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)
Value = float | None

prometheus_client.disable_created_metrics()


@dataclass(frozen=True, kw_only=True)
class Build:
    """What runs here, and for which run."""

    version: str
    run: str
    stage: int


class PeerMetrics(Collector):
    """A listener of the reporter, and what `/metrics` shows.

    numel: values of the stage's vector. facts: called in the thread of whoever looks.
    """

    def __init__(self, *, build: Build, numel: int, facts: Callable[[], PeerFacts]):
        self._build = build
        self._stage = str(build.stage)
        self._numel = numel
        self._facts = facts
        self._status: LoopStatus | None = None
        self._round: Mapping[str, Any] = {}  # the newest committed one
        self._error: float | None = None
        self._committed_at: float | None = None
        self._epoch: int | None = None
        self._registry = CollectorRegistry()
        self._rounds = self._counter("rounds", "Rounds that ended, by outcome.", "outcome")
        self._faults = self._counter(
            "faults", "Members or heads of its replica that this peer lost.", "role", "kind"
        )
        self._started_over = self._counter(
            "started_over", "Times that its weights were not finite, and became the anchor's."
        )
        self._started_over.labels(self._stage)  # shown from the start, with zero
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
        self._registry.register(self)

    def page(self) -> Page:
        """The text of `/metrics`."""
        return Page(body=generate_latest(self._registry), content_type=CONTENT_TYPE)

    # ---- from the reporter, in the thread that trains --------------------------------------------
    def on_status(self, status: LoopStatus) -> None:
        """Where the peer is."""
        self._status = status

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Something happened."""
        match kind:
            case "round":
                self._committed(facts)
            case "void":
                self._rounds.labels(self._stage, "void").inc()
            case "started_over":
                self._started_over.labels(self._stage).inc()
            case "replica":
                self._epoch = facts["epoch"]
            case "fault":  # at the head: one of its members
                self._faults.labels(self._stage, "member", facts["reason"]).inc()
            case "lost":  # at a member: a neighbour
                role = "member" if facts["stage"] > 0 else "head"
                self._faults.labels(self._stage, role, facts["reason"]).inc()
            case "healed":
                self._epoch = facts["epoch"]
                self._heal.labels(self._stage).observe(facts["seconds"])
            case _:
                pass

    def _committed(self, facts: Mapping[str, Any]) -> None:
        self._round, self._committed_at = facts, time.time()
        self._rounds.labels(self._stage, facts["outcome"]).inc()
        if facts["compression_error"] is not None:
            self._error = facts["compression_error"]
        for histogram, name in (
            (self._exchange, "exchange_s"),
            (self._matchmaking, "matchmaking_s"),
        ):
            if facts[name] is not None:
                histogram.labels(self._stage).observe(facts[name])

    # ---- for whoever looks, in a thread of its own -----------------------------------------------
    def describe(self) -> Iterable[Metric]:
        """Nothing: the library would collect for it, before there is anything."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All figures but those that are counted here."""
        facts = self._facts()
        yield from self._of_the_build(facts)
        yield from self._of_the_work(facts)
        yield from self._of_the_status()
        yield from self._of_the_round(facts)
        yield from self._of_the_network(facts)

    def _of_the_build(self, facts: PeerFacts) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "dilocox_build_info",
            "What runs here.",
            labels=("version", "protocol", "run", "stage"),
        )
        run = self._build.run[:12]
        build.add_metric((self._build.version, str(PROTOCOL_VERSION), run, self._stage), 1)
        yield build
        yield self._gauge("ready", "Whether this peer takes part in the run.", not facts.not_ready)
        yield self._family(
            GaugeMetricFamily,
            "reachable",
            "How others reach this peer.",
            ("kind",),
            {(kind,): float(kind == facts.reachability) for kind in get_args(Reachability)},
        )
        yield self._gauge(
            "manifest_revision", "Of the manifest that this peer follows.", facts.revision
        )
        yield self._gauge("spares", "Peers of this stage that are in no replica.", facts.spares)

    def _of_the_work(self, facts: PeerFacts) -> Iterator[Metric]:
        yield self._count("tokens", "Tokens that this peer trained on.", facts.tokens)
        yield self._count("inner_steps", "Inner steps taken.", facts.inner_steps)
        yield self._count(
            "inner_steps_skipped",
            "Inner steps not taken, because something was not finite.",
            facts.skipped_steps,
        )
        yield self._count("computing_seconds", "Time the stage computed.", facts.computing_s)
        yield self._family(
            CounterMetricFamily,
            "waiting_seconds",
            "Time this peer waited, by what for.",
            ("reason",),
            _by_name(facts.waiting_s),
        )

    def _of_the_status(self) -> Iterator[Metric]:
        status = self._status
        state = "joining" if status is None else status.state
        yield self._family(
            GaugeMetricFamily,
            "peer_state",
            "Where this peer is.",
            ("state",),
            {(each,): float(each == state) for each in STATES},
        )
        if status is None:
            return
        yield self._gauge("round", "The round this peer is in.", status.round)
        yield self._gauge("round_inner_steps", "H of the round.", status.inner_steps)
        yield self._gauge("in_replica", "Whether it is in a replica.", bool(status.head))
        yield self._gauge("train_loss", "Smoothed, in nats a token.", status.train_loss)
        yield self._gauge(
            "validation_loss", "Of the newest anchor evaluated, in nats a token.", status.val_loss
        )

    def _of_the_round(self, facts: PeerFacts) -> Iterator[Metric]:
        newest = self._round
        yield self._gauge("group_size", "Members of the last record.", newest.get("members"))
        spans = zip(("min", "median", "max"), newest.get("ranks") or (), strict=False)
        yield self._family(
            GaugeMetricFamily,
            "rank",
            "Ranks of the factored tensors in the last record.",
            ("statistic",),
            {(name,): float(rank) for name, rank in spans},
        )
        payload_bytes = newest.get("payload_bytes")
        yield self._gauge(
            "compression_ratio",
            "Bytes of the stage in fp32 over payload bytes of the last record, one direction.",
            4 * self._numel / payload_bytes if payload_bytes else None,
        )
        yield self._gauge(
            "compression_error_ratio",
            "Of the last counted round: what the codec left of the message, over the message.",
            self._error,
        )
        yield self._gauge("residual_norm", "After the last merge.", newest.get("residual_norm"))
        yield self._gauge(
            "last_round_timestamp_seconds", "When a record was merged last.", self._committed_at
        )
        yield self._gauge("replica_epoch", "Of its replica, or the last one.", self._epoch)

    def _of_the_network(self, facts: PeerFacts) -> Iterator[Metric]:
        counts = {
            (direction, kind): float(count)
            for direction, kinds in (("sent", facts.sent_bytes), ("received", facts.received_bytes))
            for kind, count in kinds.items()
        }
        yield self._family(
            CounterMetricFamily,
            "bytes",
            "Payload bytes, by what they were for.",
            ("direction", "kind"),
            counts,
        )
        yield self._count(
            "state_download_bytes",
            "Of states that this peer took from others.",
            facts.received_bytes.get("state", 0),
        )
        # in the names of resting.py, which shows them while the peer rests
        text = "Sent and received in this calendar month (UTC)."
        yield self._gauge("month_traffic_bytes", text, facts.month_bytes)
        yield self._gauge("month_traffic_limit_bytes", "Its limit.", facts.month_limit_bytes)
        yield self._family(
            GaugeMetricFamily,
            "hop_round_trip_seconds",
            "To a neighbour in the replica and back.",
            ("direction",),
            _by_name(facts.round_trips_s),
        )
        yield self._family(
            CounterMetricFamily,
            "refused",
            "Messages of others that were refused, by who refused them and why.",
            ("reason",),
            _by_name(facts.refused),
        )

    # ---- pieces ----------------------------------------------------------------------------------
    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dilocox_{name}", text, ("stage", *labels), registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = EXCHANGE_BUCKETS_S
    ) -> Histogram:
        histogram = Histogram(
            f"dilocox_{name}_seconds", text, ("stage",), buckets=buckets, registry=self._registry
        )
        histogram.labels(self._stage)  # shown from the start, with zeros
        return histogram

    def _count(self, name: str, text: str, value: float) -> CounterMetricFamily:
        return self._family(CounterMetricFamily, name, text, (), {(): value})

    def _gauge(self, name: str, text: str, value: Value) -> GaugeMetricFamily:
        values = {} if value is None else {(): float(value)}
        return self._family(GaugeMetricFamily, name, text, (), values)

    def _family(
        self,
        kind: type[F],
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[tuple[str, ...], float],
    ) -> F:
        family = kind(f"dilocox_{name}", text, labels=("stage", *labels))
        for given, value in values.items():
            family.add_metric((self._stage, *given), value)
        return family


def _by_name(values: Mapping[Any, float]) -> dict[tuple[str, ...], float]:
    return {(name,): float(value) for name, value in values.items()}


class Figures:
    """Of one peer. `metrics` is to hear what its reporter tells."""

    def __init__(
        self,
        *,
        local: LocalPeer,
        joined: Joined,
        averager: StageAverager,
        buffers: StageBuffers,
        meter: LoopMeter,
        coordinator: Coordinator,
        reservation: Reservation,
        network: Network,
        allowance: Allowance,
    ):
        self._local = local
        self._joined = joined
        self._averager = averager
        self._buffers = buffers
        self._meter = meter
        self._coordinator = coordinator
        self._reservation = reservation
        self._network = network
        self._allowance = allowance
        self.metrics = PeerMetrics(
            build=Build(version=__version__, run=local.run, stage=local.stage),
            numel=local.layout.numel,
            facts=self.facts,
        )

    def pages(self) -> Pages:
        """What is served; call it in the thread that trains, once all others run."""
        signs = {
            "training": threading.current_thread().is_alive,
            "coordinator": self._coordinator.is_alive,
            "replica network": lambda: self._network.running,
            "averaging process": lambda: bool(self._averager.is_alive()),
            "DHT process": lambda: bool(self._joined.dht.running),
        }
        return {
            "/metrics": self.metrics.page,
            "/healthz": lambda: health_page(signs),
            "/readyz": lambda: readiness_page(self._not_ready),
        }

    def facts(self) -> PeerFacts:
        """What the metrics ask for."""
        meter, network, swarm = self._meter, self._network, self._joined.swarm
        refused = {
            "pipeline": network.refused + self._reservation.refused.copy(),
            "averaging": self._buffers.refused.read(),
            "dht": swarm.refused.copy(),
        }
        hosts = self._coordinator.view.stage.values()
        return PeerFacts(
            not_ready=self._not_ready,
            tokens=meter.tokens,
            inner_steps=meter.inner_steps,
            skipped_steps=meter.skipped_steps,
            computing_s=meter.computing_s(),
            waiting_s=dict(meter.waiting_s),
            sent_bytes=self._buffers.sent.read()
            | {"activations": network.sent_bytes, "dht": swarm.sent_bytes},
            received_bytes=self._buffers.received.read()
            | {"activations": network.received_bytes, "dht": swarm.received_bytes},
            refused={
                f"{source}_{reason}": count
                for source, counts in refused.items()
                for reason, count in counts.items()
            },
            round_trips_s=network.round_trips_s(),
            revision=self._coordinator.revision,
            spares=sum(record.state == "spare" for record in hosts),
            reachability=self._local.reachability,
            month_bytes=self._allowance.used_bytes,
            month_limit_bytes=self._allowance.limit_bytes,
        )

    @property
    def _not_ready(self) -> str:
        """Why this peer does not take part, or empty."""
        state = self._meter.state
        return "" if state == "training" else state
