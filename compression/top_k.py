"""The sparse codecs: of every 4096 values the few largest, and their mean over the members.

Why: on a slow uplink even 4 bits a value are too many. Of each chunk of 4096 values the k largest
by magnitude are sent, 12 bits for the place and 2 for the value; what stays behind is the
residual's. At k = 64 that is 0.23 bits a value (SparseLoCo, arXiv 2508.15706).

A part of `TopKCodec`, version 1, all numbers little-endian. C chunks; the last one may hold fewer
than 4096 values and sends k * length / 4096 of them, rounded up; K values in all:

    bytes         content
    1             version (1)
    1             bits of a value (2)
    2             zero
    4             fp32 factor, 0 or a power of two
    4 * C         per chunk two fp16 levels relative to the factor, 0 <= low <= high <= 1
    1.5 * K       12-bit places within the chunk, ascending; two share three bytes, the earlier one
                  in the low bits; rounded up
    K / 4         2-bit codes: bit 0 takes the high level, bit 1 the minus sign; four share a byte,
                  the earliest one in the lowest bits; rounded up

What is rounded up is filled with zero bits. No code but 0 stands for a level of 0.

How: where magnitudes tie, the earlier place is sent. The levels are the means of the larger and of
the smaller ones among the k magnitudes, split where the squared error is smallest (two-means;
a half to a quarter of the squared error of a split at the median). A value of zero decodes as zero:
if one is among the k, the low level is 0. Sums are taken over integers, magnitudes over the chunk's
largest times 2^20, so equal values have equal bytes on every machine. A value under 2^-21 of the
largest of its chunk counts as zero there, and so does a chunk under 2^-25 of the factor.

A mean of the members (`SparseMeanCodec`) is zero where nobody sent. B is numel / 8, rounded up:

    bytes         content
    any           the values that are not zero, in their order, as one `GroupCodec` part
    0 to B        the bitmap of their places, one bit a value, the earliest one in the lowest bit,
                  without the bytes that are 0
    B / 8         the bitmap of these bytes, in the same way; rounded up

All is filled up with zero bits. At k = 64 that is 0.5 bits a value for two members and 0.8 for
four, whose places differ; with a plain bitmap it would be 1.1 and 1.3.

The arithmetic on chunks has results that must be equal to the last bit on every machine: they are
made of integers and of single IEEE operations, and none depends on a subnormal number.

How: with numpy, whose partial sort is ten times as fast as torch's, in blocks that stay in a core's
cache. Magnitudes are compared as the bits of fp32, which have the same order as integers.
"""

# numpy's own stubs leave the types of views and reshapes open:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilocox.compression.group_codec import (
    DEFAULT_MAX_FACTOR,
    VERSION,
    GroupCodec,
    NotEncodable,
    PayloadRefused,
)

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


_BITS = 2
_HEADER = struct.Struct("<BBHf")
_MIN_FACTOR = 2.0**-80  # with it no subnormal value reaches 2^-21 of a chunk that is sent
_FACTOR_CEILING = 2.0**96
_INFINITY = 0x7F800000  # as the bits of fp32
_MINUS_ZERO = -(2**31)
_ONE_AS_FP16_BITS = 0x3C00


