"""Norms of a stage's vectors, in chunks that stay in cache: no vector is allocated for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dilocox.peer.progress import CHUNK_VALUES


@torch.no_grad()
def norm(values: Tensor) -> float:
    """The Euclidean norm of a flat vector."""
    return math.sqrt(sum(_squared(values[part]) for part in _chunks(values)))


@torch.no_grad()
def relative_error(message: Tensor, carried: Tensor) -> float | None:
    """|message - carried| / |message|; None where that is no number, as of an empty message."""
    lost = sum(_squared(message[part] - carried[part]) for part in _chunks(message))
    whole = sum(_squared(message[part]) for part in _chunks(message))
    error = math.sqrt(lost / whole) if whole > 0 else math.nan
    return error if math.isfinite(error) else None


def _squared(chunk: Tensor) -> float:
    return float(torch.dot(chunk, chunk))


def _chunks(values: Tensor) -> Iterator[slice]:
    for low in range(0, values.numel(), CHUNK_VALUES):
        yield slice(low, low + CHUNK_VALUES)
