"""Arithmetic equal to the last bit on every machine. Apart from low_rank.py, because in here only a
few operations are allowed (How).

Why: the factors of an averaged update enter the anchor, and anchors are compared by hash. A sum
whose order depends on threads or vector width would split the swarm.

How: either each step is one IEEE operation per element in a fixed order (`tree_sum`,
`orthonormalise`; numpy, because its calls cost a third of torch's), or no step rounds at all, so
that BLAS may use any order (`exact_product`). Do not put a fused call (addcmul), a reduction (sum,
norm, dot) or a function beyond + - * / sqrt in here.

The basis of a factored matrix, the directions in which its next updates are looked for, is made of
the same arithmetic (`strongest`, `continued`): a peer that draws or orders it otherwise than the
group spoils the average of P. A draw comes from a hash, not from a library's random numbers, whose
streams differ by version and processor.
"""

import hashlib
import json
import math
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_RANK: Final = 64  # the most terms that a sum of `exact_product` may have
DIRECTION_UNIT: Final = 2.0**-14  # directions, orthonormal rows, are multiples of it

_Doubles: TypeAlias = NDArray[np.float64]

_DEPENDENT = 1e-6  # of a row's norm; what the rows before it leave of it below that is noise
_RIGHT_BITS = 32  # and 14 of a left factor and 6 of 64 terms: below a double's 53
_SMALLEST_RIGHT_UNIT = 2.0**-112  # times 2^-14: the smallest fp32 number that is not subnormal
_PRODUCT_BLOCK = 1 << 18  # doubles, 2 MB: stays in a core's cache, is no burden to memory


def tree_sum(values: _Doubles) -> _Doubles:
    """Sums over the last dimension of float64 [..., n], by halves; uses `values` up.

    The tree: the values are filled up with zeros to a power of two; the second half is added to the
    first one, element by element, until one is left.
    """
    length = values.shape[-1]
    if not length:
        return np.zeros(values.shape[:-1])
    while length > 1:
        half = 1 << ((length - 1).bit_length() - 1)
        first = values[..., : length - half]
        np.add(first, values[..., half:length], out=first)
        length = half
    return np.array(values[..., 0])  # a view would keep all of `values` alive


def squared_norms(rows: Tensor) -> list[float]:
    """The squared norm of each row of fp32 or float64 [rank, n]."""
    wide = rows.double().numpy()
    return [float(tree_sum(row * row)) for row in wide]


def orthonormalise(rows: Tensor) -> Tensor:
    """Orthonormalise the rows of float64 [rank, n] in place, earlier rows first; returns them.

    Gram-Schmidt (in its modified form) twice. A row of which the rows before it leave under 1e-6 of
    its norm becomes zero; one of zeros stays so.
    """
    doubles = rows.numpy()
    scratch = np.empty_like(doubles)
    _gram_schmidt(doubles, scratch, squared_norms(rows))
    _gram_schmidt(doubles, scratch, [1.0] * len(doubles))
    return rows


def round_directions(rows: Tensor) -> Tensor:
    """Orthonormal rows, float64, in place to the nearest multiples of 2^-14, halves to even."""
    return rows.mul_(1 / DIRECTION_UNIT).round_().mul_(DIRECTION_UNIT)


def exact_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left^T right, for fp32 left [rank, rows], right [rank, cols] and out [rows, cols].

    Left holds multiples of 2^-14 up to 1, right any finite values, rank is at most 64. Right is
    rounded first, to 32 bits below the power of two above its largest magnitude; decoded values of
    at most 8 bits and one factor keep every bit. Then all products and all their sums are integers
    up to 2^52 times one power of two. A double holds those, so only the end rounds, once, to fp32.
    """
    wide_left = left.double()
    wide_right = _on_grid(right)
    rows, cols = out.shape
    block = max(1, _PRODUCT_BLOCK // max(1, cols))
    buffer = torch.empty(min(rows, block), cols, dtype=torch.float64)
    for start in range(0, rows, block):
        target = out[start : start + block]
        product = buffer[: len(target)]
        torch.mm(wide_left[:, start : start + block].T, wide_right, out=product)
        target.copy_(product)


def _gram_schmidt(rows: _Doubles, scratch: _Doubles, whole: list[float]) -> None:
    """One pass: each row in turn is taken out of all later ones, then scaled to norm 1.

    whole: the squared norms that rows had at first, or 1: those of the first pass's rows.
    """
    for index, row in enumerate(rows):
        later = rows[index + 1 :]
        sums = tree_sum(np.multiply(rows[index:], row, out=scratch[index:]))
        left = float(sums[0])
        if not left > _DEPENDENT**2 * whole[index]:
            row.fill(0)
            continue
        shares = (sums[1:] / left)[:, np.newaxis]
        np.subtract(later, np.multiply(shares, row, out=scratch[index + 1 :]), out=later)
        np.divide(row, math.sqrt(left), out=row)


def _on_grid(values: Tensor) -> Tensor:
    """Values as float64, rounded to multiples of 2^-32 of the power of two above the largest."""
    if not values.numel():
        return values.double()
    exponent = math.frexp(float(values.abs().amax()))[1]
    unit = max(math.ldexp(1.0, exponent - _RIGHT_BITS), _SMALLEST_RIGHT_UNIT)
    return values.double().mul_(1 / unit).round_().mul_(unit)


_SUMMANDS = 4  # uniform 16-bit numbers a value: near enough to a normal distribution, and exact
_ATTEMPTS = 4  # one draw in a million million is dependent; then the basis keeps a row of zeros


def strongest(rows: Tensor) -> list[tuple[float, int]]:
    """(squared norm, index) of each row of fp32 [rank, n], largest first, equals by lower index."""
    norms = squared_norms(rows)
    return sorted(zip(norms, range(len(norms)), strict=True), key=lambda row: (-row[0], row[1]))


def continued(rows: Tensor, rank: int, cols: int, seed: str, name: str) -> Tensor:
    """An orthonormal basis, float64 [rank, cols], from the largest rows of fp32 [any, cols].

    Missing rows, rows of zeros and rows that depend on larger ones are drawn anew from the seed and
    the tensor's name.
    """
    basis = torch.zeros(rank, cols, dtype=torch.float64)
    kept = [index for _, index in strongest(rows)][:rank]
    basis[: len(kept)] = rows[kept]
    for attempt in range(_ATTEMPTS):
        for index in _zero_rows(basis):
            basis[index] = _drawn(seed, name, index, attempt, cols)
        orthonormalise(basis)
        if not _zero_rows(basis):
            break
    return basis


def _zero_rows(rows: Tensor) -> list[int]:
    return [index for index, row in enumerate(rows) if not bool(row.any())]


def _drawn(seed: str, name: str, index: int, attempt: int, cols: int) -> Tensor:
    """A random row, float64 [cols]: sums of uniform numbers, all of them integers."""
    key = json.dumps([seed, name, index, attempt]).encode()
    raw = hashlib.shake_256(key).digest(2 * _SUMMANDS * cols)
    numbers = np.frombuffer(raw, "<i2").astype(np.float64)
    return torch.tensor(numbers).view(_SUMMANDS, cols).sum(dim=0)
