"""How the messages of a stage become the vectors of an exchange, and its means an average.

A *scheme* says what the peers of a stage exchange of their message, in one or two phases:

    dense     the message itself, in groups of 64 values (group_quantization.py)
    low_rank  first P of every matrix that gains from it, then Q' of these and all other tensors
              (low_rank.py; PowerSGD, arXiv 1905.13727)

Each phase has one flat vector, cut into one part a reducer. What comes out of the means depends on
their bytes alone, on every machine (exact.py); a peer's own vectors need not be equal elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.compression.low_rank import LowRank, rank_limits
from dilocox.compression.workers import ALONE, Workers

Scheme = Literal["dense", "low_rank"]
MARGIN = 1.5  # a phase may take so much longer than the phase before it lets one expect


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What the manifest says of a run's exchanges.

    bits: 2, 4, 8, 16 or 32 per value; 4 or 8 with low_rank. max_factor: see
    group_quantization.py. rank: of the first exchange. min_rank, max_rank: its bounds.
    """

    scheme: Scheme
    bits: int
    max_factor: float
    rank: int
    min_rank: int
    max_rank: int


@dataclass(frozen=True)
class Phase:
    """One vector of an exchange: its length, and the codecs of its parts.

    codec: of what a member sends, and of the average that all get. row_codec: of the mean over some
    of the members on its way to where it is averaged with those of others; its error is in nobody's
    residual, so it has 16 bits.
    """

    numel: int
    codec: GroupCodec
    row_codec: GroupCodec


class StageCodec:
    """The scheme of one stage. Holds no state of an exchange: one serves all of them.

    Attributes:
        limits: per tensor of the layout the largest rank that pays, 0 where none does; empty unless
            the scheme is low_rank.
        first_ranks: those of the first exchange.
        device: where a member's own products are made; None is the CPU.
    """

    def __init__(self, layout: FlatLayout, compression: Compression, workers: Workers = ALONE):
        self.layout = layout
        self.compression = compression
        self.limits: tuple[int, ...] = ()
        self.device: torch.device | None = None
        self._codec = GroupCodec(compression.bits, compression.max_factor, workers)
        self._row_codec = GroupCodec(max(16, compression.bits), compression.max_factor, workers)
        if compression.scheme == "low_rank":
            limits = rank_limits(layout, compression.max_rank)
            # below the smallest rank of the run a matrix would gain too little to be factored
            self.limits = tuple(0 if n < compression.min_rank else n for n in limits)
        self.first_ranks = tuple(min(compression.rank, limit) for limit in self.limits)
        # of one exchange and of the next; each keeps a P^
        self._low_rank = lru_cache(maxsize=2)(partial(LowRank, layout, workers=workers))

    def low_rank(self, ranks: Sequence[int]) -> LowRank | None:
        """The factors of an exchange under these ranks; None unless the scheme is low_rank."""
        return self._low_rank(tuple(ranks)) if self.limits else None

    def choose_device(self, device: torch.device) -> None:
        """Make own products on this device if it is the faster one for the largest matrix.

        What a peer sends is its own affair: it need not be equal to the last bit elsewhere.
        """
        low_rank = self.low_rank(self.first_ranks)
        if low_rank is None or not low_rank.factored or device.type == "cpu":
            return
        largest = max(low_rank.factored, key=lambda matrix: matrix.rows * matrix.cols)
        alone = FlatLayout.of([(largest.name, (largest.rows, largest.cols))])
        sample = LowRank(alone, (largest.rank,))
        message, basis = torch.zeros(alone.numel), torch.zeros(sample.basis_numel)
        p_hat = torch.zeros(sample.p_numel)
        seconds: dict[torch.device | None, float] = {}
        for candidate in (device, None):
            sample.project(message, basis, candidate)  # the first time, libraries are loaded,
            sample.contract(message, p_hat, candidate)  # for which there may be no memory later
            began = time.perf_counter()
            sample.project(message, basis, candidate)
            seconds[candidate] = time.perf_counter() - began
        self.device = device if seconds[device] < seconds[None] else None

    def phases(self, ranks: Sequence[int]) -> tuple[Phase, ...]:
        """The vectors that an exchange under these ranks moves; ValueError for impossible ranks."""
        self.check(ranks)
        low_rank = self.low_rank(ranks)
        sizes = (self.layout.numel,) if low_rank is None else (low_rank.p_numel, low_rank.q_numel)
        return tuple(Phase(numel, self._codec, self._row_codec) for numel in sizes)

    def check(self, ranks: Sequence[int]) -> None:
        """Raise ValueError unless an exchange of this run may have these ranks."""
        lowest = self.compression.min_rank
        good = len(ranks) == len(self.limits) and all(
            rank == 0 if limit == 0 else lowest <= rank <= limit
            for rank, limit in zip(ranks, self.limits, strict=True)
        )
        if not good:
            raise ValueError(f"ranks {list(ranks)[:8]} ...: not within the run's bounds")

    def first_basis(self, seed: str) -> Tensor | None:
        """The basis of the first exchange; None unless the scheme is low_rank."""
        low_rank = self.low_rank(self.first_ranks)
        return None if low_rank is None else low_rank.initial_basis(seed)

    def means(self, ranks: Sequence[int], vectors: Sequence[Tensor]) -> StageMeans:
        """What the decoded mean vectors of an exchange's phases say."""
        return StageMeans(self.low_rank(ranks), self._codec, vectors, self.device)

    def encoder(
        self, message: Tensor, ranks: Sequence[int], basis: Callable[[], Tensor | None]
    ) -> StageEncoder:
        """A message [layout.numel] fp32 on its way through the phases.

        basis: makes the agreed basis, when the first phase needs it.
        """
        return StageEncoder(message, self.low_rank(ranks), basis, self.device)

    def undecayed(self, ranks: Sequence[int], left_out: Sequence[slice]) -> list[slice]:
        """Slices of the stage's vector that lack values where a member was left out.

        left_out: slices of the last phase's vector.
        """
        low_rank = self.low_rank(ranks)
        return list(left_out) if low_rank is None else low_rank.touched(left_out)


