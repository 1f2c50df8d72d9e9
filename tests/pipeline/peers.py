"""One peer of one process, all real but its network: stage, worker, member, reservation."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.member import Follower, Member
from dilocox.pipeline.reservation import Reservation
from dilocox.pipeline.stage import StageModule
from dilocox.pipeline.stage_worker import StageWorker
from tests.pipeline.chains import SPEC, Config, fresh_stage
from tests.pipeline.wires import Box, Wires

TINY: Config = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run's manifest says."""

    config: Config = field(default_factory=lambda: TINY)
    num_stages: int = 3
    microbatches: int = 3
    window: int = 0
    codec: str = "fp32"
    recompute: bool = False
    longest_wait_s: float = 0.0
    spec: InnerSpec = SPEC

    @property
    def shape(self) -> tuple[int, int, int]:
        return 2, 8, int(self.config["hidden_size"])


class Anchor:
    """The weights that are evaluated: those that the stage began with, until told otherwise."""

    def __init__(self, module: StageModule) -> None:
        self.round = 0
        self.undecided = False
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]
        self.writes = 0
        self._module = module

    def hold(self) -> bool:
        return True

    @contextmanager
    def in_place(self) -> Generator[None]:
        live = [parameter.detach().clone() for parameter in self._module.parameters()]
        self._copy(self.weights)
        try:
            yield
        finally:
            self._copy(live)

    @torch.no_grad()
    def _copy(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self._module.parameters(), weights, strict=True):
            parameter.copy_(value)
            self.writes += 1


class Peer:
    """One peer of a stage.

    steps: those it made, as (head, number). told: what it told people. busy: it computes something
    for a long time, while its network answers.
    """

    def __init__(
        self, plan: Plan, wires: Wires, me: str, stage: int, *, client: bool = False
    ) -> None:
        self.me, self.stage, self.client = me, stage, client
        self.steps: list[tuple[str, int]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.busy = False
        self.module = fresh_stage(plan.config, stage, plan.num_stages)
        self.parameters = list(self.module.parameters())
        self.optimizer = InnerOptimizer(self.module.named_parameters(), plan.spec)
        self.worker = StageWorker(
            self.module,
            self.optimizer,
            microbatches=plan.microbatches,
            recompute=plan.recompute,
        )
        self.anchor = Anchor(self.module)
        self.reservation = Reservation(
            me=me,
            stage=stage,
            num_stages=plan.num_stages,
            clock=wires.monotonic,
            on_change=lambda: None,
        )
        self.set_window(64)
        self.box = Box(wires, me, stage, self.reservation.answer)
        wires.boxes[me] = self.box
        self.member = Member(
            stage=stage,
            num_stages=plan.num_stages,
            worker=self.worker,
            network=self.box,
            anchors=self.anchor,
            shape=plan.shape,
            vocabulary=int(plan.config["vocab_size"]),
            window_limit=lambda: self.window,
        )
        self.follower = Follower(
            member=self.member,
            reservation=self.reservation,
            tell=self.tell,
            longest_wait_s=plan.longest_wait_s,
            clock=wires.monotonic,
        )

    def set_window(self, microbatches: int) -> None:
        """It has memory for so many in flight."""
        self.window = microbatches
        self.reservation.open({"window": microbatches})

    def tell(self, kind: str, **facts: Any) -> None:
        self.told.append((kind, facts))

    def telling(self, kind: str) -> list[dict[str, Any]]:
        return [facts for told, facts in self.told if told == kind]

    @property
    def version(self) -> int:
        """Grows whenever the weights are written to, but for evaluations."""
        return sum(p._version for p in self.parameters) - self.anchor.writes

    @property
    def clean(self) -> bool:
        """No gradient is left, and nothing of an inner step."""
        return self.worker.idle and all(p.grad is None for p in self.parameters)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def copy_of(self, other: Peer) -> None:
        """Know all that the other knows."""
        for ours, theirs in zip(self.parameters, other.parameters, strict=True):
            ours.copy_(theirs)
        self.optimizer.load_state_dict(other.optimizer.state_dict())

    def turn(self) -> bool:
        """One turn of a follower; whether it did anything. Weights change in a step only."""
        waited: list[float] = []
        self.box.inbox.wait = waited.append
        before, nothing = self.version, not self.box.inbox.messages
        stepped = self.follower.turn(1.0)
        if stepped is not None:
            self.steps.append((self.follower.head, stepped.step))
        else:
            assert self.version == before, f"{self.me}: weights changed in mid-step"
        assert self.follower.between_steps == self.worker.idle
        return not (waited and waited[0] > 0 and nothing)
