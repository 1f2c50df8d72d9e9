"""The live weights of a stage and its unsent progress, which is always `start - live`.

An inner step moves the live weights and leaves `start` alone; everything else that happens to
progress (it is sent, taken back, dropped, put on top of a new anchor) is one method here, and takes
no vector of the stage's size but its result. merge.py says when which of them is called.

The live weights are the flat tensor of which the model's parameters are views, so they change in
place only. They may be on another device than `start` (a GPU): then they are copied a chunk at a
time, and no vector of the stage's size is allocated for it.

Norms of such vectors are made in chunks, too (`norm`).
"""

# torch.linalg is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# What is copied to and from a GPU at a time. Not smaller: on a machine that does other things, too,
# the threads of each operation wait for each other (2 to 3 s for a send of 55 million values in
# chunks that fit a core's cache, 0.6 to 0.8 s in these).
CHUNK_VALUES = 1 << 22


class Progress:
    """`live` [n] on any device and `start` [n] beside the anchor, of one dtype."""

    def __init__(self, live: Tensor, start: Tensor):
        if live.dim() != 1 or live.shape != start.shape or live.dtype != start.dtype:
            raise ValueError(
                f"live weights {tuple(live.shape)} {live.dtype} and start {tuple(start.shape)} "
                f"{start.dtype}: both must be flat vectors of one length and dtype"
            )
        self.live = live
        self.start = start

    def check(self, *vectors: Tensor) -> None:
        """Raise ValueError unless these are vectors like `start`, apart from the live weights."""
        for vector in vectors:
            if vector.shape != self.start.shape or vector.dtype != self.start.dtype:
                raise ValueError(
                    f"a vector {tuple(vector.shape)} {vector.dtype}; this stage has "
                    f"{tuple(self.start.shape)} {self.start.dtype}"
                )
            if vector.device != self.start.device:
                raise ValueError(f"a vector on {vector.device}; pass it on {self.start.device}")
            if vector.numel() and vector.data_ptr() == self.live.data_ptr():
                raise ValueError("a vector shares memory with the live weights: pass a copy")

    @torch.no_grad()
    def take(self) -> Tensor:
        """All unsent progress as a new vector; nothing is unsent after it."""
        delta = torch.empty_like(self.start)
        for part in chunks(self.start):
            live = self.live[part].to(self.start.device)
            torch.sub(self.start[part], live, out=delta[part])
            self.start[part].copy_(live)
        return delta

    @torch.no_grad()
    def stand_on(self, anchor: Tensor) -> None:
        """Nothing is unsent, and the live weights are the anchor."""
        self.live.copy_(anchor)
        self.start.copy_(anchor)

    @torch.no_grad()
    def rebase(self, anchor: Tensor, in_flight: Sequence[Tensor], weight: float) -> None:
        """live = anchor - weight * (unsent + in flight); what is unsent stays the same."""
        for part in chunks(self.start):
            live = self.live[part].to(self.start.device)
            unsent = self.start[part].sub_(live)
            ahead = unsent
            for delta in in_flight:
                ahead = ahead + delta[part]
            torch.sub(anchor[part], ahead, alpha=weight, out=live)
            unsent.add_(live)  # `unsent` is `start` itself
            if live.device != self.live.device:
                self.live[part].copy_(live)


@contextmanager
def exchanged(one: Tensor, other: Tensor) -> Generator[None]:
    """For a while two flat vectors [n], on any devices, have each other's values."""
    _exchange(one, other)
    try:
        yield
    finally:
        _exchange(one, other)


@torch.no_grad()
def _exchange(one: Tensor, other: Tensor) -> None:
    for part in chunks(one):
        kept = one[part].clone()
        one[part].copy_(other[part])
        other[part].copy_(kept)


ROW_VALUES = 1 << 14  # few enough that their norm is exact to fp32


@torch.no_grad()
def norm(values: Tensor) -> float:
    """The Euclidean norm of a flat vector; not finite where a value is not.

    One pass over memory (0.05 s for 58 million values): it stands between the time of a group and
    the send for it.
    """
    squares = (_row_norms(values[part]).double().square().sum() for part in chunks(values))
    return math.sqrt(sum(map(float, squares)))


def _row_norms(values: Tensor) -> Tensor:
    """The norms of the vector's rows of `ROW_VALUES`, and of what is left, on the CPU."""
    whole = values.numel() // ROW_VALUES * ROW_VALUES
    return torch.cat(
        [
            torch.linalg.vector_norm(values[:whole].view(-1, ROW_VALUES), dim=1),
            torch.linalg.vector_norm(values[whole:]).view(1),
        ]
    ).cpu()


def chunks(values: Tensor) -> Iterator[slice]:
    """Slices of a flat vector, small enough that temporaries of their size do not count."""
    for low in range(0, values.numel(), CHUNK_VALUES):
        yield slice(low, low + CHUNK_VALUES)