@dataclass
class StageEncoder:
    """One member's message, as the vector of each phase; P is made once, in so many `seconds`, and
    kept for a repeated attempt until `free`.
    """

    message: Tensor
    low_rank: LowRank | None
    basis: Callable[[], Tensor | None]
    device: torch.device | None
    seconds: float | None = None
    _first: Tensor | None = None

    @property
    def codec_s(self) -> float:
        """The most that this machine should compute at the start of a phase, as far as known."""
        if self.low_rank is None or not self.low_rank.factored:
            return 0.0
        first, second = self.low_rank.core_seconds()
        if self.seconds is None:
            return max(first, second)
        return MARGIN * self.seconds * second / first

    def free(self) -> None:
        """No attempt will need it any more, though ended ones still refer to it."""
        self._first = None

    def vector(self, phase: int, earlier: Sequence[Tensor]) -> Tensor:
        """The vector of a phase, given the decoded means of those before it."""
        if self.low_rank is None:
            return self.message
        if phase == 0:
            if self._first is None:
                began, basis = time.monotonic(), self.basis()
                if basis is None:
                    raise ValueError("low rank needs a basis")
                self._first = self.low_rank.project(self.message, basis, self.device)
                self.seconds = time.monotonic() - began
            return self._first
        p_hat = self.low_rank.orthonormal(earlier[0])
        return self.low_rank.contract(self.message, p_hat, self.device)


class StageMeans:
    """The means of one exchange, decoded; what comes out of them is equal on all machines."""

    def __init__(
        self,
        low_rank: LowRank | None,
        codec: GroupCodec,
        vectors: Sequence[Tensor],
        device: torch.device | None,
    ):
        """vectors: the mean vector of each phase, fp32; a dense `take_out` needs none. device: see
        StageCodec."""
        self._low_rank = low_rank
        self._device = device
        self._codec = codec
        self._vectors = vectors

    @cached_property
    def _p_hat(self) -> Tensor:
        first = self._vectors[0]
        return first if self._low_rank is None else self._low_rank.orthonormal(first)

    def average(self) -> Tensor:
        """The averaged message, fp32 [layout.numel]."""
        if self._low_rank is None:
            return self._vectors[-1]
        return self._low_rank.expand(self._p_hat, self._vectors[1])

    def average_pieces(self, work: Callable[[slice, Tensor], object]) -> None:
        """The averaged message a piece at a time, as `LowRank.expand_pieces` has it."""
        if self._low_rank is None:
            work(slice(0, len(self._vectors[-1])), self._vectors[-1])
        else:
            self._low_rank.expand_pieces(self._p_hat, self._vectors[1], work)

    def take_out(self, message: Tensor, counted: Sequence[slice]) -> None:
        """Take what a member's message put in out of it, in place: what the codec left of it stays,
        and all of it where it was left out.

        counted: the parts of the last phase's vector that hold its values.
        """
        low_rank, codec = self._low_rank, self._codec
        if low_rank is None:
            for part in counted:
                values = message[part]

                def take(piece: slice, sent: Tensor, values: Tensor = values) -> None:
                    values[piece].sub_(sent)

                codec.decode_pieces(codec.encode(values), values.numel(), take)
            return
        sent, end = low_rank.contract(message, self._p_hat, self._device), 0
        for part in sorted(counted, key=lambda part: part.start):
            sent[end : part.start] = 0.0
            end, values = part.stop, sent[part]
            codec.decode(codec.encode(values), values.numel(), out=values)
        sent[end:] = 0.0
        low_rank.take_out(message, self._p_hat, sent)

    def needed(self, energy: float) -> tuple[int, ...]:
        """Per tensor the smallest rank that holds this share of the average's energy."""
        return () if self._low_rank is None else self._low_rank.needed(self._vectors[1], energy)

    def next_basis(self, following: LowRank | None, seed: str) -> Tensor | None:
        """The basis of the exchange after this one; None unless the scheme is low_rank.

        seed: what columns that no mean gives are drawn from.
        """
        if self._low_rank is None or following is None:
            return None
        return self._low_rank.next_basis(self._vectors[1], following, seed)
