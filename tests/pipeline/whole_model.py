"""A whole model trained in one process: what a replica of any number of stages is compared with.

No pipeline: inner steps as anybody would write them, on the product's optimizer and loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.peer.training.inner_optimizer import InnerOptimizer, clip_factor
from dilocox.pipeline.stage_worker import next_token_loss


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One inner step: its mean loss in nats, not finite only if the step was skipped."""

    loss: float
    tokens: int
    squared_norm: float
    skipped: bool


def train_step(
    module: Callable[[Tensor], Tensor],
    optimizer: InnerOptimizer,
    microbatches: Iterable[Tensor],
    learning_rate: float,
) -> StepResult:
    """Take one inner step of a whole model: a stage that is both first and last.

    Args:
        module: from token ids int64 [b, t] to logits [b, t, v].
        optimizer: of that module's parameters.
        microbatches: windows int64 [b, t + 1], all of one shape; their losses weigh the same.
        learning_rate: of this step.
    """
    batch = list(microbatches)
    total = torch.zeros((), device=optimizer.device)
    for microbatch in batch:
        windows = microbatch.to(optimizer.device, non_blocking=True)
        with optimizer.autocast():
            logits = module(windows[:, :-1])
        loss = next_token_loss(logits, windows) / len(batch)
        optimizer.scale(loss).backward()
        total += loss.detach()
    squared_norm = optimizer.squared_norm()
    mean_loss = float(total)
    factor = clip_factor(squared_norm, optimizer.spec.clip_norm)
    taken = optimizer.step(factor if math.isfinite(mean_loss) else math.nan, learning_rate)
    tokens = sum(microbatch[:, 1:].numel() for microbatch in batch)
    return StepResult(loss=mean_loss, tokens=tokens, squared_norm=squared_norm, skipped=not taken)
