"""Levels: what all tokens have in common, channel by channel, is said once and taken out.

Why: 4-bit groups of neighbouring channels have one scale each. In hidden states a few channels are
far larger than their neighbours, and many lie around a centre far from zero, in every token. Codes
are spent on that, which is the same for all tokens, and what tells tokens apart is rounded away.

How: values [n, d] of n tokens become (value - centre of the channel) / level of the channel, where
the centre is a mean, and the level the root mean square of what lies around it. In both, all tokens
count the same however large they are, or one that is a thousand times its neighbours would move all
centres away from them. So levels have no unit: how large a token is, is left to the groups.
Centres and levels are bf16, and taken out as rounded: nothing is lost but what the codes then lose.
They take 4 d bytes, little-endian: all centres, all levels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST = 2.0**96  # mean magnitude of a token: above it, activations are near overflow
_SMALLEST = 2.0**-96  # tokens below it count as if of this size: sums of 1 / size do not overflow


class NotLevelled(ValueError):
    """Values that are not finite, or a token whose mean magnitude is above 2^96."""


def level_bytes(channels: int) -> int:
    """How many bytes centres and levels of so many channels take."""
    return 4 * channels


def take_out(values: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and levels of fp32 values [n, d], uint8 [4 d], and the values without them [n, d].

    Raises NotLevelled.
    """
    per_size = _reciprocal_sizes(values)
    centres = (per_size / per_size.sum() @ values).bfloat16()
    rest = values - centres.float()
    relative = rest * _reciprocal_sizes(rest).view(-1, 1)
    levels = relative.square_().mean(0).sqrt_().bfloat16()
    rest /= levels.float().masked_fill_(levels == 0, math.inf)
    return torch.cat([centres, levels]).view(torch.uint8), rest


def put_back(stated: Tensor, rest: Tensor) -> Tensor:
    """Undo `take_out`: the values [n, d], in place of `rest`.

    Bytes that somebody else made may give any numbers: the caller checks whether they are finite.
    """
    centres, levels = stated.view(torch.bfloat16).float().chunk(2)
    return rest.mul_(levels).add_(centres)


def _reciprocal_sizes(values: Tensor) -> Tensor:
    """One over the mean magnitude of each token, fp32 [n].

    Raises NotLevelled.
    """
    sizes = values.abs().mean(1)
    largest = float(sizes.amax())
    if not largest <= _LARGEST:  # nor is what is not a number
        kind = "too large for 4 bits" if math.isfinite(largest) else "infinite or not a number"
        raise NotLevelled(f"a value is {kind}")
    return sizes.clamp_(min=_SMALLEST).reciprocal_()
