"""A fault campaign: a swarm of pipeline replicas is hurt again and again, and timed while it heals.

Before each fault the swarm is whole: so many replicas train, everybody else is a spare. The fault
hits a peer of the wanted role in the wanted phase; a peer that died is started again, with the same
state, and is a spare then. `run` makes one `Outcome` a fault; verdict.py judges them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm import disks
from tests.swarm.harness import Peer, ProcessSwarm, Replica
from tests.swarm.links import Links
from tests.swarm.processes import send_signal

KINDS = ("kill", "freeze", "p2pd", "cut", "leave")
ROLES = ("head", "middle", "last")
PHASES = ("forward", "backward", "between", "averaging")

SLOW_MBIT, SLOW_DELAY_MS = 2.0, 150.0
# Of kinds that last; a frozen peer must be given up by then.
HURT_S = 10.0
# Of all this only stops and splices are judged, so these are generous: a start takes long where
# others use the cores too.
WHOLE_LIMIT_S = 300.0
AIM_LIMIT_S = 120.0
AGAIN_LIMIT_S = 300.0
STATUS_S = 2.0  # no status is older
SETTLED_S = 21.0  # a peer that loses its processes sooner after its start gives up
LOOK_S = 0.0005  # a phase lasts some milliseconds


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is to happen to whom at which moment.

    kind: "kill" the main process, "freeze" all processes, kill "p2pd", "cut" the link, "leave".
    role: of the peer in its replica. phase: what the peer does then, see altered.py; "averaging":
    it has sent a pseudo-gradient of which it knows no outcome yet.
    """

    kind: str
    role: str
    phase: str


