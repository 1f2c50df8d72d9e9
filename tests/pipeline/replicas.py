"""Peers of one process that train replicas: real members, workers, reservations and heads.

A head blocks in its inbox and in its requests; what the others do meanwhile happens there, one
piece at a time and in an order that dice decide. Time passes only when nothing else can happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dilocox.dht.records import StageRecord
from dilocox.peer.training.inner_optimizer import clip_factor
from dilocox.pipeline.frames import FrameLimits
from dilocox.pipeline.head import Head
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.tuning import Tuning
from tests.pipeline.peers import Peer, Plan
from tests.pipeline.swarms import stage_record
from tests.pipeline.wires import Vanished, Wires

TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Going:
    """A step that a head completed: GO was given to these members."""

    head: str
    step: int
    members: tuple[str, ...]
    batch: list[Tensor]
    learning_rate: float


class Leader:
    """A peer of stage 0 with its head; does what peer/training/roles.py does around it."""

    def __init__(self, swarm: Swarm, peer: Peer) -> None:
        plan = swarm.plan
        self.peer, self.me, self._swarm = peer, peer.me, swarm
        self.stop = False
        self._fed: tuple[list[Tensor], float] = ([], 0.0)
        self._version: int | None = None
        peer.box.inbox.wait = self._wait
        peer.box.meanwhile = lambda: self._meanwhile(2)
        self.head = Head(
            me=peer.me,
            client_mode=peer.client,
            tuning=Tuning(
                microbatches=plan.microbatches,
                shape=plan.shape,
                codec=plan.codec,
                window=plan.window,
            ),
            member=peer.member,
            records=swarm.records,
            clip=self._clip,
            tell=peer.tell,
            stopping=lambda: self.stop,
            leave_limit_s=lambda: 120.0,
            clock=swarm.wires.monotonic,
        )
        self._show()

    @property
    def members(self) -> tuple[str, ...]:
        return self.head.members

    def form(self) -> str:
        reason = self.head.form()
        self._show()
        return reason

    def step(self, batch: list[Tensor], learning_rate: float = 1e-2) -> Stepped | None:
        self._fed, self._version = (batch, learning_rate), self.peer.version
        stepped = self.head.step(batch, learning_rate)
        if stepped is not None:
            self.peer.steps.append((self.me, stepped.step))
        self._version = None
        self._show()
        return stepped

    def train(self, batches: list[list[Tensor]]) -> list[Stepped]:
        """A step on each batch; a replica that breaks up is formed anew as often as it takes."""
        made: list[Stepped] = []
        for batch in batches:
            stepped = None
            while stepped is None:
                while not self.members and (reason := self.form()):
                    assert self._swarm.wires.now < 5000.0, reason
                    self._swarm.on_blocked()
                    self._swarm.run_for(1.0)
                stepped = self.step(batch)
            made.append(stepped)
        return made

    def _show(self) -> None:
        self.peer.reservation.open({"members": list(self.members), "epoch": self.head.epoch})

    def _clip(self, squared_norm: float, loss: float) -> float:
        batch, learning_rate = self._fed
        going = Going(
            head=self.me,
            step=self.peer.member.step,
            members=self.members,
            batch=batch,
            learning_rate=learning_rate,
        )
        self._version = None
        self._swarm.goings.append(going)
        clip_norm = self._swarm.plan.spec.clip_norm
        return clip_factor(squared_norm, clip_norm) if math.isfinite(loss) else math.nan

    # ---- while the head waits --------------------------------------------------------------------
    def _wait(self, timeout: float) -> None:
        wires = self._swarm.wires
        deadline = wires.now + timeout
        self._meanwhile(wires.dice.randrange(3))
        while timeout > 0 and not self.peer.box.inbox.messages:
            if not self._swarm.act():
                if wires.now >= deadline:
                    break
                wires.pass_time(min(TICK_S, deadline - wires.now))
            self._check()

    def _meanwhile(self, events: int) -> None:
        for _ in range(events):
            self._swarm.act()
        self._check()

    def _check(self) -> None:
        if not self.peer.box.active:
            raise Vanished(self.me)
        if self._version is not None:
            assert self.peer.version == self._version, "weights changed in mid-step"


class Swarm:
    """Peers, and the wires between them, whose time is theirs."""

    def __init__(self, plan: Plan, *, spares: int = 0, seed: int = 0) -> None:
        self.plan = plan
        b, t, d = plan.shape
        limits = FrameLimits(
            microbatch_size=b, sequence_length=t, hidden_size=d, evaluate_windows=8
        )
        self.wires = Wires(limits, seed)
        self.peers: dict[str, Peer] = {}
        self.goings: list[Going] = []
        self.on_blocked: Callable[[], None] = lambda: None  # when no replica can be formed
        self.leader = self.lead("head")
        for stage in range(1, plan.num_stages):
            for number in range(1 + spares):
                self.add(f"{stage}{'abcdefghij'[number]}", stage)

    def add(self, me: str, stage: int, *, client: bool = False) -> Peer:
        peer = Peer(self.plan, self.wires, me, stage, client=client)
        self.peers[me] = peer
        return peer

    def lead(self, me: str, *, client: bool = False) -> Leader:
        return Leader(self, self.add(me, 0, client=client))

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.box.active]

    def records(self) -> dict[int, dict[str, StageRecord]]:
        """What stands in the DHT; also of those that are gone."""
        records: dict[int, dict[str, StageRecord]] = {}
        for peer in self.peers.values():
            assignment = peer.reservation.assignment
            records.setdefault(peer.stage, {})[peer.me] = stage_record(
                state="spare" if assignment is None else "training",
                replica="" if assignment is None else assignment.head,
                client_mode=peer.client,
            )
        return records

    def act(self) -> bool:
        """Let something happen, whatever the dice say; False if nothing can."""
        events = self.wires.events()
        events += [peer.turn for peer in self.alive if peer.stage > 0 and not peer.busy]
        self.wires.dice.shuffle(events)
        return any(event() is not False for event in events)

    def settle(self) -> None:
        """Until nothing can happen without time passing."""
        for _ in range(10_000):
            if not self.act():
                return
        raise AssertionError("it never settles")

    def run_for(self, seconds: float) -> None:
        end = self.wires.now + seconds
        self.settle()
        while self.wires.now < end:
            self.wires.pass_time(TICK_S)
            self.settle()
