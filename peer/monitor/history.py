"""What a monitor has learnt of a swarm: chains, losses, throughput, who came and went, faults.

Everything is bounded: curves lose every second point of their older half when they grow too long,
samples double their spacing. It is kept on disk, so that a monitor that starts again has it still.

`StageRounds` is what it keeps of one stage's chain: sums for good, details of the newest rounds,
and a bounded curve. A record counts once, however often it is met; when the chain turns out to go
on elsewhere, what the abandoned records added is taken away again.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, median_low
from typing import Any

from dilocox.dht.files import write_atomically
from dilocox.dht.records import ReplicaRecord
from dilocox.peer.chain.summary import ChainRound, LoggedRound, tokens_by_peer
from dilocox.peer.monitor.chains import DETAILED, Walk
from dilocox.peer.monitor.health import IN_MOTION, Health
from dilocox.peer.monitor.look import SwarmLook, finite

logger = logging.getLogger(__name__)

MAX_POINTS = 1200
MAX_KNOWN = 20_000
MAX_GAPS = 8
LIVE_ROUNDS = 3  # a walk of more was not followed as it came, and nobody knows when that was
RATE_WINDOW_S = 3600.0
RATE_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class Point:
    """A round as the curves need it. at: when it was first seen, None if it was there before."""

    round: int
    at: float | None
    tokens: int
    members: int
    record_bytes: int
    ranks: tuple[int, int, int] | None
    inner_steps: int


class StageRounds:
    """One stage's chain.

    tokens: by peer id. gaps: digests of records that nobody gave, and how often they were asked
    for again. head: the newest round. rounds: of the chain; records_seen: the same for a counter,
    which never falls, not even when the chain goes on elsewhere.
    paced_from: rounds from before it say nothing of the pace, seconds since the epoch.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.points: list[Point] = []
        self.gaps: dict[str, int] = {}
        self.head: LoggedRound | None = None
        self.chain_tokens = 0
        self.rounds = self.records_seen = 0
        self.paced_from = 0.0
        self._recent: dict[int, ChainRound] = {}
        self._known: dict[str, int] = {}  # round by digest

    def known(self, digest: str) -> bool:
        """Whether this record is counted."""
        return digest in self._known

    def holds(self, number: int) -> bool:
        """Whether a round of this number is among the newest of the chain."""
        return number in self._recent

    @property
    def digests(self) -> Collection[str]:
        """Of the records that are counted."""
        return self._known.keys()

    @property
    def progress_at(self) -> float | None:
        """When the newest round was seen to come."""
        return next((each.at for each in reversed(self.points) if each.at is not None), None)

    def add(self, walk: Walk, now: float, root: str) -> None:
        """Take in a walk from the head or from a gap; root: what stands before the first record."""
        if not walk.rounds:
            if walk.start in self.gaps:
                self.gaps[walk.start] += 1
            return
        from_head = walk.start not in self.gaps
        live = from_head and self.records_seen > 0 and len(walk.rounds) <= LIVE_ROUNDS
        if walk.connected and from_head:
            if self.rounds and walk.end != root and not self.known(walk.end):
                return  # it began before the operator went back, and ends where nothing counts
            self._abandon(walk, root)
        for each in reversed(walk.rounds):
            if not self.known(each.listed.digest):
                self._count(each, now if live else None)
        self.tokens.update(walk.folded)
        self.gaps.pop(walk.start, None)
        if not walk.connected and len(self.gaps) < MAX_GAPS:
            self.gaps[walk.end] = 0
        if from_head:
            newest = walk.rounds[0]
            self.head, self.chain_tokens = newest.listed, newest.chain_tokens
        self._thin()

    def go_back(self, last: int, now: float) -> None:
        """Take away the rounds after this one, as the operator did; the pace begins anew."""
        self.paced_from = now
        self._take_away(last)
        older = [digest for digest, number in self._known.items() if number > last]
        for digest in older:  # of these nothing but their number is known
            del self._known[digest]
        self.rounds -= len(older)
        self.points = [point for point in self.points if point.round <= last]
        if (newest := max(self._recent, default=None)) is not None:
            base = self._recent[newest]
            self.head, self.chain_tokens = base.listed, base.chain_tokens
        elif last < 0:
            self.head, self.chain_tokens = None, 0

    def per_hour(self, now: float) -> float | None:
        """Rounds an hour, from those that were seen to come; None while there are too few."""
        begin = max(now - RATE_WINDOW_S, self.paced_from)
        times = [p.at for p in self.points[-RATE_POINTS:] if p.at and p.at >= begin]
        return (len(times) - 1) / (now - times[0]) * 3600 if len(times) > 1 else None

    @property
    def usual_s(self) -> float:
        """Median time between two of the last rounds that were seen to come, 0 while unknown."""
        times = [p.at for p in self.points[-9:] if p.at is not None and p.at >= self.paced_from]
        steps = [late - early for early, late in pairwise(times)]
        return median(steps) if steps else 0.0

    # ---- counting --------------------------------------------------------------------------------
    def _count(self, each: ChainRound, at: float | None) -> None:
        listed = each.listed
        self._known[listed.digest] = listed.round
        self._recent[listed.round] = each
        self.rounds += 1
        self.records_seen += 1
        self.tokens.update(tokens_by_peer([each]))
        self.points.append(
            Point(
                round=listed.round,
                at=at,
                tokens=listed.tokens,
                members=listed.members,
                record_bytes=listed.record_bytes,
                ranks=listed.ranks,
                inner_steps=listed.next_inner_steps,
            )
        )

    def _abandon(self, walk: Walk, root: str) -> None:
        """Take away the rounds that the chain has left."""
        last = -1 if walk.end == root else self._known.get(walk.end, -1)
        self._take_away(last, {each.listed.digest for each in walk.rounds})

    def _take_away(self, last: int, kept: Collection[str] = ()) -> None:
        for number, each in list(self._recent.items()):
            if number <= last or each.listed.digest in kept:
                continue
            del self._recent[number]
            self._known.pop(each.listed.digest, None)
            self.rounds -= 1
            self.tokens.subtract(tokens_by_peer([each]))
            self.points = [point for point in self.points if point.round != number]

    def _thin(self) -> None:
        self.points.sort(key=lambda each: each.round)
        if len(self.points) > MAX_POINTS:
            self.points = thinned(self.points)
        for number in sorted(self._recent)[:-DETAILED]:
            del self._recent[number]
        if len(self._known) > MAX_KNOWN:
            newest = sorted(self._known.items(), key=lambda item: -item[1])[:MAX_KNOWN]
            self._known = dict(newest)
        self.tokens = +self.tokens  # none below one

    # ---- on disk ---------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        return {
            "tokens": dict(self.tokens),
            "points": [asdict(each) for each in self.points],
            "gaps": self.gaps,
            "head": None if self.head is None else asdict(self.head),
            "chain_tokens": self.chain_tokens,
            "rounds": self.rounds,
            "records_seen": self.records_seen,
            "paced_from": self.paced_from,
            "known": self._known,
            "recent": [
                {"chain_tokens": each.chain_tokens, "members": each.members}
                | {"listed": asdict(each.listed)}
                for each in self._recent.values()
            ],
        }

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> StageRounds:
        """Read what `to_dict` wrote; raises KeyError, TypeError or ValueError."""
        made = cls()
        made.tokens = Counter({str(peer): int(count) for peer, count in kept["tokens"].items()})
        made.points = [
            replace(Point(**each), ranks=_ranks(each["ranks"])) for each in kept["points"]
        ]
        made.gaps = {str(digest): int(tries) for digest, tries in kept["gaps"].items()}
        made.head = None if kept["head"] is None else _listed(kept["head"])
        made.chain_tokens, made.rounds = int(kept["chain_tokens"]), int(kept["rounds"])
        made.records_seen = int(kept["records_seen"])
        made.paced_from = float(kept.get("paced_from", 0.0))  # not in what older ones wrote
        made._known = {str(digest): int(number) for digest, number in kept["known"].items()}
        for each in kept["recent"]:
            listed = _listed(each["listed"])
            members = tuple((str(peer), int(count)) for peer, count in each["members"])
            made._recent[listed.round] = ChainRound(
                listed=listed, chain_tokens=int(each["chain_tokens"]), members=members
            )
        return made


