"""Two bits a value: one of four levels, for groups of 256 values with one step each. Apart from the
other widths, because its levels are not evenly spaced.

Why: what the members of a group average is close to normally distributed, and a quarter of the bits
of 8-bit codes then costs no loss that can be measured. A grid of equal steps with a zero, as
group_quantization.py has it, would spend two bits badly: most values lie near zero, and one outlier
would set the step for all. Lloyd and Max (1957, 1960) place the levels where the squared error is
least: for a normal distribution 0.453 and 1.510 standard deviations to either side.

How: the codes -2, -1, 0 and 1 mean -7, -2, 2 and 7 steps (`LEVELS`): a ratio of 3.5, between the
best for normal and for heavier tails. A group's step is the one with the least squared error for
its values, those above `FIRST_THRESHOLD` of its mean magnitude taken as outer ones; each value then
gets the nearest level under the step as stored. Zeros mean 2 steps, too: the residual takes that
back in the next round. Four codes share a byte, the earliest one in its lowest bits.

As in group_quantization.py each result is made of single IEEE operations, in one order on every
machine: a sum is made by halving its group.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

TWO_BIT_GROUP: Final = 256
LEVELS: Final = (2, 7)  # in steps, of the codes 0 and 1
FIRST_THRESHOLD: Final = 1.23  # of the mean magnitude: between Lloyd's and Max's levels
_MIDDLE = sum(LEVELS) / 2  # of the levels; times a step, which has 11 bits, it is exact


def fitted_steps(values: Tensor, block_size: int) -> Tensor:
    """The step of each group of fp32 values [n] that fits it best, fp32 [groups], before it is
    stored. Not finite where a value is not, or where a group's sum is too large for fp32.
    """
    (inner, outer), groups = LEVELS, -(-values.numel() // TWO_BIT_GROUP)
    steps = values.new_empty(groups)
    scratch = values.new_empty(min(groups, block_size // TWO_BIT_GROUP), TWO_BIT_GROUP)
    sums, signs = scratch.new_empty(len(scratch), TWO_BIT_GROUP // 2), scratch.int()
    for here, block, counted in _blocks(values, block_size):
        size = len(block)
        magnitudes = torch.abs(block, out=scratch[:size])
        total = _sums(magnitudes, sums[:size])
        threshold = (total * FIRST_THRESHOLD).div_(counted)
        over = magnitudes.sub_(threshold.view(-1, 1))
        below = torch.bitwise_right_shift(over.view(torch.int32), 31, out=signs[:size])  # -1
        number = below.sum(1, dtype=torch.int32).float().add_(TWO_BIT_GROUP)  # of outer ones
        above = _sums(over.clamp_(min=0.0), sums[:size]).add_(threshold * number)
        numerator = (total * inner).add_(above * (outer - inner))
        squares = (counted * inner**2).add_(number * (outer**2 - inner**2))
        torch.div(numerator, squares, out=steps[here])
    return steps.abs_()  # what infinities make is a NaN with a sign, and would count as the least


def write_levels(values: Tensor, steps: Tensor, packed: Tensor, block_size: int) -> None:
    """Put the codes of `values` under the steps [groups] into bytes `packed`; uses up `steps`."""
    # a value over infinity is zero: its code is 0 in a group whose step is
    divisors = steps.mul_(_MIDDLE).masked_fill_(steps == 0, torch.inf).view(-1, 1)
    scratch = values.new_empty(min(len(steps), block_size // TWO_BIT_GROUP), TWO_BIT_GROUP)
    bytewise = torch.empty_like(scratch, dtype=torch.int8)
    for groups, block, _ in _blocks(values, block_size):
        size = len(block)
        quotients = torch.div(block, divisors[groups], out=scratch[:size])
        # a quotient near zero vanishes beside 2, whether the machine flushes subnormals or not;
        # 0 to 3 are cut to whole numbers, and less 2 in two bits is the upper bit turned around
        bytewise[:size].copy_(quotients.clamp_(-2.0, 1.0).add_(2.0))
        fours = bytewise[:size].view(torch.int32).bitwise_xor_(0x02020202)
        fours |= fours >> 6
        fours |= fours >> 12
        start = groups.start * TWO_BIT_GROUP // 4
        packed[start : start + fours.numel()].copy_(fours.view(-1).bitwise_and_(0xFF))


def read_levels(packed: Tensor) -> Tensor:
    """What the codes in bytes [n / 4] mean, int8 [n], in steps."""
    return _table(packed.device).index_select(0, packed.to(torch.int32)).view(torch.int8)


def _blocks(values: Tensor, block_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Cut fp32 values [n] into blocks [groups, 256], the last group filled up with zeros; with each
    how many values its groups hold, fp32 [groups].
    """
    for start in range(0, values.numel(), block_size):
        block = values[start : start + block_size]
        filling = -block.numel() % TWO_BIT_GROUP
        block = F.pad(block, (0, filling)).view(-1, TWO_BIT_GROUP)
        counted = torch.full((len(block),), float(TWO_BIT_GROUP), device=values.device)
        counted[-1] -= filling
        first = start // TWO_BIT_GROUP
        yield slice(first, first + len(block)), block, counted


def _sums(block: Tensor, scratch: Tensor) -> Tensor:
    """The sum of each row of fp32 [groups, 256], in one order everywhere; scratch [groups, 128]."""
    half = TWO_BIT_GROUP // 2
    sums = torch.add(block[:, :half], block[:, half:], out=scratch)
    while half > 1:
        half //= 2
        sums[:, :half].add_(sums[:, half : 2 * half])
    return sums[:, 0].clone()


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """By byte what its four codes mean, as the four bytes of an int32 [256]."""
    inner, outer = LEVELS
    levels = torch.tensor([inner, outer, -outer, -inner], dtype=torch.int8)
    codes = torch.arange(256).view(-1, 1) >> torch.tensor([0, 2, 4, 6]) & 3
    return levels[codes].view(torch.int32).view(-1).to(device)
