"""Low rank: the two vectors that stand for a stage's message in an exchange of two phases. Apart
from stage_codec.py, which knows dense messages too and cuts them into parts.

Why: the update of a matrix [rows, cols] is mostly in a few directions (PowerSGD, arXiv 1905.13727;
DiLoCoX, arXiv 2506.21263). Its message M is exchanged as P = M Q, with a basis Q that all know, and
Q' = M^T P^, with P^ orthonormalised from the group's mean P; the average is P^ Q'^T.

    phase   vector
    0       P^T [rank, rows] of every factored matrix
    1       Q'^T [rank, cols] of every factored matrix and the values of every other tensor

Both in the layout's order, each piece filled up with zeros to a multiple of 64. Factors lie
transposed, because columns differ in magnitude: so most groups of a codec lie within one column. A
basis vector has Q^T like phase 1, without the other tensors.

How: own products are fp32 matrix products. What all peers must agree on to the last bit (P^, the
average, the next basis, the ranks needed) is `exact` arithmetic on the CPU. A thread has one matrix
at a time, the largest first (`workers.py`).

Where the pieces of each tensor lie in these vectors, `Factored` and `Dense` say: shapes and sums.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.exact import (
    MAX_RANK,
    continued,
    exact_product,
    orthonormalise,
    round_directions,
    strongest,
)
from dilocox.compression.group_quantization import group_count, padded
from dilocox.compression.layout import FlatLayout, TensorSlice
from dilocox.compression.workers import ALONE, PIECE, Workers

# Seconds of a modest core, three times what benchmarks/codec_times.py prints: of an own product's
# multiplication and addition, and of Gram-Schmidt with [rank, n] one of rank * rank * n.
PRODUCT_S, ORTHONORMAL_S = 6e-11, 1e-8

BLOCK_VALUES = 4 * PIECE  # of an average at a time: the work of each block on its own is little


def matrices_of(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """A tensor as (count, rows, cols) of matrices that follow each other; None for vectors and
    scalars.

    Three dimensions are the experts of a mixture, which learn different things: under one factor
    for all of them a rank would have to do for all. Else rows are all dimensions but the last.
    """
    if len(shape) < 2:
        return None
    if len(shape) == 3 and shape[1] > 1:
        return shape[0], shape[1], shape[2]
    return 1, math.prod(shape[:-1]), shape[-1]


@dataclass(frozen=True)
class Factored:
    """A factored matrix, of tensor `index` of the layout, and where its pieces start."""

    index: int
    name: str
    rows: int
    cols: int
    rank: int
    start: int  # in the stage's vector
    p_start: int  # in the vector of phase 0
    q_start: int  # in the vector of phase 1
    basis_start: int  # in the basis vector

    @property
    def stage_slice(self) -> slice:
        return slice(self.start, self.start + self.rows * self.cols)

    @property
    def q_slice(self) -> slice:
        return slice(self.q_start, self.q_start + self.rank * self.cols)

    @property
    def blocks(self) -> list[slice]:
        """The rows, in blocks that have the memory of a few pieces."""
        step = max(1, BLOCK_VALUES // self.cols)
        starts = range(0, self.rows, step)
        return [slice(low, min(low + step, self.rows)) for low in starts]

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
        return slice(self.start, self.start + self.numel)

    @property
    def q_slice(self) -> slice:
        return slice(self.q_start, self.q_start + self.numel)


def rank_limits(layout: FlatLayout, max_rank: int = MAX_RANK) -> tuple[int, ...]:
    """The largest useful rank of each tensor; 0 where low rank would not be smaller.

    Useful is a rank up to `max_rank`, 64 and min(rows, cols) with which P and Q' together fill
    fewer groups, so fewer bytes under any bits, than the tensor itself.
    """
    return tuple(_rank_limit(piece, min(max_rank, MAX_RANK)) for piece in layout.slices)


class LowRank:
    """The vectors of one stage under given ranks. Cheap to make.

    All vectors are flat, fp32 and contiguous; results are newly allocated, with zeros in the
    padding. `device`: where to multiply, a matrix at a time; None is the CPU.
    """

    def __init__(self, layout: FlatLayout, ranks: Sequence[int], workers: Workers = ALONE) -> None:
        """ranks: one a tensor, 0 for those that are not factored. ValueError if one is unfit."""
        if len(ranks) != len(layout.slices):
            raise ValueError(f"{len(ranks)} ranks: this layout has {len(layout.slices)} tensors")
        factored: list[Factored] = []
        dense: list[Dense] = []
        p_end = q_end = basis_end = 0
        for index, (piece, rank) in enumerate(zip(layout.slices, ranks, strict=True)):
            if rank == 0:
                dense.append(Dense(piece.start, piece.numel, q_end))
                q_end += padded(piece.numel)
                continue
            for name, start, rows, cols in _matrices(piece, rank):
                places = start, p_end, q_end, basis_end
                factored.append(Factored(index, name, rows, cols, rank, *places))
                p_end += padded(rank * rows)
                q_end += padded(rank * cols)
                basis_end += padded(rank * cols)
        self.layout = layout
        self.ranks = tuple(ranks)
        self.factored = tuple(factored)
        self.p_numel, self.q_numel, self.basis_numel = p_end, q_end, basis_end
        self._dense = tuple(dense)
        self._workers = workers
        self._newest: tuple[bytes, Tensor] | None = None

    def project(
        self, message: Tensor, basis: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        """Phase 0 of a message [n]: P = M Q of every factored matrix, [p_numel].

        An own part need not be equal everywhere, so this is a plain fp32 product.
        """
        _check(message, self.layout.numel, "message")
        _check(basis, self.basis_numel, "basis")
        result = torch.zeros(self.p_numel)
        self._each(
            lambda m: _multiply(m.basis(basis), m.matrix(message).T, m.p(result), device), device
        )
        return result

    def orthonormal(self, p_mean: Tensor) -> Tensor:
        """P^ from the decoded mean of phase 0, both [p_numel]; equal on every machine.

        Its columns are orthonormal up to their rounding to multiples of 2^-14, which fp32 holds.
        Columns that depend on earlier ones are zero. The newest P^ is kept, not to be changed: an
        exchange needs it, and its record once more.
        """
        _check(p_mean, self.p_numel, "p_mean")
        digest = hashlib.sha256(p_mean.numpy().data).digest()
        if self._newest is not None and self._newest[0] == digest:
            return self._newest[1]
        result = torch.zeros(self.p_numel)

        def orthonormal(matrix: Factored) -> None:
            rows = round_directions(orthonormalise(matrix.p(p_mean).double()))
            matrix.p(result).copy_(rows)

        self._each(orthonormal)
        self._newest = digest, result
        return result

    def contract(
        self, message: Tensor, p_hat: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        """Phase 1 of a message [n]: Q' = M^T P^ and all that is not factored, [q_numel]."""
        _check(message, self.layout.numel, "message")
        _check(p_hat, self.p_numel, "p_hat")
        result = torch.zeros(self.q_numel)
        self._each(lambda m: _multiply(m.p(p_hat), m.matrix(message), m.q(result), device), device)
        for tensor in self._dense:
            result[tensor.q_slice] = message[tensor.stage_slice]
        return result

    def expand(self, p_hat: Tensor, q_mean: Tensor) -> Tensor:
        """The averaged update [n] of P^ and the decoded mean of phase 1; equal on every machine."""
        result = torch.zeros(self.layout.numel)
        self.expand_pieces(p_hat, q_mean, lambda part, values: result[part].copy_(values))
        return result

    def expand_pieces(
        self, p_hat: Tensor, q_mean: Tensor, work: Callable[[slice, Tensor], object]
    ) -> None:
        """`expand` a piece at a time: tells `work` of each where it lies, and its values, in one of
        the threads. What no piece holds is padding.

        Wherever part borders lie: the product is exact (`exact.exact_product`), then rounded once.
        """
        _check(p_hat, self.p_numel, "p_hat")
        _check(q_mean, self.q_numel, "q_mean")

        def expand(piece: tuple[Factored, slice]) -> None:
            matrix, rows = piece
            values = torch.empty(rows.stop - rows.start, matrix.cols)
            exact_product(matrix.p(p_hat)[:, rows], matrix.q(q_mean), values)
            start = matrix.start + rows.start * matrix.cols
            work(slice(start, start + values.numel()), values.view(-1))

        self._workers.map(
            expand, [(each, rows) for each in self._largest() for rows in each.blocks]
        )
        for tensor in self._dense:
            work(tensor.stage_slice, q_mean[tensor.q_slice])

    def take_out(self, message: Tensor, p_hat: Tensor, q_own: Tensor) -> None:
        """Take a member's own contribution out of its message [n], in place.

        q_own: its own decoded vector of phase 1, zero where it did not count. Nothing depends on
        the last bits, so this is a plain fp32 product.
        """
        _check(message, self.layout.numel, "message")
        _check(p_hat, self.p_numel, "p_hat")
        _check(q_own, self.q_numel, "q_own")
        self._each(lambda m: m.matrix(message).addmm_(m.p(p_hat).T, m.q(q_own), alpha=-1))
        for tensor in self._dense:
            message[tensor.stage_slice] -= q_own[tensor.q_slice]

    def touched(self, left_out: Sequence[slice]) -> list[slice]:
        """The matrices and other tensors, as slices of the stage's vector, with a value in these
        slices of phase 1.

        In the layout's order, each once.
        """
        pieces: list[Factored | Dense] = [*self.factored, *self._dense]
        return [
            piece.stage_slice
            for piece in sorted(pieces, key=lambda piece: piece.start)
            if any(_overlap(piece.q_slice, part) for part in left_out)
        ]

    def needed(self, q_mean: Tensor, energy: float) -> tuple[int, ...]:
        """The rank each tensor needs: how few columns of Q' hold `energy` of its squared norm.

        energy: above 0, up to 1. 0 for tensors that are not factored or whose average is zero; of
        several matrices the one counts that needs most.
        """
        if not 0 < energy <= 1:
            raise ValueError(f"energy {energy!r}: choose above 0, up to 1")
        _check(q_mean, self.q_numel, "q_mean")
        counts = [0] * len(self.ranks)
        for matrix in self.factored:
            held = 0.0
            sums: list[float] = []
            for norm, _ in strongest(matrix.q(q_mean)):
                held += norm
                sums.append(held)
            if held > 0:
                needed = 1 + sum(part < energy * held for part in sums)
                counts[matrix.index] = max(counts[matrix.index], needed)
        return tuple(counts)

    def initial_basis(self, seed: str) -> Tensor:
        """A random orthonormal basis [basis_numel]; equal on every machine for equal seeds."""
        return self._continued({}, seed)

    def next_basis(self, q_mean: Tensor, following: "LowRank", seed: str) -> Tensor:
        """The basis [following.basis_numel] of the exchange that follows one with mean q_mean.

        Q', orthonormalised: its columns by norm (equals by index), as many as the rank that follows
        takes. What is missing then, and columns that are zero or dependent, are drawn anew.
        """
        if following.layout != self.layout:
            raise ValueError("the ranks that follow are for another layout")
        _check(q_mean, self.q_numel, "q_mean")
        return following._continued({m.name: m.q(q_mean) for m in self.factored}, seed)

    def core_seconds(self) -> tuple[float, float]:
        """A modest core's for phase 0, a basis and P, and for phase 1, P^ and Q'."""
        products = sum(m.rank * m.rows * m.cols for m in self.factored) * PRODUCT_S
        cols = sum(m.rank**2 * m.cols for m in self.factored)
        rows = sum(m.rank**2 * m.rows for m in self.factored)
        return products + cols * ORTHONORMAL_S, products + rows * ORTHONORMAL_S

    def _continued(self, rows: Mapping[str, Tensor], seed: str) -> Tensor:
        result = torch.zeros(self.basis_numel)

        def fill(matrix: Factored) -> None:
            known = rows.get(matrix.name, torch.empty(0, matrix.cols))
            basis = continued(known, matrix.rank, matrix.cols, seed, matrix.name)
            matrix.basis(result).copy_(basis)

        self._each(fill)
        return result

    def _each(
        self, work: Callable[[Factored], object], device: torch.device | str | None = None
    ) -> None:
        """Work on every factored matrix; on a device, whose memory training fills, one by one."""
        workers = self._workers if device is None else ALONE
        try:
            workers.map(work, self._largest())
        finally:
            if device is not None and torch.device(device).type == "cuda":
                torch.cuda.empty_cache()  # else blocks of the largest matrix stay here

    def _largest(self) -> list[Factored]:
        """The factored matrices, the largest first."""
        return sorted(self.factored, key=lambda each: -each.rows * each.cols)


