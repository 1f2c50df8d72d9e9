"""What benchmarks/showcase.py leaves behind of a run: plots, samples, and whether it kept its
promises."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean

from benchmarks.report import Column, Report
from tests.swarm.harness import Peer, ProcessSwarm

MOST_VOIDS = 0.2  # of the exchanges: one that a kill falls into, or a start on busy cores
LEAST_ROUNDS = 5
LEAST_FALL = 1.0  # of the loss, nats a byte
MOST_WAITING = 0.05  # for averages
CLOSE = 0.01  # nats: the same weights and windows, other programs


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that was done to the swarm or came of it; round: the newest record then."""

    kind: str
    at_s: float
    round: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the model wrote; round: the newest record when it was asked."""

    at_s: float
    round: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run whose peers have left.

    died_with_tokens: of the killed peer in no record, at most. shares: computing, and waiting
    for averages, of the time of those in a replica at the end, by name. sent_bytes: of the peers'
    links.
    """

    swarm: ProcessSwarm
    minutes: float
    history: Path
    acts: Sequence[Act]
    samples: Sequence[Sample]
    killed: Peer
    newcomer: Peer
    died_with_tokens: int
    shares: Mapping[str, tuple[float, float]]
    sent_bytes: int
    exported_round: int | None
    export_loss: float

    def at(self, kind: str) -> Act:
        """The act of this kind."""
        return next(act for act in self.acts if act.kind == kind)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """holds: None for what is only told."""

    name: str
    seen: str
    holds: bool | None = None


def figures(ended: Ended, out: Path, report: Report) -> bool:
    """Print, draw and write; whether all promises hold."""
    with ended.history.open() as file:
        rows = list(csv.DictReader(file))
    _plot(rows, report)
    samples = [
        f"---- asked after {each.at_s / 60:.1f} minutes, round {each.round}\n{each.text}\n"
        for each in ended.samples
    ]
    (out / "samples.txt").write_text("\n".join(samples))
    report.table(
        [Column("minute", ".1f"), Column("round", "d"), Column("what")],
        [(act.at_s / 60, act.round, act.what) for act in ended.acts],
        title="what happened",
        part="acts",
    )
    promises = _promises(ended, rows)
    shown = {True: "yes", False: "NO", None: ""}
    report.table(
        [Column("promise"), Column("seen"), Column("holds")],
        [(each.name, each.seen, shown[each.holds]) for each in promises],
        title="promises",
        part="promises",
    )
    for sample in (ended.samples[0], ended.samples[-1]):
        report.say(f"asked after {sample.at_s / 60:.1f} minutes it wrote {sample.text!r}")
    return all(each.holds is not False for each in promises)


def _plot(rows: Sequence[Mapping[str, str]], report: Report) -> None:
    times = [datetime.fromisoformat(row["at"].rstrip("Z")) for row in rows if row["at"]]
    first = min(times)

    def minute(row: Mapping[str, str]) -> float:
        return (datetime.fromisoformat(row["at"].rstrip("Z")) - first).total_seconds() / 60

    def line(
        name: str, at: Callable[[Mapping[str, str]], float], needs: str
    ) -> list[tuple[float, float]]:
        return [(at(row), float(row[name])) for row in rows if row[name] and row[needs]]

    def tokens(row: Mapping[str, str]) -> float:
        return float(row["tokens"])

    losses = {name: line(name, tokens, "tokens") for name in ("train", "validation")}
    report.plot("tokens", "loss, nats a byte", losses, part="loss")
    speed = {"both replicas": line("tokens_per_s", minute, "at")}
    report.plot("minutes", "tokens/s", speed, part="throughput")
    there = {name: line(name, minute, "at") for name in ("peers", "replicas")}
    report.plot("minutes", "seen by the bootstrap", there, part="peers")


