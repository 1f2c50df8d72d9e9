"""Error feedback: what the codec left unsent of a stage's updates goes with the next send.

Why: coding loses up to half a step per value and round. Kept and sent later, the loss stays bounded
instead of piling up (EF-SGD, arXiv 1901.09847). The residual is measured against this peer's *own*
decoded contribution, never against the group's mean, which holds other peers' data.

How: with decay 1 it conserves progress. Over any sequence of calls the sum of all deltas that were
sent (and not undone) equals the sum of own contributions in records, plus the residual, plus the
messages not decided yet.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Residual:
    """The residual of one stage, a flat vector `values` [n] that its methods change in place."""

    def __init__(self, values: Tensor) -> None:
        """Start from `values`, which now belong to this object: zeros, or those of a snapshot."""
        if values.dim() != 1 or not values.is_floating_point():
            raise ValueError(f"residual is {values.dtype} {list(values.shape)}: pass a flat vector")
        self.values = values

    @classmethod
    def zeros(cls, numel: int, dtype: torch.dtype = torch.float32) -> "Residual":
        """An empty residual of `numel` values."""
        return cls(torch.zeros(numel, dtype=dtype))

    def take(self, delta: Tensor) -> Tensor:
        """A send: the message delta + residual [n], newly allocated. The residual is empty then."""
        message = delta + self.values
        self.values.zero_()
        return message

    def settle(
        self,
        message: Tensor,
        contribution: Tensor,
        decay: float,
        left_out: Iterable[slice] = (),
    ) -> None:
        """A record with this send was committed: keep `decay` of what it left of the message.

        contribution [n]: this peer's own, decoded, 0 where it did not count. `left_out`: where that
        is so, at least in part; there all that is unsent stays, without decay.
        """
        unsent = message - contribution
        kept = [(part, unsent[part].clone()) for part in left_out]
        unsent.mul_(decay)
        for part, values in kept:
            unsent[part] = values
        self.values += unsent

    def restore(self, message: Tensor, delta: Tensor) -> None:
        """A send was undone: take back what its message held beyond `delta`."""
        self.values += message - delta

    def reopen(self, message: Tensor, delta: Tensor) -> None:
        """An undone send stands after all (a record names it): the reverse of `restore`."""
        self.values -= message - delta

    def clear(self) -> None:
        """Drop everything, as a peer does that starts from the anchor."""
        self.values.zero_()
