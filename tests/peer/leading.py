"""A head's role with a replica and data that tests set, beside a real training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from dilocox.peer.training.data import Corpus
from dilocox.peer.training.roles import Leading
from dilocox.pipeline.head import Head
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.reservation import Reservation
from tests.peer.loops import ME, Loop

HELD_OUT = torch.arange(4 * 9).reshape(4, 9)


class FakeHead:
    """A replica that does what it is told; `steps` holds None for a step that was not taken."""

    def __init__(self) -> None:
        self.members: tuple[str, ...] = (ME, "a")
        self.step_s = 0.01
        self.epoch = 1
        self.codec = "bf16"
        self.last_fault = ""
        self.undecided = False
        self.oldest_anchor: int | None = -1
        self.forms: deque[str] = deque()
        self.formed = 0
        self.steps: deque[Stepped | None] = deque()
        self.fed: list[tuple[list[int], float]] = []
        self.anchors: int | None = None  # the round at which all are, None for any
        self.late = 0  # how often they are asked until all have their last records
        self.asked: Callable[[], None] = lambda: None
        self.losses: deque[float | None] = deque()
        self.evaluated: list[int] = []
        self.dissolved = 0

    def form(self) -> str:
        self.formed += 1
        reason = self.forms.popleft()
        self.members = () if reason else (ME, "a")
        return reason

    def step(self, batch: Sequence[Tensor], learning_rate: float) -> Stepped | None:
        self.fed.append(([int(windows) for windows in batch], learning_rate))
        if self.steps:
            return self.steps.popleft()
        return Stepped(step=len(self.fed), loss=3.0, skipped=False)

    def anchors_at(self, round_number: int) -> bool:
        return self.anchors in (None, round_number)

    def anchors_now_at(self, round_number: int) -> bool:
        self.asked()
        self.late -= 1
        return self.late < 0

    def evaluate(self, batches: Sequence[Tensor]) -> float | None:
        self.evaluated.append(sum(len(batch) for batch in batches))
        return self.losses.popleft() if self.losses else 64.0

    def dissolve(self) -> None:
        self.dissolved += 1
        self.members = ()


class FakeCorpus:
    """Counts its microbatches; knows a part, a position and how often it was read."""

    def __init__(self) -> None:
        self.numbers = count()
        self.epoch = 0
        self.position = 0
        self.opened: list[tuple[int, int]] = []
        self.loaded: list[dict[str, Any]] = []
        self.fits = True
        self.part = self._coming = -1
        self.late = False  # what is opened comes later
        self.ready = True

    def __iter__(self) -> FakeCorpus:
        return self

    def __next__(self) -> Tensor:
        return torch.tensor(next(self.numbers))

    def open_part(self, part: int, position: int, *, wait: bool) -> None:
        assert not wait
        self.opened.append((part, position))
        self._coming = part

    def load_state_dict(self, state: dict[str, Any], part: int, *, wait: bool) -> bool:
        assert not wait
        same = state["part"] == part
        self.loaded += [state] * same
        self._coming = part
        return self.fits and same

    def arrived(self) -> bool:
        if not self.late:
            self.part = self._coming
        return self.part >= 0

    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part, "reads": True}


@dataclass
class Leader:
    """A head's role and all that it talks to."""

    loop: Loop
    head: FakeHead
    corpus: FakeCorpus
    reservation: Reservation
    role: Leading


def leader(loop: Loop) -> Leader:
    head, corpus = FakeHead(), FakeCorpus()
    reservation = Reservation(me=ME, stage=0, num_stages=2, on_change=lambda: None)
    role = Leading(
        manifest=loop.manifest,
        learner=loop.learner,
        head=cast("Head", head),
        reservation=reservation,
        corpus=cast("Corpus", corpus),
        held_out=HELD_OUT,
        coordinator=loop.coordinator,
        meter=loop.meter,
        me=ME,
        stop=loop.stop,
    )
    return Leader(loop, head, corpus, reservation, role)
