"""The whole swarm for Prometheus, as a monitor sees it: figures by run, stage and rank.

Volunteers behind address translation cannot be scraped, so this is what the dashboard reads. No
peer id and no text of a peer is a label, but for versions, which are few and of a fixed form. The
text format is written here: it is short, and the client library knows one process's own figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

from dilocox.peer.health import STATES, Health
from dilocox.peer.monitor_history import SwarmHistory
from dilocox.peer.monitor_look import SwarmLook
from dilocox.peer.monitor_rounds import StageRounds
from dilocox.pipeline.candidates import cannot_be_reached

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dilocox_swarm_"
PEER_STATES = ("joining", "spare", "training")
RUN_LABEL = 12  # letters of the run id
MAX_RANKS = 50
MAX_VERSIONS = 10
OTHER = "other"

_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,24}")


@dataclass
class Family:
    """A metric: labels and value of each of its series."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    series: list[tuple[Mapping[str, object], float]] = field(
        default_factory=list[tuple[Mapping[str, object], float]]
    )

    def add(self, value: float | None, **labels: object) -> None:
        """One more series; nothing where the value is not known."""
        if value is not None and not math.isnan(value):
            self.series.append((labels, value))

    def lines(self, run: str, prefix: str = PREFIX) -> Iterable[str]:
        """In Prometheus's text format."""
        name = prefix + self.name
        yield f"# HELP {name} {self.help}"
        yield f"# TYPE {name} {self.kind}"
        for labels, value in self.series:
            told = ",".join(f'{key}="{text}"' for key, text in [("run", run), *labels.items()])
            yield f"{name}{{{told}}} {value!r}"


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
