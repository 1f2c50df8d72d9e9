"""One weight and its merge state: the peer of the hand-made trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.peer.training.merge import Merge, MergeConfig, Outcome, RecordFacts, Remainder

OUTER = OuterStep(0.5, 0.5)
CONFIG = MergeConfig(weight=0.75, decay=1.0, max_age=8)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def unsent(merge: Merge) -> Tensor:
    """What this peer learnt and has not sent, as a new vector."""
    progress = merge.progress
    return progress.start - progress.live.to(progress.start.device)


class Peer:
    """One weight, its merge state, and the chain of records it sees."""

    def __init__(self, config: MergeConfig = CONFIG):
        self.live = one(100)
        self.merge = Merge(config, self.live, one(100), one(0), round_number=-1, digest="m")
        self.contribution: float | None = None

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.live -= 1.0
            self.merge.trained(1)

    def send(self, round_number: int) -> float:
        return self.merge.send(round_number).message.item()

    def record(self, round_number: int, average: float, *, mine: float | None = None) -> Outcome:
        """The next record of the chain arrives; `mine` is this peer's own part in it."""
        anchor, momentum = one(0), one(0)
        OUTER.apply(self.merge.anchor, self.merge.momentum, one(average), anchor, momentum)
        facts = RecordFacts(
            round=round_number,
            digest=f"d{round_number}",
            previous=self.merge.digest,
            contributor=mine is not None,
        )
        send, own = self.merge.in_flight.get(round_number), None
        if send is not None and mine is not None:
            own = Remainder(send.message - mine)
        return self.merge.commit(facts, anchor, momentum, own)

    @property
    def at(self) -> tuple[float, float, float]:
        """Anchor, live weight, start."""
        merge = self.merge
        return merge.anchor.item(), self.live.item(), merge.progress.start.item()