def thinned(points: list[Any]) -> list[Any]:
    """Without every second one of the older half."""
    half = len(points) // 2
    return points[:half:2] + points[half:]


def thin_keys(table: dict[int, Any], limit: int) -> None:
    """Keep a table by round number within its limit, the newest half of it whole."""
    if len(table) > limit:
        keep = set(thinned(sorted(table)))
        for number in [number for number in table if number not in keep]:
            del table[number]


def _listed(kept: dict[str, Any]) -> LoggedRound:
    return replace(LoggedRound(**kept), ranks=_ranks(kept["ranks"]))


def _ranks(kept: Any) -> tuple[int, int, int] | None:
    if kept is None:
        return None
    low, middle, high = (int(rank) for rank in kept)
    return low, middle, high


VERSION = 1
MAX_LOSSES = 1200
MAX_SAMPLES = 720
SAMPLE_S = 5.0
MAX_FAULTS = 50
MAX_TEXT = 120
MAX_LOSS = 1e4  # nats a token
ROUNDS_AHEAD = 8  # of most replicas one may be
MAX_REMEMBERED = 4096  # heads whose last fault is known, and peers that are known again


@dataclass(frozen=True)
class FaultLine:
    """Something that went wrong. at: seconds since the epoch."""

    at: float
    text: str


