"""The validation loss: of the anchor, on the run's fixed held-out windows."""

# torch leaves `split` and `flatten` unannotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from dilocox.pipeline.loss import summed_next_token_loss

BATCH_WINDOWS = 8  # fixed, so that every peer sums in the same order


def batches_of(windows: Tensor) -> list[Tensor]:
    """Held-out windows int64 [n, t + 1] in the batches that every peer evaluates."""
    return list(windows.split(BATCH_WINDOWS))


@torch.no_grad()
def validation_loss(logits_of: Callable[[Tensor], Tensor], windows: Tensor) -> float:
    """Mean nats a token.

    Args:
        logits_of: token ids int64 [b, t] to logits [b, t, vocabulary].
        windows: int64 [n, t + 1], on the device of the model.
    """
    total = 0.0
    for batch in batches_of(windows):
        total += float(summed_next_token_loss(logits_of(batch[:, :-1]), batch))
    return total / (windows.shape[0] * (windows.shape[1] - 1))


@contextmanager
def weights_replaced(live: Tensor, other: Tensor) -> Generator[None]:
    """For a while the model whose parameters are views of `live` [n] has the weights of `other`."""
    kept = live.clone()
    live.copy_(other)
    try:
        yield
    finally:
        live.copy_(kept)
