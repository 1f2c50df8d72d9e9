"""Chaos: peers of a swarm are hurt at random, many at once and while they heal; at the end all must
add up.

Nothing is aimed and nothing is waited for, as campaign.py does; what comes when, and to whom, the
seed says. `run` prints a line a fault, then the figures, and returns what is wrong.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dilocox.peer.rounds.group import tokens_cap
from dilocox.peer.rounds.record import RoundRecord
from dilocox.peer.rounds.standing import most_tokens
from tests.swarm import disks, links
from tests.swarm.campaign import Injury, NotRunning
from tests.swarm.harness import START_LIMIT_S, Peer, ProcessSwarm, peer_name
from tests.swarm.links import Links
from tests.swarm.processes import family
from tests.swarm.replaying import Machine, replay_on
from tests.swarm.small_run import fixed_steps, run_manifest

STAGES = (0, 0, 0, 0, 1, 1, 1, 1)
KINDS = ("kill", "freeze", "p2pd", "cut", "slow", "disk", "leave", "replace")
NEWCOMERS = 4  # so many peers may be replaced by new ones
DISK_BYTES = 64 << 20  # of each peer; a snapshot has 3 MB
MOST_AT_ONCE = 4
GAP_S, LASTS_S = (2.0, 12.0), (2.0, 25.0)
BOOTSTRAP_SHARE = 0.1  # of the faults: its main process is killed, and it is started again
PART_SHARE = 0.06  # half of the peers cannot reach the others and the bootstrap
SKEWS_S = (-420.0, 0.0, 0.0, 600.0)  # of the machines' clocks, in turn
STEP_S, INNER_STEPS = 0.08, 60
WHOLE_LIMIT_S = 240.0
ONE_CHAIN_LIMIT_S = 60.0  # that some keep a record, after the last fault, that the others void
LAST_ROUNDS = 2
MORE_MB = 60.0  # of the bootstrap's processes, from the first round to the end

Tell = Callable[[str], None]


@dataclass
class _Hurt:
    """A fault that lasts until it is mended; victim: None for what befalls no single peer."""

    what: str
    mend_at: float
    victim: Peer | None
    mend: Callable[[], object]


@dataclass
class Chaos:
    """Hurts this swarm for so long. impossible: kinds that this machine cannot do. done: how often
    what was done, and how many it ended. gone: who has left for good.
    """

    swarm: ProcessSwarm
    impossible: set[str]
    seed: int
    tell: Tell
    done: Counter[str] = field(default_factory=Counter[str])
    gone: list[Peer] = field(default_factory=list[Peer])

    @property
    def present(self) -> list[Peer]:
        """Who is in the run, or should be."""
        return [peer for peer in self.swarm.peers if peer not in self.gone]

    def add_peer(self, stage: int) -> None:
        """The next peer; its clock goes by its number."""
        skew_s = _skew_s(len(self.swarm.peers))
        self.swarm.add_peer(stage=stage, step_s=STEP_S, skew_s=skew_s)

    def run(self, seconds: float) -> None:
        randomly, began = random.Random(self.seed), time.monotonic()
        kinds = [kind for kind in KINDS if kind not in self.impossible]
        hurt: list[_Hurt] = []
        next_at = began
        while time.monotonic() < began + seconds or hurt:
            now = time.monotonic()
            for each in [each for each in hurt if each.mend_at <= now]:
                hurt.remove(each)
                each.mend()
            self.start_the_ended([each.victim for each in hurt])
            if next_at <= now < began + seconds and len(hurt) < MOST_AT_ONCE:
                next_at = now + randomly.uniform(*GAP_S)
                mend_at = now + randomly.uniform(*LASTS_S)
                if each := self._strike(randomly, kinds, mend_at, hurt):
                    hurt.append(each)
            self.swarm.look()
            time.sleep(0.1)

    def _strike(
        self, randomly: random.Random, kinds: list[str], mend_at: float, hurt: list[_Hurt]
    ) -> _Hurt | None:
        drawn, under_way = randomly.random(), {each.what for each in hurt}
        if drawn < BOOTSTRAP_SHARE:
            if "bootstrap" in under_way:
                return None
            self._note("bootstrap", "the bootstrap is killed")
            self.swarm.kill_bootstrap()
            return _Hurt("bootstrap", mend_at, None, self.swarm.restart_bootstrap)
        if drawn < BOOTSTRAP_SHARE + PART_SHARE:
            if "part" in under_way or not isinstance(links := self.swarm.links, Links):
                return None
            apart = randomly.sample(self.present, len(STAGES) // 2)
            self._note("part", f"{', '.join(peer.name for peer in apart)} are cut off together")
            links.part([self.swarm.host(peer) for peer in apart])
            return _Hurt("part", mend_at, None, links.unite)
        suffering = [each.victim for each in hurt]
        victim = randomly.choice([peer for peer in self.present if peer not in suffering])
        kind = randomly.choice(kinds)
        if kind == "replace" and self.done[kind] == NEWCOMERS:
            return None
        try:
            injury = Injury(self.swarm, victim, kind)
        except NotRunning:
            return None
        self._note(kind, f"{kind} {victim.name} of stage {victim.stage}, {victim.doing}")
        if kind == "replace":
            victim.expected = False
            victim.child.terminate()
            return _Hurt(kind, mend_at, victim, lambda: self._replace(victim))
        victim.expected = False  # until the end it may end by itself
        injury.strike()
        return _Hurt(kind, mend_at, victim, lambda: self._remedy(injury))

    def _remedy(self, injury: Injury) -> None:
        injury.remedy()
        injury.victim.expected = False

    def _replace(self, victim: Peer) -> None:
        """A new peer, with a key of its own, comes where this one left for good."""
        self.swarm.terminate(victim)
        self.gone.append(victim)
        self.add_peer(victim.stage)
        self.swarm.peers[-1].expected = False

    def start_the_ended(self, suffering: Collection[Peer | None] = ()) -> None:
        """Who ended though nobody ended it: as the loss of p2pd soon after a start does, or a first
        start while the bootstrap is away.
        """
        for peer in self.present:
            if peer not in suffering and peer.child.returncode is not None:
                self._note("ended", f"{peer.name} had ended: {peer.child.last_line()}")
                self.swarm.restart(peer)
                peer.expected = False

    def _note(self, kind: str, line: str) -> None:
        self.done[kind] += 1
        self.tell(line)


def run(folder: Path, seed: int, seconds: float, tell: Tell) -> list[str]:
    """One run; what is wrong, a line each."""
    impossible: set[str] = set()
    most = len(STAGES) + NEWCOMERS
    with ExitStack() as lab:
        if reason := disks.available():
            impossible.add("disk")
            tell(f"no disk is filled: {reason}")
        else:
            for number in range(most):
                lab.enter_context(disks.small_disk(folder / peer_name(number), DISK_BYTES))
        between = None
        if reason := links.available():
            impossible |= {"cut", "slow"}
            tell(f"no link is cut or slowed: {reason}")
        else:
            between = links.Links(most + 1, mbit=100.0, delay_ms=10.0)
            lab.enter_context(between)
        manifest = run_manifest(stages=2, rounds=fixed_steps(INNER_STEPS))
        swarm = lab.enter_context(ProcessSwarm(folder, manifest, links=between))
        chaos = Chaos(swarm, impossible, seed, tell)
        return _run(swarm, chaos, seconds)


def _run(swarm: ProcessSwarm, chaos: Chaos, seconds: float) -> list[str]:
    for stage in STAGES:
        chaos.add_peer(stage)
    swarm.wait(lambda: all(map(_rounds, swarm.peers)), 2 * START_LIMIT_S, "all have a round")
    before, processes = swarm.bootstrap_mb(), len(family(f"{swarm.tag}.bootstrap"))
    chaos.run(seconds)
    wanted = {peer.name: _rounds(peer) + LAST_ROUNDS for peer in chaos.present}

    def whole() -> bool:
        chaos.start_the_ended()
        return all(_rounds(peer) >= wanted[peer.name] for peer in chaos.present)

    swarm.wait(whole, WHOLE_LIMIT_S, f"{LAST_ROUNDS} more rounds of all")
    for peer in chaos.present:
        peer.expected = True
    # one that has just been started has not all its processes yet
    swarm.wait(
        lambda: len(family(f"{swarm.tag}.bootstrap")) >= processes,
        START_LIMIT_S,
        "the bootstrap is up",
    )
    after = swarm.bootstrap_mb()
    rounds = {stage: len(swarm.chain(stage)) for stage in (0, 1)}
    voids = sum(len(peer.of_kind("void")) for peer in swarm.peers)
    chaos.tell(
        f"{dict(chaos.done)}; rounds by stage {rounds}, longest without one "
        f"{_longest_stall_s(swarm, 0, 1):.0f} s, of one stage "
        f"{max(_longest_stall_s(swarm, stage) for stage in (0, 1)):.0f} s, voids of single peers "
        f"{voids}, set aside {_set_aside(swarm)}; bootstrap {before:.0f} MB, then {after:.0f}"
    )
    flaws = [] if after < before + MORE_MB else [f"the bootstrap has {after:.0f} MB"]
    by_stage = {stage: [peer for peer in chaos.present if peer.stage == stage] for stage in (0, 1)}
    give_up = time.monotonic() + ONE_CHAIN_LIMIT_S
    while unequal := [
        each for stage, own in by_stage.items() for each in _unequal(swarm, stage, own)
    ]:
        # the votes of a round may have reached some alone: they are about to take another chain
        if time.monotonic() > give_up:
            break
        time.sleep(1.0)
    for stage, own in by_stage.items():
        unequal += _not_replayed(swarm, stage, own)
    return flaws + unequal


def _skew_s(number: int) -> float:
    return SKEWS_S[number % len(SKEWS_S)]


def _rounds(peer: Peer) -> int:
    return len(peer.rounds)


def _longest_stall_s(swarm: ProcessSwarm, *stages: int) -> float:
    """How long none of these stages had a round, as the peers say whose clocks are right."""
    numbered = enumerate(swarm.peers)
    on_time = [peer for number, peer in numbered if peer.stage in stages and not _skew_s(number)]
    times = sorted(line["time"] for peer in on_time for line in peer.rounds)
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def _set_aside(swarm: ProcessSwarm) -> int:
    """Rounds of which there were two records. Who saw nobody for a record's lifetime goes on alone,
    and where others did, too, one of the two chains is set aside.
    """
    return sum(len(seen) > 1 for stage in (0, 1) for seen in swarm.chain(stage).values())


def _unequal(swarm: ProcessSwarm, stage: int, present: list[Peer]) -> list[str]:
    """Whether those of a stage keep one chain, in which nothing counts that was not learnt."""
    flaws: list[str] = []
    kept: dict[int, dict[str, RoundRecord]] = {}
    holders: dict[str, list[str]] = {}
    for peer in present:
        for entry in swarm.round_log(peer).entries():
            if (record := entry.header()) is not None:  # else it was pruned meanwhile
                kept.setdefault(record.round, {})[entry.digest] = record
                holders.setdefault(entry.digest, []).append(peer.name)
    for number, records in sorted(kept.items()):
        if len(records) > 1:
            who = [holders[digest] for digest in records]
            flaws.append(f"stage {stage}, round {number}: {who} keep one record each")
    swarm.look()  # after that of the logs: what is in a record was told before
    told: dict[tuple[str, int], set[int]] = {}
    for peer in swarm.of_stage(stage):
        for event in peer.of_kind("sent"):
            told.setdefault((peer.peer_id, event["round"]), set()).add(event["tokens"])
    chain = {number: next(iter(records.values())) for number, records in kept.items()}
    for number, record in sorted(chain.items()):
        counted = {name for part in record.parts if part.numel for name in part.contributors}
        stated = {member.peer: member.tokens for member in record.members}
        most = most_tokens(stated, record.voters, tokens_cap(swarm.manifest))
        for member in record.members:
            believed = most[member.peer]
            learnt = {min(each, believed) for each in told.get((member.peer, number), ())}
            if member.peer in counted and member.tokens not in learnt:
                flaws.append(f"stage {stage}, round {number}: {member.tokens} tokens of nobody")
    for last, following in itertools.pairwise(sorted(kept)):
        if {record.previous for record in kept[following].values()} != kept[last].keys():
            who = [holders[digest] for number in (last, following) for digest in kept[number]]
            flaws.append(f"stage {stage}: round {following} does not follow round {last}; {who}")
        elif chain[following].chain_tokens != chain[last].chain_tokens + chain[following].tokens:
            flaws.append(f"stage {stage}, round {following}: the chain's tokens do not add up")
    return flaws if chain else [f"stage {stage}: nobody keeps a record"]


def _not_replayed(swarm: ProcessSwarm, stage: int, present: list[Peer]) -> list[str]:
    """Whether another process finds the anchors from kept records. A peer that has taken a state of
    others may have no record after it: then the next one is asked, and at last the archive.
    """
    told = {
        line["round"]: line["anchor_sha256"]
        for peer in swarm.of_stage(stage)
        for line in peer.rounds
    }
    for peer in sorted(present, key=_rounds, reverse=True):
        os.kill(peer.child.pid, signal.SIGKILL)
        peer.expected = False
        swarm.wait_until_gone(peer)
        if (flaws := _flaws_of(peer.state, stage, told)) is not None:
            return flaws
    swarm.kill_bootstrap()
    flaws = _flaws_of(swarm.folder / "bootstrap", stage, told)
    swarm.restart_bootstrap()
    return [f"stage {stage}: nothing could be replayed"] if flaws is None else flaws


def _flaws_of(folder: Path, stage: int, told: Mapping[int, str]) -> list[str] | None:
    """What a replay of this folder finds; None where there is nothing to replay."""
    found = replay_on(Machine(name="another process"), folder, stage)
    flaws = [f"stage {stage}, {folder.name}: {flaw}" for flaw in found.flaws]
    if not found.replayed:
        return flaws or None
    if told.get(found.replayed[-1], found.anchor_sha256) != found.anchor_sha256:
        flaws.append(f"stage {stage}, {folder.name}: the replay's anchor is another one")
    return flaws
