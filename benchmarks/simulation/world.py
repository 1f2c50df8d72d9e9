"""A swarm of simulated peers: its network, who comes and goes, and what must hold at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.simulation.averaging import Donor, Honest, Lines, Meetings
from benchmarks.simulation.chain import SimulatedLog, SimulatedRecord
from benchmarks.simulation.clock import START, Timeline
from benchmarks.simulation.dht import Network, SimulatedDHT
from benchmarks.simulation.liars import Lying, LyingArchive, LyingMember, clock_error_s
from benchmarks.simulation.peer import REPLICA_S, Books, SimulatedPeer
from benchmarks.simulation.strangers import Strangers
from benchmarks.simulation.witness import BOOTSTRAP, COPY, SimulatedArchive
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import RunState, in_state

TOKENS_PER_STEP = 512
DECIDED_S = 120.0  # from the last send to its record, at most, beside the grace
END_LIMIT_S = 1800.0
NOTICED_S = 5.0  # until a head sees that a member is gone


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to one peer. at_s: after the start. seconds: a freeze lasts so long; a
    peer that was killed comes back after as many; of a partition, until it heals.
    """

    kind: Literal["kill", "freeze", "partition"]
    at_s: float
    peers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a run is like.

    step_s: of each head's inner step; H of the run is round_s, so that a head of 1 s a step takes
        so long for a round.
    joins: after the start, in seconds, one for each head (0: at the start).
    spares: peers of every later stage beside those that the replicas need.
    codec_s: that a send computes before its exchange, and in it. outer_step_s: to apply a record.
    pauses_at_s, ends_at_s: after the start, when the operator says so; None if never.
    deaf: peers by number, in the order of their names, and how much later each of them hears that.
    merge, apply: of the manifest's section `outer`.
    write_s: seconds that the loop is busy between a send and its handing over.
    tick_s: what every tick of a coordinator takes longer.
    fetch_s: that an archive takes for a record.
    strangers: keys that lie in the DHT once the run has had `strangers_after` rounds.
    bootstraps: the operator's, and a copy of it. lying: who has a part in the run, and lies.
    """

    step_s: tuple[float, ...]
    round_s: float
    rounds: int
    rtt_s: float = 0.2
    seed: int = 0
    stages: int = 1
    spares: int = 0
    loss: float = 0.0
    late: float = 0.0
    vote_loss: float = 0.0
    codec_s: float = 0.0
    outer_step_s: float = 0.1
    write_s: float = 0.0
    tick_s: float = 0.0
    fetch_s: float = 0.0
    joins: tuple[float, ...] = ()
    end_tokens: int = 10**15
    pauses_at_s: float | None = None
    ends_at_s: float | None = None
    deaf: tuple[tuple[int, float], ...] = ()
    merge: Literal["rebase", "reset"] = "rebase"
    apply: Literal["arrival", "round_end"] = "arrival"
    strangers: int = 0
    strangers_after: float = 3.0
    bootstraps: Literal[1, 2] = 1
    lying: Lying | None = None
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class SignedRevision:
    """As SignedManifest, without a signature."""

    manifest: Manifest

    @property
    def number(self) -> int:
        """Of the revision."""
        return self.manifest.operation.revision

    def revision_of(self, run: str) -> int:
        """Likewise."""
        return self.number

    def verify(self, run: str) -> Manifest:
        """It is the operator's."""
        return self.manifest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to, for those who do not lie.

    last_rounds: of each stage's chain. archived: of stage 0 by the operator's archive.
    left_s: from the end of the run until the last peer had left; None where one is still there.
    uncounted: tokens trained that are in no record.
    rounds: that the swarm went through. committed: of them. committed_share: their share.
    every_head_share: the least share of the committed rounds, over the heads, that hold a head's
        tokens; counted from its first round on, those in which it was hurt included.
    seconds: of run time until the last of the rounds. false_records: of a liar's own making, in the
        log of one peer, or an archive, at most. forks: how often a peer left its chain for another.
        left: peers that went. lost_share: of the tokens trained, those that will be in no record.
    conserved: whether every token is in one place, and records hold what their members were
        credited. one_chain: whether no two records follow the same one.
    """

    rounds: int
    committed: int
    every_head_share: float
    conserved: bool
    one_chain: bool
    last_rounds: tuple[int, ...] = ()
    archived: int = -1
    uncounted: int = 0
    left_s: float | None = None
    seconds: float = 0.0
    false_records: int = 0
    forks: int = 0
    left: int = 0
    lost_share: float = 0.0
    voids: dict[str, int] = field(default_factory=dict[str, int])
    events: int = 0

    @property
    def committed_share(self) -> float:
        """Committed rounds among all."""
        return self.committed / max(1, self.rounds)


def manifest_of(scenario: Scenario) -> Manifest:
    """A run whose rounds have the scenario's length, whatever the exchanges take."""
    steps = max(1, round(scenario.round_s))
    return Manifest.from_dict(
        {
            "name": "simulated",
            "model": "tiny",
            "stages": scenario.stages,
            "end_tokens": scenario.end_tokens,
            "rounds": {
                "inner_steps": steps,
                "min_inner_steps": steps,
                "max_inner_steps": steps,
            },
            "outer": {"merge": scenario.merge, "apply": scenario.apply},
            "batch": {"sequence_length": TOKENS_PER_STEP, "microbatch_size": 1, "microbatches": 1},
        }
    )


