"""The basis of a factored matrix: the directions in which its next updates are looked for.

Why: a peer that draws or orders a basis otherwise than the group spoils the average of P. So a
draw comes from a hash, not from a library's random numbers, whose streams differ by version and
processor, and the rows are chosen and orthonormalised by `exact` arithmetic.
"""

import hashlib
import json

import numpy as np
import torch
from torch import Tensor

from dilocox.compression.exact import orthonormalise, squared_norms

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