def _promises(ended: Ended, rows: Sequence[Mapping[str, str]]) -> list[Promise]:
    swarm = ended.swarm
    chains = [swarm.chain(stage) for stage in range(swarm.manifest.stages)]
    rounds, records = len(chains[0]), sum(map(len, chains))
    last = [max(chain) for chain in chains]
    tokens = [_chain_tokens(swarm, stage) for stage in range(len(chains))]
    voids = {(p.stage, event["round"]) for p in swarm.peers for event in p.of_kind("void")}
    losses = {number: loss for peer in swarm.peers for number, loss in peer.losses.items()}
    start = losses[min(losses)]
    told = losses.get(-1 if ended.exported_round is None else ended.exported_round)
    lost = sum(peer.status["lost_tokens"] for peer in swarm.peers)
    unsent = sum(peer.status["unsent_tokens"] for peer in swarm.peers)
    lacking = max(tokens) - min(tokens)
    computing, waiting = (fmean(shares) for shares in zip(*ended.shares.values(), strict=True))
    speeds = [float(row["tokens_per_s"]) for row in rows if row["tokens_per_s"]]
    averaging = sum(line["averaging_bytes"] for peer in swarm.peers for line in peer.rounds)
    same = "; the heads said the same" if told is not None else ""
    return [
        Promise(
            name="rounds are committed",
            seen=f"{rounds} in {ended.minutes:g} minutes, {tokens[0]:,} tokens",
            holds=rounds >= LEAST_ROUNDS,
        ),
        Promise(name="speed", seen=f"{fmean(speeds):,.0f} tokens/s, mean of the rounds"),
        Promise(
            name="few exchanges are void",
            seen=f"{len(voids)} beside {records} records",
            holds=len(voids) <= MOST_VOIDS * records,
        ),
        Promise(
            name="the loss falls",
            seen=f"{start:.3f} -> {ended.export_loss:.3f} nats a byte{same}",
            holds=ended.export_loss < start - LEAST_FALL
            and (told is None or abs(told - ended.export_loss) < CLOSE),
        ),
        Promise(
            name="averages make nobody wait",
            seen=f"{waiting:.1%} of the time; computing {computing:.1%} of it",
            holds=waiting < MOST_WAITING,
        ),
        Promise(
            name="bytes a token",
            seen=f"{ended.sent_bytes / tokens[0]:,.0f} on the links, "
            f"{averaging / tokens[0]:,.1f} of them for averages",
        ),
        Promise(
            name="no peer loses what it has learnt",
            seen=f"{lost:,} tokens lost, {unsent:,} unsent at the end; stage 1 lacks "
            f"{lacking:,}, of at most {ended.died_with_tokens:,} that no record had at the kill",
            holds=lost == unsent == 0 and lacking <= ended.died_with_tokens,
        ),
        Promise(
            name="all stages end at the same round",
            seen=f"rounds {', '.join(map(str, last))}, exported {ended.exported_round}",
            holds=set(last) == {ended.exported_round},
        ),
        Promise(
            name="peers of a stage have equal anchors",
            seen=f"{records} records",
            holds=all(len(seen) == 1 for chain in chains for seen in chain.values()),
        ),
        _contributes("the killed peer", ended.killed, ended.at("killed").round),
        _contributes("the new peer", ended.newcomer, ended.at("joined").round),
        Promise(
            name="a spare takes the place of the paused peer",
            seen=f"after {ended.at('replaced').at_s - ended.at('paused').at_s:.0f} s",
        ),
    ]


def _chain_tokens(swarm: ProcessSwarm, stage: int) -> int:
    return max(line["chain_tokens"] for peer in swarm.of_stage(stage) for line in peer.rounds)


def _contributes(who: str, peer: Peer, after: int) -> Promise:
    """Whether what it learnt is in records after this one."""
    counted = [line["round"] for line in peer.rounds if line["outcome"] == "counted"]
    later = sum(number > after for number in counted)
    return Promise(
        name=f"{who} contributes", seen=f"to {later} rounds after round {after}", holds=later > 0
    )