@dataclass(frozen=True)
class TopKCodec:
    """Encodes and decodes the parts that members send. Stateless: one serves all threads.

    `k` values are sent of each chunk of 4096. `max_factor`: the largest factor sent or accepted,
    which is also the largest magnitude that decoding yields.
    """

    k: int
    max_factor: float = DEFAULT_MAX_FACTOR

    def __post_init__(self) -> None:
        if not 1 <= self.k <= CHUNK:
            raise ValueError(f"top_k {self.k!r}: choose 1 to {CHUNK} of {CHUNK} values")
        if not _MIN_FACTOR <= self.max_factor <= _FACTOR_CEILING:
            raise ValueError(f"codec max_factor {self.max_factor!r}: choose 2^-80 to 2^96")

    @property
    def name(self) -> str:
        """A short name for tables and records, like top64."""
        return f"top{self.k}"

    def max_bytes(self, numel: int) -> int:
        """The length in bytes of every part of `numel` values."""
        kept = kept_count(numel, self.k)
        return _HEADER.size + 4 * chunk_count(numel) + place_bytes(kept) + code_bytes(kept)

    def encode(self, values: Tensor) -> Tensor:
        """Encode fp32 values [n], contiguous, into uint8 [max_bytes(n)] on the same device.

        Raises NotEncodable for NaN, infinities and values that need a factor above max_factor.
        """
        flat = as_array(values, "values", torch.float32)
        places, levels = self._choose(flat)
        factor = self._factor(float(levels.max(initial=0)))
        scales = (levels * np.float32(1 / factor if factor else 0)).astype("<f2")
        codes = self._codes(flat[places], _levels(scales, factor), len(flat))
        content = [
            np.frombuffer(_HEADER.pack(VERSION, _BITS, 0, factor), np.uint8),
            scales.reshape(-1).view(np.uint8),
            pack_places(places % CHUNK),
            pack_codes(codes),
        ]
        return torch.from_numpy(np.concatenate(content)).to(values.device)

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Decode a part of `numel` values into fp32 [numel], into `out` where given.

        payload: uint8 of any length and content, on the device of the result, left as it is. Raises
        PayloadRefused for what breaks the layout or its bounds; `out` may hold anything then.
        """
        raw = as_array(payload, "payload", torch.uint8)
        out = room(out, numel, payload.device)
        factor = self._read_header(raw, numel)
        places_start = _HEADER.size + 4 * chunk_count(numel)
        codes_start = places_start + place_bytes(kept_count(numel, self.k))
        scales = raw[_HEADER.size : places_start].view("<f2").reshape(-1, 2)
        _check_scales(scales, factor)
        places = self._read_places(raw[places_start:codes_start], numel)
        values = self._read_values(raw[codes_start:], numel, _levels(scales, factor))
        found = torch.from_numpy(values).to(out.device)
        return out.zero_().scatter_(0, torch.from_numpy(places).to(out.device), found)

    def _choose(self, flat: Floats) -> tuple[Places, Floats]:
        """The places of the values to send [K], ascending, and the levels [C, 2]."""
        places: list[Places] = [np.empty(0, np.int64)]
        levels: list[Floats] = [np.empty((0, 2), np.float32)]
        for start, magnitudes in blocks(flat):
            if magnitudes.max() >= _INFINITY:
                raise NotEncodable(_describe_non_finite(flat))
            found = largest_places(magnitudes, kept_count(magnitudes.shape[1], self.k))
            places.append(found + start)
            levels.append(two_means(magnitudes.reshape(-1)[found].reshape(len(magnitudes), -1)))
        return np.concatenate(places), np.concatenate(levels)

    def _factor(self, magnitude: float) -> float:
        """The smallest factor that is no less than `magnitude`."""
        if magnitude == 0:
            return 0.0
        mantissa, exponent = math.frexp(magnitude)
        factor = max(math.ldexp(1.0, exponent - (mantissa == 0.5)), _MIN_FACTOR)
        if factor > self.max_factor:
            raise NotEncodable(
                f"a magnitude of {magnitude:g} needs a factor of {factor:g}, above max_factor "
                f"{self.max_factor:g}: training has probably diverged; if not, raise max_factor"
            )
        return factor

    def _codes(self, values: Floats, levels: Floats, numel: int) -> Bytes:
        """The code of each value sent [K] under the decoded levels [C, 2]: of the nearer one."""
        low, high = levels.T
        middle = ((low + high) * np.float32(0.5)).view(np.int32)
        bits = values.view(np.int32)
        above = (bits & MAGNITUDE_MASK) > per_value(middle, numel, self.k)
        above &= per_value(high > 0, numel, self.k)
        signed = bits < 0
        signed &= above | per_value(low > 0, numel, self.k)
        return above | signed.astype(np.uint8) << np.uint8(1)

    def _read_header(self, raw: Bytes, numel: int) -> float:
        """Check version, bits, length and factor; return the factor."""
        expected = self.max_bytes(numel)
        header = raw[: _HEADER.size].tobytes()
        if len(header) == _HEADER.size:
            version, bits, reserved, factor = _HEADER.unpack(header)
            if version != VERSION:
                raise PayloadRefused("version", f"version {version}, this codec reads {VERSION}")
            if bits != _BITS:
                raise PayloadRefused("bits", f"{bits} bits, this codec reads {_BITS}")
            if reserved:
                raise PayloadRefused("reserved", f"reserved bytes hold {reserved} instead of 0")
        if len(raw) != expected:
            raise PayloadRefused(
                "length", f"{len(raw)} bytes, where {numel} values take {expected}"
            )
        if header[4:] == bytes(4):
            return 0.0
        factor = float(_HEADER.unpack(header)[3])
        if math.frexp(factor)[0] != 0.5 or not _MIN_FACTOR <= factor <= self.max_factor:
            raise PayloadRefused(
                "factor",
                f"{factor!r} is neither 0 nor a power of two from 2^-80 to {self.max_factor:g}",
            )
        return factor

    def _read_places(self, packed: Bytes, numel: int) -> Places:
        places = unpack_places(packed, kept_count(numel, self.k))
        places += per_value(CHUNK * np.arange(chunk_count(numel)), numel, self.k)
        # From chunk to chunk they ascend anyhow: none is 4096 or more above its chunk's start.
        if len(places) and (places[-1] >= numel or (places[1:] <= places[:-1]).any()):
            raise PayloadRefused("index", "places within a chunk do not ascend, or leave it")
        return places

    def _read_values(self, packed: Bytes, numel: int, levels: Floats) -> Floats:
        codes = unpack_codes(packed, kept_count(numel, self.k))
        values = np.concatenate([levels, -levels], axis=1)  # [chunk, code]
        unused = values == 0
        unused[:, 0] = False
        at = codes + 4 * per_value(np.arange(len(levels)), numel, self.k)
        if unused.reshape(-1)[at].any():
            raise PayloadRefused("code", "a code other than 0 stands for a level of 0")
        return values.reshape(-1)[at]


@dataclass(frozen=True)
class SparseMeanCodec:
    """Encodes and decodes means of sparse parts. Stateless: one serves all threads.

    `bits` per value that is not zero, and `max_factor`, as of `GroupCodec`.
    """

    bits: int
    max_factor: float = DEFAULT_MAX_FACTOR

    def __post_init__(self) -> None:
        GroupCodec(self.bits, self.max_factor)  # checks both

    @property
    def name(self) -> str:
        """A short name for tables and records, like sparse-int4."""
        return f"sparse-{self._codec.name}"

    def max_bytes(self, numel: int) -> int:
        """The length in bytes of a part of `numel` values none of which is zero."""
        return self._codec.max_bytes(numel) + max_mark_bytes(numel)

    def encode(self, values: Tensor) -> Tensor:
        """Encode fp32 values [n], contiguous, into at most max_bytes(n) uint8, on the same device.

        Raises NotEncodable for NaN, infinities and values that need a factor above max_factor.
        """
        bits = as_array(values, "values", torch.float32).view(np.int32)
        present = bits != 0
        present &= bits != _MINUS_ZERO
        group_part = self._codec.encode(torch.from_numpy(bits[present].view(np.float32)))
        return torch.cat([group_part, torch.from_numpy(pack_marks(present))]).to(values.device)

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Decode a part of `numel` values into fp32 [numel], into `out` where given.

        payload: uint8 of any length and content, on the device of the result, left as it is. Raises
        PayloadRefused for what breaks the layout or its bounds; `out` may hold anything then.
        """
        raw = as_array(payload, "payload", torch.uint8)
        out = room(out, numel, payload.device)
        start, places = unpack_marks(raw, numel)
        values = self._codec.decode(payload[:start].cpu(), len(places)).to(out.device)
        return out.zero_().scatter_(0, torch.from_numpy(places).to(out.device), values)

    @property
    def _codec(self) -> GroupCodec:
        return GroupCodec(self.bits, self.max_factor)


def _levels(scales: NDArray[np.float16], factor: float) -> Floats:
    return scales.astype(np.float32) * np.float32(factor)


def _check_scales(scales: NDArray[np.float16], factor: float) -> None:
    """Refuse levels [C, 2] outside 0 to 1, NaN and minus zero among them, or at odds."""
    as_bits = scales.view("<i2")
    if as_bits.min(initial=0) < 0 or as_bits.max(initial=0) > _ONE_AS_FP16_BITS:
        raise PayloadRefused("scale", "a level is negative, above 1 or not a number")
    if (as_bits[:, 0] > as_bits[:, 1]).any():
        raise PayloadRefused("scale", "a low level is above the high one")
    if (factor == 0) != (not as_bits.any()):
        raise PayloadRefused("factor", f"factor {factor:g}: it is 0 if and only if all levels are")


def _describe_non_finite(flat: Floats) -> str:
    nans, infinities = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
    return f"{nans} NaN and {infinities} infinite among {len(flat)} values: do not send them"
