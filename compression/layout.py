"""Where each tensor of a stage lies in one flat fp32 vector, and how it is split over peers.

Why: the exchange, the anchor, the residual and the live weights all speak of the same flat vector,
so they must agree on it to the value. Every tensor starts at a multiple of 64, so no codec group
mixes two tensors. The digest of names and shapes tells peers that they mean the same vector.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from dilocox.compression.group_quantization import GROUP_SIZE, group_count, padded


@dataclass(frozen=True)
class TensorSlice:
    """One tensor's place: the values start .. start + numel of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """An ordered list of tensors in one flat vector; build it with `of`."""

    slices: tuple[TensorSlice, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int]]]) -> "FlatLayout":
        """The layout of (name, shape) pairs, in their order. Names must differ (ValueError)."""
        slices: list[TensorSlice] = []
        names: set[str] = set()
        start = 0
        for name, dimensions in tensors:
            shape = tuple(int(size) for size in dimensions)
            if name in names:
                raise ValueError(f"tensor {name!r} is given twice: names must differ")
            if any(size < 0 for size in shape):
                raise ValueError(f"tensor {name!r} has shape {shape}: sizes must be 0 or more")
            names.add(name)
            slices.append(TensorSlice(name, shape, start, math.prod(shape)))
            start += padded(slices[-1].numel)
        return cls(tuple(slices))

    @cached_property
    def numel(self) -> int:
        """Length of the flat vector, a multiple of 64; what lies between tensors is padding."""
        if not self.slices:
            return 0
        last = self.slices[-1]
        return last.start + padded(last.numel)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the names and shapes in order, as compact JSON in UTF-8."""
        canonical = json.dumps(
            [[piece.name, piece.shape] for piece in self.slices],
            ensure_ascii=False,
            separators=(",", ":"),
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def view(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views into `flat` [numel]."""
        if flat.dim() != 1 or flat.numel() != self.numel:
            raise ValueError(f"flat is {list(flat.shape)}: this layout takes [{self.numel}]")
        return {
            piece.name: flat[piece.start : piece.start + piece.numel].view(piece.shape)
            for piece in self.slices
        }


def split(numel: int, count: int, group_size: int = GROUP_SIZE) -> list[slice]:
    """Split [0, numel) over `count` reducers by whole groups, the first ones one group larger.

    The last group may be shorter. A part is empty where there are fewer groups than reducers.
    group_size: that of the codec, or a part that is encoded anew would have other codes.
    """
    if count < 1:
        raise ValueError(f"{count} parts: must be 1 or more")
    size, larger = divmod(group_count(numel, group_size), count)
    borders = [group_size * (index * size + min(index, larger)) for index in range(count + 1)]
    return [slice(min(start, numel), min(stop, numel)) for start, stop in pairwise(borders)]
