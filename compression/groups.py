"""Arithmetic on groups of 64 fp32 values: magnitudes, scales, codes. `codec` puts them into bytes.

Why apart: these are the functions whose results must be equal, to the last bit, on every machine.
Each result is made of single IEEE operations, none of them fused or summed, and none depends on a
subnormal number, so neither CUDA nor a library that flushes subnormals to zero changes one.

How: in blocks that stay in a core's cache, through one scratch block, so a pass reads memory once.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_SIZE: Final = 64
SMALLEST_SCALE: Final = 2.0**-24  # fp16's smallest number above zero

_CPU_BLOCK = (
    1 << 18
)  # values: a block and its scratch fit a core's cache, the interpreter does not show
_DEVICE_BLOCK = 1 << 24  # values: few kernel launches on an accelerator
_SCALE_SLACK = 1 - 2.0**-20  # decoded 16-bit values were rounded to fp32; their scale must not grow
_MAGNITUDE_MASK = 0x7FFFFFFF


def group_count(numel: int) -> int:
    """How many groups hold `numel` values, the last one perhaps in part."""
    return -(-numel // GROUP_SIZE)


def block_size(tensor: Tensor) -> int:
    """How many values to work on at a time, a multiple of 64. Results do not depend on it."""
    return _CPU_BLOCK if tensor.device.type == "cpu" else _DEVICE_BLOCK


def blocks(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut fp32 values [n] into blocks [groups, 64]; the last group is filled up with zeros."""
    for start in range(0, values.numel(), block_size(values)):
        block = values[start : start + block_size(values)]
        if block.numel() % GROUP_SIZE:
            block = F.pad(block, (0, -block.numel() % GROUP_SIZE))
        block = block.view(-1, GROUP_SIZE)
        yield slice(start // GROUP_SIZE, start // GROUP_SIZE + len(block)), block


def group_magnitudes(values: Tensor) -> Tensor:
    """The largest magnitude of each group, fp32 [groups]; a NaN is above an infinity.

    Found on the bits as integers: magnitudes have the same order there, at twice the speed.
    """
    magnitudes = torch.empty(group_count(values.numel()), dtype=torch.int32, device=values.device)
    scratch = _scratch(values, torch.int32)
    for groups, block in blocks(values):
        bits = scratch[: len(block)]
        torch.bitwise_and(block.view(torch.int32), _MAGNITUDE_MASK, out=bits)
        torch.amax(bits, 1, out=magnitudes[groups])
    return magnitudes.view(torch.float32)


def largest(magnitudes: Tensor) -> float:
    """The largest of some magnitudes; NaN or infinity if there is one, 0 if there are none."""
    if not len(magnitudes):
        return 0.0
    return float(magnitudes.view(torch.int32).amax().view(torch.float32))


def group_scales(magnitudes: Tensor, factor: float, limit: int) -> Tensor:
    """The scale of each group, fp16 [groups]: the smallest under which no code passes `limit`."""
    if factor == 0:
        return torch.zeros_like(magnitudes, dtype=torch.float16)
    ideal = magnitudes * (1 / factor)
    # CUDA divides by a tensor, but multiplies by the reciprocal of a plain number.
    ideal /= torch.full((), float(limit), device=magnitudes.device)
    scales = ideal.to(torch.float16)
    # fp16 numbers above zero have the order of their bits: one more is the next number up.
    scales.view(torch.int16).add_(scales.float() < ideal * _SCALE_SLACK)
    return scales.masked_fill_(magnitudes <= factor * SMALLEST_SCALE / 2, 0)


def write_codes(values: Tensor, steps: Tensor, bits: int, packed: Tensor) -> None:
    """Put the codes of `values` under the steps [groups] into bytes `packed`; uses up `steps`."""
    # A value over infinity is zero: the code of a group whose scale is 0.
    divisors = steps.masked_fill_(steps == 0, math.inf).view(-1, 1)
    scratch = _scratch(values, torch.float32)
    group_bytes = GROUP_SIZE * bits // 8
    for groups, block in blocks(values):
        quotients = scratch[: len(block)]
        torch.div(block, divisors[groups], out=quotients)
        codes = quotients.round_().view(-1)  # half to even
        target = packed[groups.start * group_bytes : groups.stop * group_bytes]
        if bits == 4:
            pairs = codes.to(torch.int8).bitwise_and_(0x0F).view(torch.int16)
            pairs |= pairs >> 4  # the low byte holds the earlier code; the later one joins it
            target.copy_(pairs)
        else:
            target.view(torch.int8 if bits == 8 else torch.int16).copy_(codes)


def read_codes(packed: Tensor, bits: int) -> Tensor:
    """The codes in bytes [n * bits / 8] as int16 or int8 [n]; those of 4 bits come times 16."""
    if bits != 4:
        return packed.view(torch.int8 if bits == 8 else torch.int16)
    pairs = packed.to(torch.int16)
    pairs |= pairs << 4  # the later code now fills the upper half of the upper byte ...
    return pairs.view(torch.int8).bitwise_left_shift_(4)  # ... and the earlier one of the lower


def _scratch(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the largest block of `values`: [groups, 64]."""
    groups = group_count(min(values.numel(), block_size(values)))
    return torch.empty(groups, GROUP_SIZE, dtype=dtype, device=values.device)
