"""A member with nobody around it, for the tests of what it says and what it refuses."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dilocox.pipeline.activation_codec import tensor_frame
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.link import Arrived, LinkFacts, LinkKey
from dilocox.pipeline.member import Member
from dilocox.pipeline.messages import Go, MemberEvent, StageReport, Stepped, Totals
from dilocox.pipeline.reservation import MAX_WINDOW, Assignment
from tests.pipeline.chains import batches
from tests.pipeline.peers import TINY, Peer, Plan
from tests.pipeline.wires import LIMITS, Wires

PLAN = Plan(microbatches=2)
BATCH = batches(TINY, 1, 2)[0]
SHAPE = PLAN.shape


class Alone:
    """A member with nobody around it; keeps what it asks of its network."""

    def __init__(
        self,
        stage: int = 1,
        clients: tuple[bool, ...] = (False,) * 3,
        first_window: int = MAX_WINDOW,
    ) -> None:
        num_stages = len(clients)
        self.sent: list[tuple[str, Frame]] = []
        self.asked: list[tuple[str, LinkKey, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.measured = LinkFacts()
        self.peer = Peer(PLAN, Wires(LIMITS), f"p{stage}", stage)
        self.clients = clients
        self.member = Member(
            stage=stage,
            num_stages=num_stages,
            worker=self.peer.worker,
            network=cast(Any, self),
            anchors=self.peer.anchor,
            shape=SHAPE,
            vocabulary=31,
            window_limit=lambda: 5,
            first_window=first_window,
        )

    def open_link(
        self, key: LinkKey, peer: str, hello: Frame | None, opening_s: float = 0.0
    ) -> None:
        assert hello is None or hello.facts == {"upper_stage": key.upper_stage}
        self.asked.append(("expects" if hello is None else "dials", key, peer))

    def send(self, key: LinkKey, frame: Frame) -> None:
        self.sent.append((key.side, frame))

    def break_link(self, key: LinkKey, reason: str) -> None:
        self.refused.append((key.side, reason))

    def drop_links(self) -> None:
        self.asked.clear()

    def link_facts(self, key: LinkKey) -> LinkFacts:
        return self.measured

    # ---- what a neighbour does -------------------------------------------------------------------
    def take_up(self, epoch: int = 1, step: int = 0, **fields: Any) -> Stepped | None:
        return self.member.take_up(
            Assignment(
                replica="p0",
                epoch=epoch,
                head="p0",
                members=tuple(f"p{stage}" for stage in range(len(self.clients))),
                clients=self.clients,
                codecs=("fp32",) * (len(self.clients) - 1),
                step=step,
                **{"done": None, **fields},
            )
        )

    def key(self, side: Any, epoch: int = 1) -> LinkKey:
        stage = self.peer.stage
        return LinkKey("p0", epoch, stage - 1 if side == "upper" else stage, side)

    def hear(self, side: str, kind: str, step: int = 0, **fields: Any) -> MemberEvent | None:
        frame = Frame(kind=kind, replica="p0", epoch=1, step=step, **fields)
        return self.member.handle(Arrived(self.key(side), frame))

    def forward(self, microbatch: int = 0, step: int = 0, **facts: object) -> MemberEvent | None:
        return self._activations("forward", microbatch, step, facts)

    def evaluate(self, batch: int) -> MemberEvent | None:
        return self._activations("evaluate", batch, 0, {"round": self.peer.anchor.round})

    def _activations(
        self, kind: str, microbatch: int, step: int, facts: dict[str, object]
    ) -> MemberEvent | None:
        frame = Frame(
            kind=kind,
            replica="p0",
            epoch=1,
            step=step,
            microbatch=microbatch,
            shape=SHAPE,
            facts=facts,
        )
        torch.manual_seed(microbatch)
        made = tensor_frame(frame, "fp32", torch.randn(SHAPE), BATCH[microbatch % 2])
        return self.member.handle(Arrived(self.key("upper"), made))

    def gradient(self, microbatch: int = 0, step: int = 0) -> MemberEvent | None:
        frame = Frame(kind="gradient", replica="p0", epoch=1, step=step, microbatch=microbatch)
        made = tensor_frame(frame, "fp32", torch.ones(SHAPE))
        return self.member.handle(Arrived(self.key("lower"), made))

    def compute(self) -> None:
        """All of an inner step but its end."""
        for microbatch in range(2):
            self.forward(microbatch)
            assert self.member.work()
            self.gradient(microbatch)
            assert self.member.work()
        assert not self.member.work()

    def kinds(self, side: str) -> list[str]:
        return [frame.kind for to, frame in self.sent if to == side]

    def weights(self) -> list[Tensor]:
        return self.peer.weights()


def go_facts(**fields: Any) -> dict[str, object]:
    go = Go(factor=0.5, learning_rate=1e-2, loss=2.0, codecs=("fp32", "int8"))
    return {**go.to_facts(), **fields}


def sum_facts(**fields: Any) -> dict[str, object]:
    totals = Totals(squared_norm=4.0, loss=2.0)
    told = totals.plus(0.0, StageReport(anchor_round=3, compute_s=0.5)).to_facts()
    return {**told, **fields}
