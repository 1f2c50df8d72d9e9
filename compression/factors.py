"""Where the pieces of each tensor lie in the vectors of a low-rank exchange; `low_rank` says which.

Why apart: places are shapes and sums, worth checking without any arithmetic in view.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dilocox.compression.exact import MAX_RANK
from dilocox.compression.groups import GROUP_SIZE, group_count
from dilocox.compression.layout import TensorSlice


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """A tensor's (rows, cols) as a matrix: all dimensions but the last, and the last.

    None for vectors and scalars.
    """
    if len(shape) < 2:
        return None
    return math.prod(shape[:-1]), shape[-1]


def padded(numel: int) -> int:
    """`numel`, filled up to whole groups of 64."""
    return group_count(numel) * GROUP_SIZE


@dataclass(frozen=True)
class Factored:
    """A factored matrix: tensor `index` of the layout, and where its pieces start."""

    index: int
    name: str
    rows: int
    cols: int
    rank: int
    start: int  # in the stage's vector
    p_start: int  # in the vector of phase 0
    q_start: int  # in the vector of phase 1
    basis_start: int  # in the basis vector

    @classmethod
    def of(
        cls, index: int, piece: TensorSlice, rank: int, p_start: int, q_start: int, basis_start: int
    ) -> "Factored":
        """Tensor `piece` as a matrix; ValueError if it is none or cannot have this rank."""
        shape = matrix_shape(piece.shape)
        most = 0 if shape is None else min(*shape, MAX_RANK)
        if shape is None or not 0 < rank <= most:
            raise ValueError(
                f"rank {rank} for tensor {piece.name!r} of shape {piece.shape}: choose 0 to {most}"
            )
        return cls(index, piece.name, *shape, rank, piece.start, p_start, q_start, basis_start)

    @property
    def stage_slice(self) -> slice:
        """Its values in the stage's vector."""
        return slice(self.start, self.start + self.rows * self.cols)

    @property
    def q_slice(self) -> slice:
        """The values of Q' in the vector of phase 1."""
        return slice(self.q_start, self.q_start + self.rank * self.cols)

    def matrix(self, stage: Tensor) -> Tensor:
        """The matrix [rows, cols] in a stage's vector, a view."""
        return stage[self.stage_slice].view(self.rows, self.cols)

    def p(self, vector: Tensor) -> Tensor:
        """P^T [rank, rows] in a vector of phase 0, a view."""
        values = vector[self.p_start : self.p_start + self.rank * self.rows]
        return values.view(self.rank, self.rows)

    def q(self, vector: Tensor) -> Tensor:
        """Q'^T [rank, cols] in a vector of phase 1, a view."""
        return vector[self.q_slice].view(self.rank, self.cols)

    def basis(self, vector: Tensor) -> Tensor:
        """Q^T [rank, cols] in a basis vector, a view."""
        values = vector[self.basis_start : self.basis_start + self.rank * self.cols]
        return values.view(self.rank, self.cols)


@dataclass(frozen=True)
class Dense:
    """A tensor that phase 1 holds as it is."""

    start: int
    numel: int
    q_start: int

    @property
    def stage_slice(self) -> slice:
        """Its values in the stage's vector."""
        return slice(self.start, self.start + self.numel)

    @property
    def q_slice(self) -> slice:
        """Its values in the vector of phase 1."""
        return slice(self.q_start, self.q_start + self.numel)
