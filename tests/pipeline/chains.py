"""A replica in one process: workers that hand each other what they produce, in random order.

What a link and the head's decisions will be, reduced to queues: frames of one link arrive in the
order they were sent, everything else happens whenever the dice say.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.inner_optimizer import InnerOptimizer, Precision, clip_factor
from dilocox.pipeline.stage import StageModule, build_stage
from dilocox.pipeline.stage_worker import Produced, StageWorker
from tests.pipeline.whole_model import StepResult, train_step

Config = dict[str, Any]
Weights = dict[str, Tensor]
Spoil = Callable[[int, Produced], bool]

SEED = 7
# Some gradients (of biases of keys) are zero but for rounding, which a small eps would blow up.
SPEC = InnerSpec(learning_rate=1e-2, clip_norm=0.5, eps=1e-5)
MICROBATCHES = 3


class Chain:
    """Workers of stages 0, 1, ...; `spoil(stage, produced)` says what becomes not finite."""

    def __init__(
        self,
        stages: list[StageModule],
        workers: list[StageWorker],
        optimizers: list[InnerOptimizer],
        *,
        window: int,
        seed: int = 0,
        spoil: Spoil = lambda _, __: False,
    ) -> None:
        self.stages = stages
        self.workers = workers
        self.optimizers = optimizers
        self.window = window
        self.spoil = spoil
        self.most_in_flight = 0
        self.history: list[tuple[int, str, int]] = []
        self._dice = random.Random(seed)
        self._clear()

    def _clear(self) -> None:
        self._down: list[deque[Produced]] = [deque() for _ in self.workers]
        self._up: list[deque[Produced]] = [deque() for _ in self.workers]
        self._fed = 0

    def restart(self) -> None:
        """A fault: nothing on any link survives."""
        self._clear()
        for worker in self.workers:
            worker.restart()

    def run(self, batch: list[Tensor], events: int | None = None) -> None:
        """Until all stages finished the step, or for so many events."""
        idle = 0
        while not all(worker.finished for worker in self.workers) and events != 0:
            if self._event(batch):
                idle = 0
                events = None if events is None else events - 1
            else:
                idle += 1
                assert idle < 2000, "deadlock"

    def step(self, batch: list[Tensor], learning_rate: float) -> tuple[float, float, list[bool]]:
        """A whole inner step: loss, summed squared norm, and who took the step."""
        self.run(batch)
        return self.go(learning_rate)

    def go(self, learning_rate: float) -> tuple[float, float, list[bool]]:
        loss = sum(worker.loss for worker in self.workers)
        squared_norm = sum(worker.squared_norm() for worker in self.workers)
        factor = clip_factor(squared_norm + 0 * loss, self.optimizers[0].spec.clip_norm)
        taken = [worker.go(factor, learning_rate) for worker in self.workers]
        self._clear()
        return loss, squared_norm, taken

    def _event(self, batch: list[Tensor]) -> bool:
        stage = self._dice.randrange(len(self.workers))
        worker = self.workers[stage]
        kind = self._dice.choice(["feed", "down", "up", "run"])
        if kind == "feed" and self._fed < len(batch) and self.workers[0].in_flight < self.window:
            self.workers[0].feed(self._fed, None, batch[self._fed])
            self._fed += 1
        elif kind == "down" and self._down[stage]:
            sent = self._down[stage].popleft()
            assert sent.windows is not None
            worker.feed(sent.microbatch, sent.tensor, sent.windows)
        elif kind == "up" and self._up[stage]:
            sent = self._up[stage].popleft()
            worker.feed_gradient(sent.microbatch, sent.tensor)
        elif kind == "run":
            return self._run_one(stage)
        else:
            return False
        self.most_in_flight = max(self.most_in_flight, self.workers[0].in_flight)
        return True

    def _run_one(self, stage: int) -> bool:
        produced = self.workers[stage].run_one()
        if produced is None:
            return False
        self.history.append((stage, produced.kind, produced.microbatch))
        if self.spoil(stage, produced):
            produced = replace(produced, tensor=None)
        if produced.kind == "forward":
            self._down[stage + 1].append(produced)
        elif produced.kind == "gradient":
            self._up[stage - 1].append(produced)
        return True


def batches(config: Config, steps: int, microbatches: int = MICROBATCHES) -> list[list[Tensor]]:
    """Windows int64 [2, 9] that count up, from anywhere below 8."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(8, (steps, microbatches, 2, 1), generator=generator)
    ids = (starts + torch.arange(9)) % config["vocab_size"]
    return [[windows.clone() for windows in batch] for batch in ids]


def rate(step: int) -> float:
    return 1e-2 / (1 + step % 4)


def chain(
    config: Config,
    num_stages: int,
    *,
    microbatches: int = MICROBATCHES,
    window: int = 2,
    seed: int = 0,
    recompute: bool = False,
    spec: InnerSpec = SPEC,
    precisions: tuple[Precision | None, ...] | None = None,
    spoil: Spoil = lambda _, __: False,
) -> Chain:
    stages = [build_stage(config, stage, num_stages, SEED) for stage in range(num_stages)]
    optimizers = [
        InnerOptimizer(stage.named_parameters(), spec, precision=precision)
        for stage, precision in zip(stages, precisions or (None,) * num_stages, strict=True)
    ]
    workers = [
        StageWorker(
            stage,
            optimizer,
            microbatches=microbatches,
            stage_index=index,
            num_stages=num_stages,
            recompute=recompute,
        )
        for index, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True))
    ]
    return Chain(stages, workers, optimizers, window=window, seed=seed, spoil=spoil)


def weights(chained: Chain) -> Weights:
    named = [item for stage in chained.stages for item in stage.named_parameters()]
    return {name: parameter.detach().clone() for name, parameter in named}


def same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@lru_cache
def whole_run(config: tuple[tuple[str, Any], ...], steps: int) -> tuple[Weights, list[StepResult]]:
    """The same model in one piece, trained by `train_step`."""
    fields = dict(config)
    whole = build_stage(fields, 0, 1, SEED)
    optimizer = InnerOptimizer(whole.named_parameters(), SPEC)
    results = [
        train_step(whole, optimizer, batch, rate(step))
        for step, batch in enumerate(batches(fields, steps))
    ]
    return {name: p.detach().clone() for name, p in whole.named_parameters()}, results