class Samples:
    """Throughput over time: mean of tokens/s and number of peers, evenly spaced, bounded."""

    def __init__(self) -> None:
        self.spacing_s = SAMPLE_S
        self.rows: list[tuple[float, float, int]] = []  # at, tokens/s, peers
        self._open: list[tuple[float, float, int]] = []

    def add(self, at: float, tokens_per_s: float, peers: int) -> None:
        """Take in one look."""
        if self._open and at >= self._open[0][0] + self.spacing_s:
            self.rows.append(_mean(self._open))
            self._open = []
        self._open.append((at, tokens_per_s, peers))
        if len(self.rows) > MAX_SAMPLES:
            pairs = [self.rows[i : i + 2] for i in range(0, len(self.rows), 2)]
            self.rows = [_mean(pair) for pair in pairs]
            self.spacing_s *= 2


class SwarmHistory:
    """All of it, for one run. Belongs to the monitor's thread.

    since, watched_since: when the curves begin, and when this monitor was started.
    losses: by round, train and validation loss in nats a token, None while unknown.
    joined_total, left_total: of comings and goings; who returns is in both again.
    peers_total: of peers, each once.
    voids: by stage, void rounds that its peers told, as a mean over them.
    losses_not_finite: heads whose newest validation loss is none that can be, at the last look.
    """

    def __init__(self, stages: int, root: str, now: float):
        self.since = self.watched_since = now
        self.root = root
        self.stages = [StageRounds() for _ in range(stages)]
        self.losses: dict[int, list[float | None]] = {}
        self.samples = Samples()
        self.faults: deque[FaultLine] = deque(maxlen=MAX_FAULTS)
        self.faults_total = self.joined_total = self.left_total = self.peers_total = 0
        self.voids = [0.0] * stages
        self.losses_not_finite = 0
        self.seen_at: float | None = None  # when the swarm was last to be seen
        self.held_at: float | None = None  # when it was last in a state without rounds
        self._rules: int | None = None  # of the last rollback it knows, None before the first look
        self._set_aside = range(0)  # numbers of the rounds that this one set aside
        self._present: dict[str, int] = {}  # stage by peer
        self._met: dict[str, None] = {}  # peers, who was here last at the end
        self._voids_of: dict[str, int] = {}
        self._last_faults: dict[str, tuple[int, str]] = {}

    # ---- a look ----------------------------------------------------------------------------------
    def look(self, look: SwarmLook) -> None:
        """Take in what the records say now."""
        self._go_back(look)
        if look.reachable:
            self.seen_at = look.at
        if not look.answered:
            return
        self._come_and_go(look)
        self._count_voids(look)
        self._hear_faults(look)
        self._hear_losses(list(look.replicas.values()))
        self.samples.add(look.at, look.tokens_per_s, len(self._present))

    def walked(self, walk: Walk, now: float) -> None:
        """Take in what a walk along a chain found."""
        self.stages[walk.stage].add(walk, now, self.root)

    def judged(self, health: Health, now: float) -> None:
        """Take in how the swarm is."""
        if health.state not in IN_MOTION:
            self.held_at = now

    @property
    def validation(self) -> tuple[int, float] | None:
        """Round and value of the newest validation loss."""
        return self._newest(1)

    @property
    def train(self) -> tuple[int, float] | None:
        """Round and value of the newest train loss."""
        return self._newest(0)

    def _newest(self, column: int) -> tuple[int, float] | None:
        known = [(number, row[column]) for number, row in self.losses.items()]
        newest = max((each for each in known if each[1] is not None), default=None)
        return None if newest is None or newest[1] is None else (newest[0], newest[1])

    def _go_back(self, look: SwarmLook) -> None:
        """Forget the rounds that the operator has set aside since the last look."""
        newest, known = max((rules for rules, _ in look.rollbacks), default=0), self._rules
        self._rules = max(newest, known or 0)
        if known is None or newest <= known:
            return
        last = min(number for rules, number in look.rollbacks if rules > known)
        heads = [chain.head.round for chain in self.stages if chain.head is not None]
        self._set_aside = range(last + 1, max([last, *heads, *self.losses]) + 1)
        self.losses = {number: row for number, row in self.losses.items() if number <= last}
        for chain in self.stages:
            chain.go_back(last, look.at)
        self.held_at = look.at  # no round after it can have come before now

    def _counts(self, number: int) -> bool:
        """Whether a round was not set aside; heads tell old losses until they go back, too."""
        return number not in self._set_aside or self.stages[0].holds(number)

    def _come_and_go(self, look: SwarmLook) -> None:
        present = {peer: stage for stage in look.stages for peer in look.present(stage)}
        came = present.keys() - self._present.keys()
        self.joined_total += len(came)
        self.peers_total += len(came - self._met.keys())
        for peer in present:
            self._met.pop(peer, None)
            self._met[peer] = None
        forget(self._met, MAX_REMEMBERED)
        for peer in self._present.keys() - present.keys():
            self.left_total += 1
            stage = self._present[peer]
            if peer not in look.stages.get(stage, {}):  # else it said that it leaves
                self._fault(look.at, f"peer {peer[-6:]} of stage {stage} went silent")
        self._present = present

    def _count_voids(self, look: SwarmLook) -> None:
        told: dict[str, int] = {}
        for stage in range(len(self.stages)):
            peers = look.present(stage)
            more = 0
            for peer, record in peers.items():
                told[peer] = record.voids
                more += max(0, record.voids - self._voids_of.get(peer, record.voids))
            before = math.floor(self.voids[stage] + 1e-9)
            self.voids[stage] += more / max(1, len(peers))
            if math.floor(self.voids[stage] + 1e-9) > before:
                self._fault(look.at, f"a round of stage {stage} was void")
        self._voids_of = told

    def _hear_faults(self, look: SwarmLook) -> None:
        for head, replica in look.replicas.items():
            new = (replica.epoch, replica.last_fault)
            old = self._last_faults.get(head)
            # a fault raises the epoch, and a new replica does so without one
            if replica.last_fault and old is not None and new[1] != old[1]:
                self.faults_total += 1
                self._fault(look.at, f"replica {head[-6:]}: {replica.last_fault}")
            self._last_faults[head] = new
        forget(self._last_faults, MAX_REMEMBERED)

    def _hear_losses(self, replicas: Collection[ReplicaRecord]) -> None:
        train: dict[int, list[tuple[float, float]]] = {}
        validation: dict[int, list[float]] = {}
        # one absurd number of a round would press the whole curve together
        last = median_low([each.round for each in replicas] or [0]) + ROUNDS_AHEAD
        self.losses_not_finite = 0
        for each in replicas:
            if max(each.round, each.val_round) > last:
                continue
            # it is of the round under way, the one after the newest record
            counts = self._counts(each.round) or self._counts(each.round - 1)
            if each.train_loss is not None and sensible(each.train_loss) and counts:
                weight = max(finite(each.tokens_per_s), 1e-9)
                train.setdefault(each.round, []).append((each.train_loss, weight))
            if not self._counts(each.val_round):
                continue
            # a head that has evaluated an anchor names its round, and no loss if that is not finite
            if each.val_loss is None or not sensible(each.val_loss):
                self.losses_not_finite += each.val_round >= 0
            elif each.val_round >= -1:
                validation.setdefault(each.val_round, []).append(each.val_loss)
        for number, heard in train.items():
            weights = sum(weight for _, weight in heard)
            mean = sum(loss * weight for loss, weight in heard) / weights
            self.losses.setdefault(number, [None, None])[0] = mean
        for number, losses in validation.items():
            self.losses.setdefault(number, [None, None])[1] = median_low(losses)
        thin_keys(self.losses, MAX_LOSSES)

    @property
    def away(self) -> int:
        """Peers that were here once and are not now."""
        return max(0, self.peers_total - len(self._present))

    def _fault(self, at: float, text: str) -> None:
        self.faults.append(FaultLine(at, cut(text)))

    @property
    def counters(self) -> tuple[float, ...]:
        """What must not fall when a monitor starts again, for whoever keeps it."""
        chains = (
            each for chain in self.stages for each in (chain.records_seen, chain.chain_tokens)
        )
        told = (self.faults_total, self.joined_total, self.left_total, self.peers_total)
        return (*told, *self.voids, *chains)

    # ---- on disk ---------------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write it; raises EnvironmentFault."""
        kept = {
            "version": VERSION,
            "root": self.root,
            "since": self.since,
            "stages": [each.to_dict() for each in self.stages],
            "losses": [[number, *row] for number, row in sorted(self.losses.items())],
            "spacing_s": self.samples.spacing_s,
            "samples": self.samples.rows,
            "faults": [[each.at, each.text] for each in self.faults],
            "totals": [self.faults_total, self.joined_total, self.left_total],
            "voids": self.voids,
            "peers_total": self.peers_total,
            "present": self._present,
            "met": list(self._met),
            "voids_of": self._voids_of,
            "last_faults": self._last_faults,
            "rules": self._rules,
            "set_aside": [self._set_aside.start, self._set_aside.stop],
        }
        write_atomically(path, json.dumps(kept).encode(), durable=False)

    @classmethod
    def load(cls, path: Path, stages: int, root: str, now: float) -> SwarmHistory:
        """What `save` wrote for this run; an empty one where there is none or it is damaged."""
        made = cls(stages, root, now)
        try:
            made._fill(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return made
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s is damaged (%r): the curves begin anew", path, error)
            return cls(stages, root, now)
        return made

    def _fill(self, kept: dict[str, Any]) -> None:
        if (kept["version"], kept["root"], len(kept["stages"])) != (
            VERSION,
            self.root,
            len(self.stages),
        ):
            raise ValueError("it is of another version or manifest")
        self.since = float(kept["since"])
        self.stages = [StageRounds.from_dict(each) for each in kept["stages"]]
        self.losses = {int(number): [train, val] for number, train, val in kept["losses"]}
        self.samples.spacing_s = float(kept["spacing_s"])
        self.samples.rows = [(float(t), float(s), int(n)) for t, s, n in kept["samples"]]
        self.faults.extend(FaultLine(float(at), str(text)) for at, text in kept["faults"])
        self.faults_total, self.joined_total, self.left_total = (int(n) for n in kept["totals"])
        self.voids = [float(each) for each in kept["voids"]]
        self._present = {str(peer): int(stage) for peer, stage in kept["present"].items()}
        # not in what older ones wrote
        self._met = {str(peer): None for peer in kept.get("met", self._present)}
        self.peers_total = int(kept.get("peers_total", len(self._met)))
        self._voids_of = {str(peer): int(count) for peer, count in kept["voids_of"].items()}
        rules = kept.get("rules")  # not in what older ones wrote
        self._rules = None if rules is None else int(rules)
        self._set_aside = range(*kept.get("set_aside", (0, 0)))
        faults = kept["last_faults"].items()
        self._last_faults = {str(head): (int(n), str(text)) for head, (n, text) in faults}


def forget(table: dict[Any, Any], limit: int) -> None:
    """Drop what was put in first."""
    while len(table) > limit:
        del table[next(iter(table))]


def sensible(loss: float) -> bool:
    """Whether a loss can be one; a sum over absurd ones would be no number."""
    return abs(loss) <= MAX_LOSS


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """A text of a stranger in one line: bounded, and of characters that can be seen."""
    seen = "".join(letter if letter.isprintable() else " " for letter in text)
    return seen if len(seen) <= limit else seen[: limit - 1] + "…"


def _mean(rows: list[tuple[float, float, int]]) -> tuple[float, float, int]:
    count = len(rows)
    return (
        rows[0][0],
        sum(speed for _, speed, _ in rows) / count,
        round(sum(peers for *_, peers in rows) / count),
    )