def draw(count: int, seed: int, *, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Different faults in which every kind, role and phase comes about equally often."""
    most = len(kinds) * len(ROLES) * len(PHASES) // 2
    if not 1 <= count <= most:
        raise ValueError(f"{count} faults: draw 1 to {most}")
    randomly = random.Random(seed)
    while True:
        decks = [_deck(each, count, randomly) for each in (kinds, ROLES, PHASES)]
        faults = [
            Fault(kind=kind, role=role, phase=phase)
            for kind, role, phase in zip(*decks, strict=True)
        ]
        if len(set(faults)) == count:
            return faults


def _deck(names: tuple[str, ...], count: int, randomly: random.Random) -> list[str]:
    whole, rest = divmod(count, len(names))
    deck = [*names * whole, *randomly.sample(names, rest)]
    randomly.shuffle(deck)
    return deck


class NotRunning(Exception):
    """A peer has ended, or starts."""


class Injury:
    """One fault done to one peer. All that takes time is done before `strike`; raises NotRunning.

    kind: one of `KINDS`, or "slow", its link, or "disk": its state folder, which must be a small
    disk of its own, is full.
    """

    def __init__(self, swarm: ProcessSwarm, victim: Peer, kind: str):
        self.victim = victim
        self.kind = kind
        self._swarm = swarm
        self._filler: Path | None = None
        # the main process first: in a tick another one could say that it lives
        self._processes = sorted(victim.processes(), key=lambda each: each.pid != victim.child.pid)
        p2pd = next((each.pid for each in self._processes if each.name == "p2pd"), None)
        if p2pd is None or victim.child.returncode is not None:
            raise NotRunning(victim.name)
        self._p2pd = p2pd

    @property
    def lasts(self) -> bool:
        """Whether it is over only when it is mended."""
        return self.kind in ("freeze", "cut", "slow", "disk")

    def strike(self) -> None:
        """Let it happen now."""
        match self.kind:
            case "kill":
                self._swarm.kill(self.victim)
            case "freeze":
                send_signal(self._processes, signal.SIGSTOP)
            case "p2pd":
                os.kill(self._p2pd, signal.SIGKILL)
            case "cut":
                self._links.cut(self._swarm.host(self.victim))
            case "slow":
                self._links.slow(self._swarm.host(self.victim), SLOW_MBIT, SLOW_DELAY_MS)
            case "disk":
                self._filler = disks.fill(self.victim.state)
            case "leave":
                self.victim.expected = False
                self.victim.child.terminate()
            case _:
                raise ValueError(f"no fault {self.kind}")

    def remedy(self) -> None:
        """Undo it; who has ended is started again, with the same state."""
        swarm, victim = self._swarm, self.victim
        match self.kind:
            case "kill":
                swarm.wait_until_gone(victim)
                swarm.restart(victim)
            case "freeze":
                send_signal(self._processes, signal.SIGCONT)
            case "cut":
                self._links.heal(swarm.host(victim))
            case "slow":
                self._links.quicken(swarm.host(victim))
            case "disk":
                assert self._filler is not None
                self._filler.unlink()  # a peer that has ended by it is started again by others
            case "leave":
                assert swarm.wait_until_left(victim) == 0, victim.log_text()[-2000:]
                swarm.restart(victim)
            case _:
                pass  # without p2pd a peer starts itself again

    @property
    def _links(self) -> Links:
        links = self._swarm.links
        assert isinstance(links, Links), "to cut or slow a link the swarm needs Links"
        return links


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one fault did; times in seconds, None where it never came.

    spare: whether one of the victim's stage was ready. landed: the phase that it hit indeed.
    detected_s: from the fault until a survivor knew.
    splice_s: from a survivor's knowing until the chain stood again, by replacement of a member or
        by another head.
    stop_s: between the last inner step before, of the member that went on first, or of the replica
        where it was a spare then, and the first one after. reason: of the head, or of the survivors
        of a head.
    back_s: from the fault until the swarm was whole again.
    """

    number: int
    fault: Fault
    victim: str
    peer_id: str
    hit_at: float
    spare: bool
    landed: str
    detected_s: float | None
    reason: str
    splice_s: float | None
    stop_s: float | None
    back_s: float

    def line(self) -> str:
        """For people."""
        fault = self.fault
        phase = fault.phase if self.landed == fault.phase else f"{fault.phase}?{self.landed}"
        return (
            f"{self.number:2d}  {fault.kind:6} {fault.role:6} {phase:10} {self.victim:7}"
            f"{'spare' if self.spare else 'none':6} detected {_shown(self.detected_s)} "
            f"({self.reason:7}) spliced {_shown(self.splice_s)} stopped {_shown(self.stop_s)} "
            f"whole again {_shown(self.back_s)}"
        )


def _shown(seconds: float | None) -> str:
    return "   -   " if seconds is None else f"{seconds:5.2f} s"


class Campaign:
    """Hurts one swarm, all of whose peers are shown (altered.py), started and never hurt before.

    count: replicas while it is whole. tell: gets one line a fault.
    """

    def __init__(self, swarm: ProcessSwarm, *, count: int, seed: int, tell: Callable[[str], None]):
        self.outcomes: list[Outcome] = []
        self._swarm = swarm
        self._count = count
        self._random = random.Random(seed)
        self._tell = tell
        self._whole_since: float | None = None

    def run(self, faults: Iterable[Fault], *, last_rounds: int = 0) -> None:
        """Each fault in turn, on a swarm that is whole; so many rounds of it at the end."""
        for number, fault in enumerate(faults, 1):
            self._wait_until_whole(rounds=1)
            self._one(number, fault)
            self._tell(self.outcomes[-1].line())
        self._wait_until_whole(rounds=last_rounds)

    def _wait_until_whole(self, *, rounds: int) -> None:
        """All replicas train, all others are spares, and since then rounds were committed."""
        self._swarm.wait(self._whole, WHOLE_LIMIT_S, "the swarm is whole")
        wanted = len(self._swarm.chain()) + rounds
        self._swarm.wait(
            lambda: len(self._swarm.chain()) >= wanted and self._whole(),
            WHOLE_LIMIT_S,
            f"{rounds} rounds of the whole swarm",
        )

    def _whole(self) -> bool:
        """Whether it is, and has been for so long that no status is from before."""
        if not self._looks_whole():
            self._whole_since = None
            return False
        self._whole_since = self._whole_since or time.time()
        return time.time() - self._whole_since > STATUS_S

    def _looks_whole(self) -> bool:
        found = self._swarm.replicas()
        training = [peer for replica in found for peer in replica.members]
        others = [peer for peer in self._swarm.peers if peer not in training]
        return (
            len(found) == self._count
            and all(replica.steps for replica in found)
            and all(peer in self._swarm.spares(peer.stage) for peer in others)
        )

    # ---- one fault -------------------------------------------------------------------------------
    def _one(self, number: int, fault: Fault) -> None:
        swarm = self._swarm
        replica, injury = self._aim(fault)
        victim = injury.victim
        spare = bool(swarm.spares(victim.stage))
        round_before = victim.in_flight
        hit_at, landed = self._hit(fault, injury)
        if fault.phase == "averaging":
            swarm.look()
            end = None if round_before is None else victim.decided(round_before)
            landed = "averaging" if end is None or end["time"] > hit_at else "decided"
        self._whole_since = None
        story = _Story(replica, victim, hit_at, swarm.peers)
        mended = self._watch(injury, story)
        if not mended:
            injury.remedy()
        swarm.wait(
            lambda: _noticed(injury, hit_at) and self._whole(),
            WHOLE_LIMIT_S,
            f"the swarm is whole after {fault}",
        )
        self.outcomes.append(
            Outcome(
                number=number,
                fault=fault,
                victim=victim.name,
                peer_id=victim.peer_id,
                hit_at=hit_at,
                spare=spare,
                landed=landed,
                detected_s=story.detected_s,
                reason=story.reason,
                splice_s=story.splice_s,
                stop_s=story.stop_s,
                back_s=(self._whole_since or time.time()) - hit_at,
            )
        )
        swarm.assert_equal_chains()

    def _aim(self, fault: Fault) -> tuple[Replica, Injury]:
        """A replica and who in it is to be hurt; for "averaging" at a moment in which it does."""
        swarm = self._swarm
        stage = {"head": 0, "middle": 1, "last": swarm.manifest.stages - 1}[fault.role]
        began = time.time()

        def found() -> Replica | None:
            ready = [each for each in swarm.replicas() if self._ready(each, stage, fault)]
            return self._random.choice(ready) if ready else None

        replica = swarm.wait(found, AIM_LIMIT_S, f"a moment for {fault}")
        victim = replica.members[stage]
        if fault.kind == "p2pd":
            started = victim.of_kind("training")[-1]["time"]
            swarm.wait(lambda: time.time() > started + SETTLED_S, SETTLED_S, "it has settled")
            if time.time() - began > 1.0:
                return self._aim(fault)
        return replica, Injury(swarm, victim, fault.kind)

    def _ready(self, replica: Replica, stage: int, fault: Fault) -> bool:
        victim = replica.members[stage]
        if fault.phase != "averaging":
            return replica.steps
        number = victim.in_flight
        return replica.steps and number is not None and victim.decided(number) is None

    def _hit(self, fault: Fault, injury: Injury) -> tuple[float, str]:
        """Strike in the wanted phase of the computing thread; when, and the phase afterwards."""
        shown = injury.victim.shown
        assert shown is not None
        deadline = time.monotonic() + AIM_LIMIT_S
        if fault.phase != "averaging":
            while shown.phase == fault.phase and time.monotonic() < deadline:
                time.sleep(LOOK_S)  # not at its very end
            while shown.phase != fault.phase and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        hit_at = time.time()
        injury.strike()
        return hit_at, shown.phase

    def _watch(self, injury: Injury, story: _Story) -> bool:
        """Until training goes on: remedy what lasts in time, and who died once that is known."""
        mended = False

        def over() -> bool:
            nonlocal mended
            story.look()
            hurt_s = time.time() - story.hit_at
            if not mended and hurt_s > HURT_S:
                injury.remedy()
                mended = True
            return story.again_at is not None and (mended or not injury.lasts)

        self._swarm.wait(over, AGAIN_LIMIT_S, f"{injury.kind} of {injury.victim.name} is healed")
        return mended


def _noticed(injury: Injury, hit_at: float) -> bool:
    """Whether the victim knows: without that its status is one from before."""
    kinds = ("lost", "dissolved", "fault") if injury.lasts else ("training",)
    return any(True for _ in _since(injury.victim, hit_at, *kinds))


class _Story:
    """How the survivors of a replica fare after a fault. everybody: of the swarm, who may take
    their place: where a stage has no spare, its replica goes, and the next one may have others.
    """

    def __init__(self, replica: Replica, victim: Peer, hit_at: float, everybody: Sequence[Peer]):
        self.hit_at = hit_at
        self.detected_s: float | None = None
        self.splice_s: float | None = None
        self.again_at: float | None = None
        self.stop_s: float | None = None
        self.reason = ""
        self._everybody = everybody
        self._members = replica.members
        self._survivors = [peer for peer in replica.members if peer is not victim]

    def look(self) -> None:
        """Take in what the survivors have said and done by now."""
        known = [
            event
            for peer in self._survivors
            for event in _since(peer, self.hit_at, "fault", "lost", "dissolved")
        ]
        if not known:
            return
        first = min(known, key=lambda event: event["time"])
        self.detected_s = first["time"] - self.hit_at
        # a head's own word is better than what a neighbour of the victim says
        told = [event["reason"] for event in known if event["event"] == "fault"]
        told += [event["reason"] for event in known if event["event"] == "lost"]
        self.reason = told[0] if told else "left"
        # a head that thaws may go on with others than the survivors
        told_at = {peer.name: self._heard_at(peer) for peer in self._members}
        if all(peer.doing == "spare" for peer in self._survivors):
            told_at = dict.fromkeys((peer.name for peer in self._everybody), first["time"])
        ends = [
            end
            for peer in self._everybody
            if (known_at := told_at.get(peer.name)) is not None
            if (end := self._went_on(peer, known_at))
        ]
        if ends:
            self.again_at, self.stop_s, self.splice_s = min(ends)

    def _heard_at(self, peer: Peer) -> float | None:
        """When this peer knew of the fault."""
        known = next(_since(peer, self.hit_at, "fault", "lost", "dissolved"), None)
        return None if known is None else known["time"]

    def _went_on(self, peer: Peer, known_at: float) -> tuple[float, float, float] | None:
        """When this peer took its next step, how long it had taken none, and its splice."""
        whole = next(_since(peer, known_at, "healed", "replica"), None)
        if whole is None or peer.shown is None:
            return None
        steps = peer.shown.steps
        again = next((at for at in steps if at > whole["time"]), None)
        if again is None:
            return None
        # who was a spare before has taken none for long: then the replica's last one counts
        went_on = [peer] if peer in self._members else self._members
        taken = (at for each in went_on if each.shown for at in each.shown.steps if at < again)
        before = max(taken, default=again)
        splice_s = whole.get("splice_s", whole["time"] - known_at)
        return again, again - before, splice_s


def _since(peer: Peer, since: float, *kinds: str) -> Iterator[dict[str, Any]]:
    return (each for each in peer.events if each["event"] in kinds and each["time"] >= since)