def _matrices(piece: TensorSlice, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, start in the stage's vector, rows and cols of each matrix of a tensor; ValueError if
    there is none or they cannot have this rank.
    """
    count, rows, cols = matrices_of(piece.shape) or (0, 0, 0)
    most = min(rows, cols, MAX_RANK)
    if not 0 < rank <= most:
        raise ValueError(
            f"rank {rank} for tensor {piece.name!r} of shape {piece.shape}: choose 0 to {most}"
        )
    for number in range(count):
        name = piece.name if count == 1 else f"{piece.name}[{number}]"
        yield name, piece.start + number * rows * cols, rows, cols


def _rank_limit(piece: TensorSlice, most: int) -> int:
    shape = matrices_of(piece.shape)
    if shape is None:
        return 0
    count, rows, cols = shape
    for rank in range(min(most, rows, cols), 0, -1):
        groups = count * (group_count(rank * rows) + group_count(rank * cols))
        if groups < group_count(piece.numel):
            return rank
    return 0


def _check(vector: Tensor, numel: int, name: str) -> None:
    if vector.shape != (numel,) or vector.dtype != torch.float32:
        raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}: pass fp32 [{numel}]")


def _overlap(one: slice, other: slice) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def memory_is_full(error: RuntimeError) -> bool:
    """Whether it says that a GPU has no memory left: CUDA's libraries have errors of their own."""
    words = str(error).lower()
    full = "out of memory" in words or "alloc_failed" in words
    return full or isinstance(error, torch.OutOfMemoryError)


def _multiply(left: Tensor, right: Tensor, out: Tensor, device: torch.device | str | None) -> None:
    """out = left right, where `device` says; the operands and `out` are on the CPU."""
    if device is not None:
        try:
            out.copy_(torch.mm(left.to(device), right.to(device)))
            return
        except RuntimeError as error:
            if not memory_is_full(error):  # which training has now; the CPU can do it as well
                raise
    torch.mm(left, right, out=out)
