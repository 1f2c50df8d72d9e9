"""A replica in one process: workers that hand each other what they produce, one after another."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection
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
        optimizers: list[InnerOptimizer],
        *,
        microbatches: int = MICROBATCHES,
        recompute: bool = False,
        document_end: int | None = None,
        spoil: Spoil = lambda _, __: False,
    ) -> None:
        self.stages = stages
        self.optimizers = optimizers
        self.workers = [
            StageWorker(
                stage,
                optimizer,
                microbatches=microbatches,
                recompute=recompute,
                document_end=document_end,
            )
            for stage, optimizer in zip(stages, optimizers, strict=True)
        ]
        self._spoil = spoil

    def restart(self) -> None:
        """A fault: nothing of the inner step survives."""
        for worker in self.workers:
            worker.restart()

    def run(self, batch: list[Tensor]) -> None:
        """Every microbatch down the chain and back up."""
        for microbatch, windows in enumerate(batch):
            self.workers[0].feed(microbatch, None, windows)
            made = self._run_one(0)
            for stage, worker in enumerate(self.workers[1:], start=1):
                worker.feed(microbatch, made.tensor, windows)
                made = self._run_one(stage)
            for stage in reversed(range(len(self.workers) - 1)):
                self.workers[stage].feed_gradient(microbatch, made.tensor)
                made = self._run_one(stage)
        assert all(worker.finished for worker in self.workers)

    def step(self, batch: list[Tensor], learning_rate: float) -> tuple[float, float, list[bool]]:
        """A whole inner step: loss, summed squared norm, and who took the step."""
        self.run(batch)
        loss = sum(worker.loss for worker in self.workers)
        squared_norm = sum(worker.squared_norm() for worker in reversed(self.workers))
        return loss, squared_norm, self.go(squared_norm + 0 * loss, learning_rate)

    def go(
        self, squared_norm: float, learning_rate: float, stages: Collection[int] = range(99)
    ) -> list[bool]:
        """End a step as a head does; only these stages hear of it."""
        factor = clip_factor(squared_norm, self.optimizers[0].spec.clip_norm)
        heard = [worker for stage, worker in enumerate(self.workers) if stage in stages]
        taken = [worker.go(factor, learning_rate) for worker in heard]
        self.restart()
        return taken

    def _run_one(self, stage: int) -> Produced:
        produced = self.workers[stage].run_one()
        assert produced is not None
        return replace(produced, tensor=None) if self._spoil(stage, produced) else produced


def batches(config: Config, steps: int, microbatches: int = MICROBATCHES) -> list[list[Tensor]]:
    """Windows int64 [2, 9] that count up, from anywhere below 8."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(8, (steps, microbatches, 2, 1), generator=generator)
    ids = (starts + torch.arange(9)) % config["vocab_size"]
    return [[windows.clone() for windows in batch] for batch in ids]


def rate(step: int) -> float:
    return 1e-2 / (1 + step % 4)


@lru_cache
def _built(config: str, stage: int, num_stages: int) -> StageModule:
    return build_stage(json.loads(config), stage, num_stages, SEED)


def fresh_stage(config: Config, stage: int, num_stages: int) -> StageModule:
    """A stage as every peer of it builds it at the start of a run."""
    built = _built(json.dumps(config), stage, num_stages)
    shared = [module.config for module in built.modules() if hasattr(module, "config")]
    return copy.deepcopy(built, {id(config): config for config in shared})


def chain(
    config: Config,
    num_stages: int,
    *,
    spec: InnerSpec = SPEC,
    precisions: tuple[Precision | None, ...] | None = None,
    **options: Any,
) -> Chain:
    stages = [fresh_stage(config, stage, num_stages) for stage in range(num_stages)]
    optimizers = [
        InnerOptimizer(stage.named_parameters(), spec, precision=precision)
        for stage, precision in zip(stages, precisions or (None,) * num_stages, strict=True)
    ]
    return Chain(stages, optimizers, **options)


def weights(chained: Chain) -> Weights:
    named = [item for stage in chained.stages for item in stage.named_parameters()]
    return {name: parameter.detach().clone() for name, parameter in named}


def gradients(chained: Chain) -> Weights:
    named = [item for stage in chained.stages for item in stage.named_parameters()]
    return {name: p.grad for name, p in named if p.grad is not None}


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
