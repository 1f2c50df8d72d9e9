"""What the last stage makes of logits: the cross-entropy of every next token, in fp32 nats.

In one place, so that a stage of a replica, a model in one piece and the validation compute the same
numbers.
"""

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in fp32, of logits [b, t, v] against windows [b, t + 1]."""
    return _cross_entropy(logits, windows, "mean")


def summed_next_token_loss(logits: Tensor, windows: Tensor) -> Tensor:
    """Return the sum over all b * t tokens of what `next_token_loss` is the mean of."""
    return _cross_entropy(logits, windows, "sum")


def _cross_entropy(logits: Tensor, windows: Tensor, reduction: str) -> Tensor:
    targets = windows[:, 1:].reshape(-1)
    return F.cross_entropy(logits.float().reshape(len(targets), -1), targets, reduction=reduction)
