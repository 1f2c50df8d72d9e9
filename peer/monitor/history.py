"""What a monitor has learnt of a swarm: chains, curve, throughput, comings and goings, events.

Everything is bounded: the curve joins points when they are too many, samples double their spacing.
All of it is one JSON file, so that a monitor that starts again has its counters still, and the
curve even where no bootstrap gives the history of the run.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from dilocox.dht.files import write_atomically
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import cut, shown_peer
from dilocox.dht.records import ReplicaRecord
from dilocox.peer.chain import summary
from dilocox.peer.chain.round_history import (
    FIRST,
    HistoryRow,
    ModelSample,
    NamedPeer,
    ToldHistory,
    thin_samples,
)
from dilocox.peer.chain.stated_facts import (
    MAX_HEARD,
    ROUNDS_AHEAD,
    Spread,
    more_voids,
    stated_losses,
)
from dilocox.peer.chain.summary import Stated
from dilocox.peer.monitor.chains import StageRounds, Walk
from dilocox.peer.monitor.events import EventLog
from dilocox.peer.monitor.look import SwarmLook

logger = logging.getLogger(__name__)

VERSION = 4  # of the file
MAX_POINTS = 1200  # of the curve
WHOLE = 64  # of the first and of the newest rounds, each for itself
MAX_SAMPLES = 720
SAMPLE_S = 5.0
MAX_REMEMBERED = 4096  # heads whose last fault is known, and peers that are known again

FAULTS = {  # what a head says of a stage, in words
    "left": "its peer of stage {0} left",
    "closed": "the link of stage {0} broke",
    "silent": "its peer of stage {0} went silent",
    "missing": "its peer of stage {0} did not come",
    "stuck": "its peer of stage {0} took nothing more",
    "refused": "its peer of stage {0} sent what cannot be",
}
_FAULT = re.compile(rf"^stage (\d+) ({'|'.join(FAULTS)})(?:, epoch \d+)?$")

Sample = tuple[float, float, int]  # at, tokens/s, peers


class Point(NamedTuple):
    """A round, or several: then what it says is of the last of them that says it. In this order
    the status page gets it.

    tokens: of the whole chain. at: run time in seconds. low, high: of the validation losses of
    several rounds. train_low, train_high: of the train losses of several heads or rounds.
    """

    round: int
    tokens: int | None = None
    at: float | None = None
    train: float | None = None
    validation: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None
    peers: int | None = None
    train_low: float | None = None
    train_high: float | None = None

    @classmethod
    def of(cls, row: HistoryRow) -> Point:
        loss = row.validation
        known = (row.round, row.tokens, row.at, row.train, loss, loss, loss)
        return cls(*known, row.tokens_per_s, row.peers, row.train_low, row.train_high)

    def over(self, older: Point) -> Point:
        """This point, with what only the older one knows."""
        pairs = zip(self, older, strict=True)
        return Point._make(before if mine is None else mine for mine, before in pairs)

    def joined(self, later: Point) -> Point:
        """One point for two neighbours."""
        ranges = dict[str, float | None]()
        for name in ("low", "high", "train_low", "train_high"):
            both = (getattr(self, name), getattr(later, name))
            pick = min if name.endswith("low") else max
            ranges[name] = pick((each for each in both if each is not None), default=None)
        return later.over(self)._replace(**ranges)


@dataclass(kw_only=True)
class Curve:
    """Losses, throughput and peers by round, of the whole run in at most MAX_POINTS points.

    It is made of what bootstraps keep of every round (chain/round_history.py) and of what this
    monitor sees itself, which is newer, and all there is where no bootstrap tells. Beyond the limit
    neighbours become one point, evenly over all rounds but for the first and the newest ones; the
    range of their validation losses stays.
    points: by round. told: the newest round that a bootstrap has told of. heads: of how many heads
    the train loss of a round is that this monitor heard, of the newest rounds.
    """

    points: dict[int, Point] = field(default_factory=dict[int, Point])
    told: int = FIRST
    heads: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, rows: Iterable[HistoryRow]) -> None:
        """What bootstraps say, which is more than this monitor can have seen."""
        for row in rows:
            self.points[row.round] = Point.of(row).over(self._at(row.round))
            self.told = max(self.told, row.round)
        self._thin()

    def see(self, seen: Point) -> None:
        """What this monitor saw of a round, or heard of its losses."""
        self.points[seen.round] = seen.over(self._at(seen.round))
        self._thin()

    def hear(self, number: int, said: Spread) -> None:
        """What heads state of a round; as some leave, those that stay do not speak for all."""
        told = number not in self.heads and self._at(number).train is not None  # of all of them
        if not told and said.heads >= self.heads.get(number, 0):
            self.heads[number] = said.heads
            forget(self.heads, MAX_HEARD)
            self.see(Point(number, train=said.middle, train_low=said.low, train_high=said.high))

    def go_back(self, last: int) -> None:
        """Forget the rounds after this one."""
        self.points = {number: each for number, each in self.points.items() if number <= last}
        self.heads = {number: heads for number, heads in self.heads.items() if number <= last}
        self.told = min(self.told, last)

    def newest(self, name: str) -> tuple[int, float] | None:
        """Round and value of the newest point that has this."""
        values = ((number, getattr(each, name)) for number, each in self.points.items())
        return max(((number, value) for number, value in values if value is not None), default=None)

    def _at(self, number: int) -> Point:
        return self.points.get(number) or Point(round=number)

    def _thin(self) -> None:
        if len(self.points) <= MAX_POINTS:
            return
        numbers = sorted(self.points)
        middle, stride = numbers[WHOLE:-WHOLE], 2
        while len({number // stride for number in middle}) > MAX_POINTS // 2:
            stride *= 2
        thinned: dict[int, Point] = {}
        for number in middle:
            point, before = self.points.pop(number), thinned.get(number // stride)
            thinned[number // stride] = point if before is None else before.joined(point)
        self.points |= {each.round: each for each in thinned.values()}


@dataclass(kw_only=True)
class Samples:
    """Throughput over time, evenly spaced, bounded. rows: means over `spacing_s` each; pending:
    the looks of the next one.
    """

    spacing_s: float = SAMPLE_S
    rows: list[Sample] = field(default_factory=list[Sample])
    pending: list[Sample] = field(default_factory=list[Sample])

    def add(self, at: float, tokens_per_s: float, peers: int) -> None:
        """Take in one look."""
        if self.pending and at >= self.pending[0][0] + self.spacing_s:
            self.rows.append(_mean(self.pending))
            self.pending = []
        self.pending.append((at, tokens_per_s, peers))
        if len(self.rows) > MAX_SAMPLES:
            pairs = [self.rows[i : i + 2] for i in range(0, len(self.rows), 2)]
            self.rows = [_mean(pair) for pair in pairs]
            self.spacing_s *= 2


@dataclass(kw_only=True)
class SwarmHistory:
    """All of it, for one run. Belongs to the monitor's thread.

    root: what stands before the first record. since, watched_since: when the curves begin, and when
    this monitor was started.
    samples_told: by round, what bootstraps keep of what the model wrote. parameters: of the model,
    None while none has said.
    joined_total, left_total: of comings and goings; a peer that returns is in both again.
    peers_total: of peers, each once.
    voids: by stage, void rounds that its peers told, as a mean over them.
    losses_not_finite: heads whose newest validation loss is none that can be, at the last look.
    seen_at, held_at: when the swarm was last to be seen, and last in a state without rounds.
    rules: of the last rollback it knows, None before the first look. set_aside: the first number of
    the rounds that this one set aside, and the one after the last.
    present: stage by peer. met: peers, those that were here last at the end. stated: by peer, of
    those that left, too.
    voids_of, last_faults: what a peer, or a head of a replica, told last.
    """

    root: str
    since: float
    watched_since: float
    stages: list[StageRounds]
    voids: list[float]
    version: int = VERSION
    curve: Curve = field(default_factory=Curve)
    samples: Samples = field(default_factory=Samples)
    events: EventLog = field(default_factory=EventLog)
    samples_told: dict[int, ModelSample] = field(default_factory=dict[int, ModelSample])
    parameters: int | None = None
    faults_total: int = 0
    joined_total: int = 0
    left_total: int = 0
    peers_total: int = 0
    losses_not_finite: int = 0
    seen_at: float | None = None
    held_at: float | None = None
    rules: int | None = None
    set_aside: tuple[int, int] = (0, 0)
    present: dict[str, int] = field(default_factory=dict[str, int])
    met: dict[str, None] = field(default_factory=dict[str, None])
    stated: dict[str, Stated] = field(default_factory=dict[str, Stated])
    voids_of: dict[str, int] = field(default_factory=dict[str, int])
    last_faults: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def begun(cls, stages: int, root: str, now: float) -> SwarmHistory:
        """Of a run that nothing is known of."""
        chains = [StageRounds() for _ in range(stages)]
        return cls(root=root, since=now, watched_since=now, stages=chains, voids=[0.0] * stages)

    @classmethod
    def load(cls, path: Path, stages: int, root: str, now: float) -> SwarmHistory:
        """What `save` wrote for this run; an empty one where there is none.

        A file that is damaged, or of another version or manifest, is set aside as `….old`.
        """
        try:
            made = _FILE.validate_json(path.read_bytes())
            if (made.version, made.root, len(made.stages)) != (VERSION, root, stages):
                raise ValueError("it is of another version or manifest")
        except FileNotFoundError:
            return cls.begun(stages, root, now)
        except (OSError, ValueError) as error:
            logger.debug("%s", error)
            aside = path.with_name(f"{path.name}.old")
            logger.warning(
                "%s is damaged, or of another version or manifest: the curves begin anew, and it "
                "is set aside as %s",
                path,
                aside.name,
            )
            with suppress(OSError):  # `save` tells of a folder that cannot be written
                path.replace(aside)
            return cls.begun(stages, root, now)
        made.watched_since, made.seen_at, made.held_at = now, None, None
        made.curve.told = FIRST  # bootstraps may have heard names that this one has not
        return made

    def save(self, path: Path) -> None:
        """Write it; raises EnvironmentFault."""
        write_atomically(path, _FILE.dump_json(self), durable=False)

    # ---- a look ----------------------------------------------------------------------------------
    def look(self, look: SwarmLook) -> None:
        """Take in what the records say now."""
        self._go_back(look)
        if look.reachable:
            self.seen_at = look.at
        if not look.answered:
            return
        self._hear_names(look)
        self._come_and_go(look)
        self._count_voids(look)
        self._hear_faults(look)
        self._hear_losses(list(look.replicas.values()))
        self.events.look(look, self.stages[0].chain_tokens, self.validation, self.shown)
        self.samples.add(look.at, look.tokens_per_s, len(self.present))

    def walked(self, walk: Walk, now: float) -> None:
        """Take in what a walk along a chain found."""
        chain = self.stages[walk.stage]
        chain.add(walk, now, self.root)
        for each in walk.rounds if walk.stage == 0 else ():
            if each.digest in chain.known:  # else what it led to does not count
                at = chain.times.get(each.round)
                peers = None if at is None else len(self.present)
                self.curve.see(Point(each.round, each.chain_tokens, at, peers=peers))

    def told(self, told: ToldHistory, manifest: Manifest) -> None:
        """Take in what bootstraps keep of the run's rounds, and of peers that are gone."""
        head = self.stages[0].head
        newest = math.inf if head is None else head.round + ROUNDS_AHEAD  # some come meanwhile
        counting = (row for row in told.rows if not manifest.rolled_back(row.round, row.rules))
        self.curve.take(row for row in counting if row.round <= newest)
        for peer, name, team in told.names.values():
            if peer not in self.present:
                self.stated[peer] = (name, team, self.stated.get(peer, ("", "", None))[2])
        samples = (each for number, each in told.samples.items() if number <= newest)
        kept = (each for each in samples if not manifest.rolled_back(each.round, each.rules))
        self.samples_told |= {each.round: each for each in kept}
        thin_samples(self.samples_told)
        if told.parameters is not None:
            self.parameters = told.parameters

    def shown(self, peer: str) -> str:
        """A peer as people see it, with the name that it stated last."""
        return shown_peer(peer, self.stated.get(peer, ("",))[0])

    def contributions(self, tokens_per_step: int) -> list[dict[str, Any]]:
        """The rows of `summary.contributions`; here: whether the peer is in view."""
        sums = {n: (chain.tokens, chain.token_seconds) for n, chain in enumerate(self.stages)}
        rows = summary.contributions(sums, tokens_per_step, self.stated)
        return [row | {"here": row["id"] in self.present} for row in rows]

    @property
    def validation(self) -> tuple[int, float] | None:
        """Round and value of the newest validation loss."""
        return self.curve.newest("validation")

    @property
    def train(self) -> tuple[int, float] | None:
        """Round and value of the newest train loss."""
        return self.curve.newest("train")

    def samples_of(self, prompt: str) -> list[ModelSample]:
        """What the model wrote after this prompt, the newest first."""
        rows = sorted(self.samples_told.items(), reverse=True)
        return [row for _, row in rows if row.prompt == prompt]

    def _go_back(self, look: SwarmLook) -> None:
        """Forget the rounds that the operator has set aside since the last look."""
        rollbacks = look.manifest.operation.rollbacks
        newest, known = max((rules for rules, _ in rollbacks), default=0), self.rules
        self.rules = max(newest, known or 0)
        if known is None or newest <= known:
            return
        last = min(number for rules, number in rollbacks if rules > known)
        heads = [chain.head.round for chain in self.stages if chain.head is not None]
        self.set_aside = (last + 1, max([last, *heads, *self.curve.points]) + 1)
        self.curve.go_back(last)
        self.samples_told = {n: row for n, row in self.samples_told.items() if n <= last}
        for chain in self.stages:
            chain.go_back(last, look.at)
        self.held_at = look.at  # no round after it can have come before now

    def _counts(self, number: int) -> bool:
        """Whether a round was not set aside; heads tell old losses until they go back, too."""
        first, after = self.set_aside
        return not first <= number < after or number in self.stages[0].recent

    def _hear_names(self, look: SwarmLook) -> None:
        for stage in look.stages:
            for peer, told in look.present(stage).items():
                *_, since = self.stated.pop(peer, ("", "", None))
                _, name, team = NamedPeer.of(peer, told)
                self.stated[peer] = (name, team, look.at if since is None else since)
        forget(self.stated, MAX_REMEMBERED)

    def _come_and_go(self, look: SwarmLook) -> None:
        present = {peer: stage for stage in look.stages for peer in look.present(stage)}
        self.events.come_and_go(look, self.present, present, self.shown)
        came = present.keys() - self.present.keys()
        self.joined_total += len(came)
        self.peers_total += len(came - self.met.keys())
        gone = {peer: None for peer in self.met if peer not in present}
        self.met = gone | dict.fromkeys(present)
        forget(self.met, MAX_REMEMBERED)
        for peer in self.present.keys() - present.keys():
            self.left_total += 1
            stage = self.present[peer]
            if peer not in look.stages.get(stage, {}):  # else it said that it leaves
                self._fault(look.at, f"peer {self.shown(peer)} of stage {stage} went silent")
        self.present = present

    def _count_voids(self, look: SwarmLook) -> None:
        told: dict[str, int] = {}
        for stage in range(len(self.stages)):
            peers = look.present(stage)
            more = more_voids(peers, self.voids_of)
            told |= {peer: record.voids for peer, record in peers.items()}
            before = math.floor(self.voids[stage] + 1e-9)
            self.voids[stage] += more
            if math.floor(self.voids[stage] + 1e-9) > before:
                self._fault(look.at, f"a round of stage {stage} was void")
        self.voids_of = told

    def _hear_faults(self, look: SwarmLook) -> None:
        for head, replica in look.replicas.items():
            new, old = replica.last_fault, self.last_faults.get(head)
            if new and old is not None and new != old:
                self.faults_total += 1
                told = _FAULT.sub(lambda f: FAULTS[f[2]].format(f[1]), replica.last_fault)
                self._fault(look.at, f"replica of {self.shown(head)}: {told}")
            self.last_faults[head] = new
        forget(self.last_faults, MAX_REMEMBERED)

    def _hear_losses(self, replicas: Collection[ReplicaRecord]) -> None:
        stated = stated_losses(replicas, self._counts)
        self.losses_not_finite = stated.not_finite
        for number, said in stated.train.items():
            self.curve.hear(number, said)
        for number, loss in stated.validation.items():
            tokens = 0 if number < 0 else None
            self.curve.see(Point(number, tokens, validation=loss, low=loss, high=loss))

    def _fault(self, at: float, text: str) -> None:
        self.events.add(at, "fault", cut(text))

    @property
    def counters(self) -> tuple[float, ...]:
        """What must not fall when a monitor starts again, for its keeper."""
        told = (self.faults_total, self.joined_total, self.left_total, self.peers_total)
        seen = (n for each in self.stages for n in (each.records_seen, each.chain_tokens))
        return (*told, *self.voids, *seen)


_FILE = TypeAdapter(SwarmHistory)


def forget(table: dict[Any, Any], limit: int) -> None:
    """Drop what was put in first."""
    while len(table) > limit:
        del table[next(iter(table))]


def _mean(rows: list[Sample]) -> Sample:
    at, speeds, peers = zip(*rows, strict=True)
    return at[0], fmean(speeds), round(fmean(peers))