class World:
    """One run of a scenario."""

    run = "f" * 32
    tokens_per_step = TOKENS_PER_STEP

    def __init__(self, scenario: Scenario):
        random.seed(scenario.seed)  # the product's own draws
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.timeline = Timeline()
        self.write_s, self.tick_s = scenario.write_s, scenario.tick_s
        # what is due in mid-round is a look at the bells, 32 of them a round
        self.far_s = min(max(scenario.round_s / 32, 1.0), 10.0)
        self.manifest = manifest_of(scenario)
        self.takes_at_once = scenario.apply == "arrival"
        self.network = Network(
            timeline=self.timeline, random=self.random, rtt_s=scenario.rtt_s, loss=scenario.loss
        )
        self.dht = SimulatedDHT(self.network)
        lines = Lines(
            network=self.network,
            late=scenario.late,
            codec_s=scenario.codec_s,
            outer_step_s=scenario.outer_step_s,
            vote_loss=scenario.vote_loss,
        )
        self.meetings = Meetings(lines, self.manifest)
        self.peers: dict[str, SimulatedPeer] = {}
        self.ended: list[SimulatedPeer] = []
        self.left: list[SimulatedPeer] = []  # in order
        self.revisions = self._revisions()
        ends_at_s = scenario.ends_at_s
        self.ended_at = None if ends_at_s is None else START + ends_at_s  # the run
        self.left_at = START  # the newest of those that have left
        self.false_digests: set[str] = set()  # of records that a liar made by itself
        names = (BOOTSTRAP, COPY)[: scenario.bootstraps]
        self.archives = {name: self._archive(name) for name in names}

    def _archive(self, name: str) -> SimulatedArchive:
        facts = (
            name,
            self.timeline,
            self.dht,
            self.manifest,
            self.run,
            self._log_of,
            lambda: self.revision_for(BOOTSTRAP, self.timeline.now).number,
            self.scenario.fetch_s,
        )
        lying = self.scenario.lying
        how = "" if lying is None else lying.of_bootstrap(name)
        return LyingArchive(self, how, *facts) if how else SimulatedArchive(*facts)

    # ---- who lies --------------------------------------------------------------------------------
    @property
    def lied_rounds(self) -> float:
        """For how long who lies has done so, in rounds of the fastest; before it does, below 0."""
        lying, now = self.scenario.lying, self.timeline.now
        return -1.0 if lying is None else (now - START) / self.scenario.round_s - lying.after

    @property
    def lies(self) -> bool:
        """Whether it does now."""
        lying = self.scenario.lying
        return lying is not None and 0.0 <= self.lied_rounds < lying.lasts

    def conduct_of(self, name: str) -> Honest:
        """How a peer behaves: of each stage the last ones may lie."""
        lying = self.scenario.lying
        before = self._last - self._number(name)
        lies = lying is not None and lying.who == "member" and 0 <= before < lying.members
        return LyingMember(self, name, lying.how) if lying and lies else Honest()

    @property
    def _last(self) -> int:
        return len(self.scenario.step_s) - 1

    def _number(self, name: str) -> int:
        return int(name[-3:])

    def clock_error_s(self, peer: SimulatedPeer) -> float:
        """How far a peer's run time is ahead: it asks all bootstraps."""
        lying = self.scenario.lying
        if lying is None or lying.how != "time":
            return 0.0
        ahead = self._number(peer.name) % 2 == 0
        lied_s = self.lied_rounds * self.scenario.round_s
        joins = peer.joined_at > self.timeline.now - lied_s
        return clock_error_s(ahead, lied_s, joins=joins, bootstraps=self.scenario.bootstraps)

    # ---- what the operator says ------------------------------------------------------------------
    def _revisions(self) -> list[tuple[float, SignedRevision]]:
        """When each of them is signed."""
        scenario, newest = self.scenario, self.manifest
        told = [(START, SignedRevision(newest))]
        states: dict[RunState, float | None]
        states = {"paused": scenario.pauses_at_s, "ended": scenario.ends_at_s}
        for state, after_s in states.items():
            if after_s is not None:
                newest = in_state(newest, state)
                told.append((START + after_s, SignedRevision(newest)))
        return told

    def revision_for(self, peer: str, now: float) -> SignedRevision:
        """The newest that a peer can find."""
        names = sorted(each.name for each in self._everybody)
        numbers = {name: number for number, name in enumerate(names)}
        late_s = dict(self.scenario.deaf).get(numbers.get(peer, -1), 0.0)
        return [signed for at, signed in self.revisions if at == START or at + late_s <= now][-1]

    # ---- who is there ----------------------------------------------------------------------------
    def process(self, peer: str, stage: int) -> Donor | None:
        """What answers as a peer's averaging process, or what a bootstrap keeps of a stage."""
        if peer in self.archives:
            return self.archives[peer].stages[stage]
        found = self.peers.get(peer)
        return None if found is None else found.conduct.gives(found.averager)

    def _log_of(self, peer: str, stage: int) -> SimulatedLog | None:
        found = self.process(peer, stage)
        if found is None or not found.answers:
            return None
        return found.log if self.network.connected(peer, BOOTSTRAP) else None

    def start(
        self,
        name: str,
        *,
        stage: int = 0,
        step_s: float = 1.0,
        books: Books | None = None,
        log: SimulatedLog | None = None,
    ) -> None:
        """A peer joins the run."""
        peer = SimulatedPeer(self, name, stage=stage, step_s=step_s, books=books, log=log)
        self.peers[name] = peer

    def joined(self, peer: SimulatedPeer) -> None:
        """A peer is up to date: a head looks for its replica."""
        if peer.stage == 0:
            self.timeline.after(REPLICA_S * self.random.random(), lambda: self._form(peer))

    def left_replica(self, peer: SimulatedPeer) -> None:
        """A peer is gone or frozen: its head takes a spare, or a replica without a head ends."""
        head = peer.leader
        if head is None:
            return
        head.stop_training()
        for member in head.members:
            if member is peer or head is peer:
                member.leader = None
        head.members = [] if head is peer else [each for each in head.members if each is not peer]
        peer.leader = None
        if head is not peer:
            head.leader = None
            self.timeline.after(NOTICED_S, lambda: self._form(head))
        else:
            self.timeline.after(NOTICED_S, lambda: self._form(peer))

    def ends(self) -> None:
        """A peer sees that the run has its tokens, or that its operator ends it."""
        if self.ended_at is None:
            self.ended_at = self.timeline.now

    def release(self, head: SimulatedPeer) -> None:
        """A head lets its replica go."""
        head.stop_training()
        for member in head.members:
            member.leader = None
        if head.leader is head:
            head.leader = None
        head.members = []

    def gone(self, peer: SimulatedPeer) -> None:
        """A peer has left, in order."""
        self.left.append(self.peers.pop(peer.name))
        self.left_at = self.timeline.now

    def _form(self, head: SimulatedPeer) -> None:
        if not head.alive or head.leaving or head.leader is head:
            return
        chosen = list(head.members)
        held = {member.stage for member in chosen}
        for stage in range(1, self.manifest.stages):
            if stage not in held:
                free = [
                    peer
                    for peer in self.peers.values()
                    if peer.stage == stage and peer.free
                    if self.network.connected(head.name, peer.name)
                ]
                if head.frozen or not free:
                    self.timeline.after(REPLICA_S, lambda: self._form(head))
                    return
                chosen.append(free[0])
        if head.frozen:
            self.timeline.after(REPLICA_S, lambda: self._form(head))
            return
        head.members = sorted(chosen, key=lambda peer: peer.stage)
        head.start_training()

    # ---- the run ---------------------------------------------------------------------------------
    def play(self) -> Outcome:
        """Let the scenario happen; its end is when the fastest head can have made its rounds."""
        scenario, timeline = self.scenario, self.timeline
        for number, step_s in enumerate(scenario.step_s):
            at_s = scenario.joins[number] if scenario.joins else 2.0 * self.random.random()
            self._later(at_s, lambda n=number, s=step_s: self.start(f"head{n:03d}", step_s=s))
        for stage in range(1, scenario.stages):
            for number in range(len(scenario.step_s) + scenario.spares):
                name = f"stage{stage}peer{number:03d}"
                self._later(self.random.random(), lambda n=name, s=stage: self.start(n, stage=s))
        for fault in scenario.faults:
            self._later(fault.at_s, lambda each=fault: self._hurt(each))
        if scenario.strangers:
            world = self.timeline, self.dht, self.manifest, self.run, self._round
            strangers = Strangers(scenario.strangers, *world)
            self._later(scenario.strangers_after * scenario.round_s, strangers.tell)
        span_s = scenario.rounds * scenario.round_s * 1.5 * min(scenario.step_s)
        end = START + max([span_s, *(fault.at_s + fault.seconds for fault in scenario.faults)])
        while timeline.now < end and self._round() < scenario.rounds and not self._all_left:
            timeline.run_until(timeline.now + scenario.round_s / 4)
        rounds = self._round()  # the ones before it have been sent, and will be decided
        seconds = timeline.now - START
        timeline.run_until(timeline.now + DECIDED_S + scenario.round_s / 2)
        while (
            self.ended_at is not None
            and not (self._all_left or self.lies)
            and timeline.now < end + END_LIMIT_S
        ):
            timeline.run_until(timeline.now + DECIDED_S)
        return self._judge(rounds, seconds)

    @property
    def _all_left(self) -> bool:
        return bool(self.left) and not (self.peers or self.ended)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.timeline.at(START + seconds, action)

    def _round(self) -> int:
        return max((peer.coordinator.round for peer in self._honest), default=0)

    @property
    def _everybody(self) -> list[SimulatedPeer]:
        return [*self.peers.values(), *self.ended, *self.left]

    @property
    def _honest(self) -> list[SimulatedPeer]:
        return [peer for peer in self._everybody if not isinstance(peer.conduct, LyingMember)]

    def _hurt(self, fault: Fault) -> None:
        names = sorted(self.peers)
        if not names:
            return
        chosen = sorted({names[number % len(names)] for number in fault.peers})
        if fault.kind == "partition":
            self.network.side = dict.fromkeys(chosen, 1)
            self.timeline.after(fault.seconds, self._heal)
        for name in chosen:
            peer = self.peers[name]
            if fault.kind == "freeze" and peer.alive and not peer.frozen:
                peer.freeze(fault.seconds)
            elif fault.kind == "kill" and peer.alive and not peer.frozen:
                peer.kill()
                peer.books.forget()
                del self.peers[name]
                self.ended.append(peer)
                self.timeline.after(fault.seconds, lambda old=peer: self._restart(old))

    def _heal(self) -> None:
        self.network.side = {}

    def _restart(self, old: SimulatedPeer) -> None:
        self.ended.remove(old)
        self.start(old.name, stage=old.stage, step_s=old.step_s, books=old.books, log=old.log)
        self.peers[old.name].sends = old.sends

    # ---- what must hold --------------------------------------------------------------------------
    def _judge(self, rounds: int, seconds: float) -> Outcome:
        everybody, false = self._honest, self.false_digests
        for peer in everybody:
            peer.count_steps()
        voids: dict[str, int] = {}
        for peer in everybody:
            for reason in peer.voids:
                voids[reason] = voids.get(reason, 0) + 1
        heads = [peer for peer in everybody if peer.stage == 0]
        chain = max((peer.log.chain for peer in heads), key=len, default=[])
        records = [each for digest, each in chain if each.round < rounds and digest not in false]
        logs = [peer.log for peer in everybody]
        logs += [
            kept.log
            for archive in self.archives.values()
            if not isinstance(archive, LyingArchive)
            for kept in archive.stages
        ]
        return Outcome(
            rounds=rounds,
            committed=len(records),
            every_head_share=min(
                (self._share(peer, records) for peer in heads if peer.name in self.peers),
                default=1.0,
            ),
            conserved=all(peer.books.balanced and self._credited(peer) for peer in everybody),
            one_chain=self._one_chain(everybody),
            last_rounds=tuple(
                max(
                    (peer.log.head().round for peer in everybody if peer.stage == stage), default=-1
                )
                for stage in range(self.manifest.stages)
            ),
            archived=self.archives[BOOTSTRAP].stages[0].log.head().round,
            uncounted=sum(
                peer.books.trained - sum(peer.books.counted.values()) for peer in everybody
            ),
            seconds=seconds,
            false_records=max(len(false.intersection(log.digests)) for log in logs),
            forks=sum(peer.forks for peer in everybody),
            left=len(self.left),
            lost_share=sum(peer.books.lost for peer in everybody)
            / max(1, sum(peer.books.trained for peer in everybody)),
            left_s=self.left_at - self.ended_at if self.ended_at and self._all_left else None,
            voids=voids,
            events=self.timeline.happened,
        )

    def _share(self, peer: SimulatedPeer, records: Iterable[SimulatedRecord]) -> float:
        mine = [record for record in records if record.round >= peer.first_round]
        return sum(record.member(peer.name) is not None for record in mine) / max(1, len(mine))

    def _credited(self, peer: SimulatedPeer) -> bool:
        """Whether the records that a peer has merged hold what it thinks they do."""
        named = {
            record.round: member.tokens
            for _, record in peer.log.chain
            if record.round <= peer.books.round and (member := record.member(peer.name)) is not None
        }
        return named == peer.books.counted

    def _one_chain(self, everybody: Iterable[SimulatedPeer]) -> bool:
        """Whether no two records of a stage follow the same one."""
        following: dict[tuple[int, str], str] = {}
        for peer in everybody:
            for digest, record in peer.log.chain:
                if following.setdefault((peer.stage, record.previous), digest) != digest:
                    return False
        return True
