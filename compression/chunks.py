"""Arithmetic on chunks of 4096 fp32 values: their largest, two levels for these, places in bytes.

Why apart: as in `groups`, results must be equal to the last bit on every machine. They are made of
integers and of single IEEE operations, and none depends on a subnormal number.

How: with numpy, whose partial sort is ten times as fast as torch's, in blocks that stay in a core's
cache. Magnitudes are compared as the bits of fp32, which have the same order as integers.
"""
# numpy's own stubs leave the types of views and reshapes open:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilocox.compression.codec import PayloadRefused

CHUNK: Final = 4096
MAGNITUDE_MASK: Final = 0x7FFFFFFF
SMALLEST_PEAK: Final = 2.0**-105  # 2^-21 of it is no subnormal number

_BLOCK = 64  # chunks: a block and its scratch fit a core's cache, the interpreter does not show
_UNITS = 2.0**20  # a chunk's magnitudes are summed in units of its largest over this
_CODE_SHIFTS = np.array([0, 2, 4, 6], np.uint8)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Places = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def chunk_count(numel: int) -> int:
    """How many chunks hold `numel` values, the last one perhaps in part."""
    return -(-numel // CHUNK)


def kept_count(numel: int, k: int) -> int:
    """How many of `numel` values are sent: k of a chunk, of a shorter one in proportion."""
    if numel < 0:
        raise ValueError(f"numel {numel}: must be 0 or more")
    return numel // CHUNK * k + -(-(numel % CHUNK) * k // CHUNK)


def per_value(per_chunk: NDArray[Any], numel: int, k: int) -> NDArray[Any]:
    """What belongs to each chunk [chunks], once for each value sent [kept_count(numel, k)]."""
    return np.repeat(per_chunk, k)[: kept_count(numel, k)]  # only the last chunk sends fewer


def blocks(flat: Floats) -> Iterator[tuple[int, Ints]]:
    """Cut values [n] into blocks: where each starts, and its magnitudes [chunks, width] as bits.

    A last chunk that is shorter is a block of its own.
    """
    whole = len(flat) - len(flat) % CHUNK
    for start in range(0, whole, _BLOCK * CHUNK):
        block = flat[start : min(start + _BLOCK * CHUNK, whole)].view(np.int32)
        yield start, block.reshape(-1, CHUNK) & MAGNITUDE_MASK
    if whole < len(flat):
        yield whole, flat[whole:].view(np.int32).reshape(1, -1) & MAGNITUDE_MASK


def largest_places(magnitudes: Ints, k: int) -> Places:
    """Where the k largest of each row of [rows, width] lie in the flattened array, ascending.

    Of equal ones the earlier come first.
    """
    width = magnitudes.shape[1]
    least = np.partition(magnitudes, width - k, axis=1)[:, width - k, None]
    chosen = magnitudes >= least
    places = np.flatnonzero(chosen)
    if len(places) > k * len(magnitudes):  # more of some row's least ones than it has room for
        equal = magnitudes == least
        room = k - chosen.sum(1, keepdims=True) + equal.sum(1, keepdims=True)
        chosen &= ~equal | (np.cumsum(equal, axis=1, dtype=np.int16) <= room)
        places = np.flatnonzero(chosen)
    return places


def two_means(magnitudes: Ints) -> Floats:
    """The low and the high level [rows, 2] of magnitudes [rows, k], given as the bits of fp32.

    The squared error is least where sum^2 / count, added over both sides of the split, is largest.
    """
    ordered = np.sort(magnitudes, axis=1).view(np.float32)
    peak = ordered[:, -1:]
    alive = peak > SMALLEST_PEAK
    peak = np.where(alive, peak, np.float32(1))
    units = np.where(alive, np.rint(ordered / peak * np.float32(_UNITS)), np.float32(0))
    sums = np.cumsum(units.astype(np.int64), axis=1)
    below = np.zeros_like(sums)  # [row, split]: the sum of the `split` smallest ones
    below[:, 1:] = sums[:, :-1]
    above = sums[:, -1:] - below
    k = magnitudes.shape[1]
    counts = np.arange(k, dtype=np.float64)
    with_zero = units[:, :1] == 0  # these take part in no mean: the low level is 0
    fit = above.astype(np.float64) ** 2 / (k - counts)
    fit += np.where(with_zero, 0, below.astype(np.float64) ** 2 / np.maximum(counts, 1))
    split = np.argmax(fit, axis=1, keepdims=True)  # the first of equal ones
    high = np.take_along_axis(above, split, 1) / (k - split)
    low = np.take_along_axis(below, split, 1) / np.maximum(split, 1)
    low = np.where(with_zero, 0, np.where(split == 0, high, low))
    levels = (np.concatenate([low, high], axis=1) / _UNITS).astype(np.float32)
    return levels * np.where(alive, peak, np.float32(0))


def place_bytes(kept: int) -> int:
    """How many bytes hold `kept` places."""
    return (3 * kept + 1) // 2


def pack_places(places: Places) -> Bytes:
    """Places 0..4095 [n] as 12 bits each, two in three bytes, the earlier one in the low bits."""
    padded = np.zeros((len(places) + 1) // 2 * 2, "<u4")
    padded[: len(places)] = places
    pairs = padded[0::2] | padded[1::2] << np.uint32(12)
    return pairs.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)[: place_bytes(len(places))]


def unpack_places(packed: Bytes, kept: int) -> Places:
    """The places in bytes [place_bytes(kept)], int64 [kept]. Raises PayloadRefused for padding."""
    triples = np.zeros(-(-len(packed) // 3) * 3, np.uint8)
    triples[: len(packed)] = packed
    pairs = np.zeros((len(triples) // 3, 4), np.uint8)
    pairs[:, :3] = triples.reshape(-1, 3)
    joined = pairs.view("<u4")
    places = np.concatenate([joined & 0xFFF, joined >> 12], axis=1).reshape(-1)
    return _unpadded(places, kept).astype(np.int64)


def code_bytes(kept: int) -> int:
    """How many bytes hold `kept` codes."""
    return -(-kept // 4)


def pack_codes(codes: Bytes) -> Bytes:
    """Codes 0..3 [n], four to a byte, the earliest one in the lowest bits."""
    padded = np.zeros(4 * code_bytes(len(codes)), np.uint8)
    padded[: len(codes)] = codes
    return np.bitwise_or.reduce(padded.reshape(-1, 4) << _CODE_SHIFTS, axis=1)


def unpack_codes(packed: Bytes, kept: int) -> Bytes:
    """The codes in bytes [code_bytes(kept)], uint8 [kept]. Raises PayloadRefused for padding."""
    return _unpadded((packed[:, None] >> _CODE_SHIFTS & np.uint8(3)).reshape(-1), kept)


def max_mark_bytes(count: int) -> int:
    """The most bytes that mark which of `count` values are there."""
    return _bit_bytes(count) + _bit_bytes(_bit_bytes(count))


def pack_marks(present: NDArray[np.bool_]) -> Bytes:
    """The bitmap of `present` [n] without the bytes that are 0, then the bitmap of its bytes."""
    bitmap = _pack_bits(present)
    used = bitmap != 0
    return np.concatenate([bitmap[used], _pack_bits(used)])


def unpack_marks(raw: Bytes, numel: int) -> tuple[int, Places]:
    """Where in `raw` the marks at its end begin, and the places [present] marked, ascending.

    Raises PayloadRefused for marks that `pack_marks` does not make of `numel` values.
    """
    bitmap = np.zeros(_bit_bytes(numel), np.uint8)
    top = len(raw) - _bit_bytes(len(bitmap))
    if top < 0:
        raise PayloadRefused("length", f"{len(raw)} bytes have no room for {numel} places")
    used = _unpack_bits(raw[top:], len(bitmap))
    start = top - int(np.count_nonzero(used))
    if start < 0:
        raise PayloadRefused("length", f"{len(raw)} bytes have no room for the places marked")
    bitmap[used] = raw[start:top]
    if not raw[start:top].all():
        raise PayloadRefused("index", "a byte of the bitmap is 0 and marked as not 0")
    return start, np.flatnonzero(_unpack_bits(bitmap, numel))


def _bit_bytes(count: int) -> int:
    """How many bytes hold `count` bits."""
    return -(-count // 8)


def _pack_bits(bits: NDArray[np.bool_]) -> Bytes:
    """Bits [n], eight to a byte, the earliest one in the lowest bit."""
    return np.packbits(bits, bitorder="little")


def _unpack_bits(packed: Bytes, count: int) -> NDArray[np.bool_]:
    """The bits in bytes [_bit_bytes(count)], [count]. Raises PayloadRefused for padding."""
    return _unpadded(np.unpackbits(packed, bitorder="little").view(np.bool_), count)


def _unpadded(items: NDArray[Any], count: int) -> NDArray[Any]:
    if items[count:].any():
        raise PayloadRefused("padding", f"what fills up after {count} items is not 0")
    return items[:count]


def as_array(tensor: Tensor, name: str, dtype: torch.dtype) -> NDArray[Any]:
    """A vector as numpy sees it, on the CPU; ValueError for what is none of this type."""
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}: pass a contiguous vector of {dtype}"
        )
    return tensor.detach().cpu().numpy()


def room(out: Tensor | None, numel: int, device: torch.device) -> Tensor:
    """Where `numel` decoded values go: `out`, or a new vector."""
    if numel < 0:
        raise ValueError(f"numel {numel}: must be 0 or more")
    if out is None:
        return torch.empty(numel, dtype=torch.float32, device=device)
    if out.dtype != torch.float32 or list(out.shape) != [numel] or out.device != device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}: "
            f"pass float32 [{numel}] on {device}"
        )
    return out
