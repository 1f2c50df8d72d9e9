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
"""
# numpy's own stubs leave the types of views and reshapes open:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilocox.compression.chunks import (
    CHUNK,
    MAGNITUDE_MASK,
    Bytes,
    Floats,
    Places,
    as_array,
    blocks,
    chunk_count,
    code_bytes,
    kept_count,
    largest_places,
    max_mark_bytes,
    pack_codes,
    pack_marks,
    pack_places,
    per_value,
    place_bytes,
    room,
    two_means,
    unpack_codes,
    unpack_marks,
    unpack_places,
)
from dilocox.compression.codec import (
    DEFAULT_MAX_FACTOR,
    VERSION,
    GroupCodec,
    NotEncodable,
    PayloadRefused,
)

__all__ = ["CHUNK", "SparseMeanCodec", "TopKCodec"]

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
