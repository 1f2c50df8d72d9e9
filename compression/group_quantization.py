"""The group codec: a flat fp32 vector in, one part of an exchange in bytes out, and back.

Why: a round sends a whole stage over a volunteer's uplink. Groups of 64 values with a scale each
keep 4-bit codes honest where magnitudes differ from layer to layer, at 4.25 bits a value.

A part, version 1, all numbers little-endian; G is numel / 64, rounded up:

    bytes         content
    1             version (1)
    1             bits: 2, 4, 8, 16 or 32
    2             zero
    4             fp32 factor, 0 or a power of two
    2 * G         fp16 scales, 0 to 1, relative to the factor
    8 * bits * G  two's complement codes, -7..7, -127..127 or -32767..32767; of 4-bit codes two
                  share a byte, the earlier one in its low half

With 32 bits the fp32 values follow the two zeros at once. With 2 bits groups have 256 values, 2.06
bits each: two_bits.py has their codes, and the step that a scale times the factor is. So bits and
numel give the length. The last group is filled up with zero codes.

How: value = code * step, step = scale * factor. The factor is the smallest power of two from 2^-96
up with limit * factor >= the part's largest magnitude (limit: the largest code). A group's scale is
the smallest fp16 number with limit * step >= the group's largest magnitude (less 2^-20 of it), so
no code passes the limit. A code is the value over the step *as stored*, rounded half to even.

Error: at most half a step per value. Exactly so with 4 and 8 bits, where steps, codes times steps
and the midpoints between these are fp32 numbers; with 16 bits 2^-8 steps more, because quotient and
product are rounded to fp32. A step is at most 0.1 % more than largest magnitude / limit of its
group, or 2^-24 of the factor more where the fp16 scale is subnormal. Groups of magnitudes up to
2^-25 of the factor have scale 0 and decode as zero, within half of the smallest step. Parts of
magnitudes up to 2^-121, as subnormal ones are, have factor 0. With 2 bits the root of the mean
squared error is a third of that of the values, if they are normally distributed.

Equal values have equal bytes on every machine and device (see below). Whatever goes in,
decoding yields finite values, with less than 32 bits at most limit * max_factor.

The arithmetic on groups has results that must be equal, to the last bit, on every machine. Each
result is made of single IEEE operations, none of them fused or summed, and none depends on a
subnormal number, so neither CUDA nor a library that flushes subnormals to zero changes one.

How: in blocks that stay in a core's cache, through one scratch block, so a pass reads memory once.
Pieces of a long vector are whole blocks and may have several threads (`workers.py`).
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.compression.two_bits import (
    LEVELS,
    TWO_BIT_GROUP,
    fitted_steps,
    read_levels,
    write_levels,
)
from dilocox.compression.workers import ALONE, PIECE, Workers

GROUP_SIZE: Final = 64
SMALLEST_SCALE: Final = 2.0**-24  # fp16's smallest number above zero

# values: a block and its scratch fit a core's cache, the interpreter does not show
CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 24  # values: few kernel launches on an accelerator
_SCALE_SLACK = 1 - 2.0**-20  # decoded 16-bit values were rounded to fp32; their scale must not grow
_MAGNITUDE_MASK = 0x7FFFFFFF


def group_count(numel: int, size: int = GROUP_SIZE) -> int:
    """How many groups of this size hold `numel` values, the last one perhaps in part."""
    return -(-numel // size)


def padded(numel: int) -> int:
    """`numel`, filled up to whole groups of 64."""
    return group_count(numel) * GROUP_SIZE


def block_size(tensor: Tensor) -> int:
    """How many values to work on at a time, a multiple of 64. Results do not depend on it."""
    return CPU_BLOCK if tensor.device.type == "cpu" else _DEVICE_BLOCK


def blocks(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut fp32 values [n] into blocks [groups, 64]; the last group is filled up with zeros."""
    for start in range(0, values.numel(), block_size(values)):
        block = values[start : start + block_size(values)]
        if block.numel() % GROUP_SIZE:
            block = F.pad(block, (0, -block.numel() % GROUP_SIZE))
        block = block.view(-1, GROUP_SIZE)
        yield slice(start // GROUP_SIZE, start // GROUP_SIZE + len(block)), block


def group_magnitudes(values: Tensor) -> Tensor:
    """The largest magnitude of each group, fp32 [groups]; a NaN is above an infinity.

    Found on the bits as integers: magnitudes have the same order there, at twice the speed.
    """
    magnitudes = torch.empty(group_count(values.numel()), dtype=torch.int32, device=values.device)
    scratch = _scratch(values, torch.int32)
    for groups, block in blocks(values):
        bits = scratch[: len(block)]
        torch.bitwise_and(block.view(torch.int32), _MAGNITUDE_MASK, out=bits)
        torch.amax(bits, 1, out=magnitudes[groups])
    return magnitudes.view(torch.float32)


def largest(magnitudes: Tensor) -> float:
    """The largest of some magnitudes; NaN or infinity if there is one, 0 if there are none."""
    if not len(magnitudes):
        return 0.0
    return float(magnitudes.view(torch.int32).amax().view(torch.float32))


def group_scales(magnitudes: Tensor, factor: float, limit: int) -> Tensor:
    """The scale of each group, fp16 [groups]: the smallest under which no code passes `limit`."""
    if factor == 0:
        return torch.zeros_like(magnitudes, dtype=torch.float16)
    ideal = magnitudes * (1 / factor)
    # CUDA divides by a tensor, but multiplies by the reciprocal of a plain number.
    ideal /= torch.full((), float(limit), device=magnitudes.device)
    scales = ideal.to(torch.float16)
    # fp16 numbers above zero have the order of their bits: one more is the next number up.
    scales.view(torch.int16).add_(scales.float() < ideal * _SCALE_SLACK)
    return scales.masked_fill_(magnitudes <= factor * SMALLEST_SCALE / 2, 0)


def write_codes(values: Tensor, steps: Tensor, bits: int, packed: Tensor) -> None:
    """Put the codes of `values` under the steps [groups] into bytes `packed`; uses up `steps`."""
    # A value over infinity is zero: the code of a group whose scale is 0.
    divisors = steps.masked_fill_(steps == 0, math.inf).view(-1, 1)
    scratch = _scratch(values, torch.float32)
    group_bytes = GROUP_SIZE * bits // 8
    for groups, block in blocks(values):
        quotients = scratch[: len(block)]
        torch.div(block, divisors[groups], out=quotients)
        codes = quotients.round_().view(-1)  # half to even
        target = packed[groups.start * group_bytes : groups.stop * group_bytes]
        if bits == 4:
            pairs = codes.to(torch.int8).bitwise_and_(0x0F).view(torch.int16)
            pairs |= pairs >> 4  # the low byte holds the earlier code; the later one joins it
            target.copy_(pairs)
        else:
            target.view(torch.int8 if bits == 8 else torch.int16).copy_(codes)


def read_codes(packed: Tensor, bits: int) -> Tensor:
    """The codes in bytes [n * bits / 8] as int16 or int8 [n]; those of 4 bits come times 16."""
    if bits != 4:
        return packed.view(torch.int8 if bits == 8 else torch.int16)
    pairs = packed.to(torch.int16)
    pairs |= pairs << 4  # the later code now fills the upper half of the upper byte ...
    return pairs.view(torch.int8).bitwise_left_shift_(4)  # ... and the earlier one of the lower


def _scratch(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the largest block of `values`: [groups, 64]."""
    groups = group_count(min(values.numel(), block_size(values)))
    return torch.empty(groups, GROUP_SIZE, dtype=dtype, device=values.device)


VERSION: Final = 1
DEFAULT_MAX_FACTOR: Final = 2.0**16

_RAW_BITS = 32
_RAW_HEADER = struct.Struct("<BBH")
_HEADER = struct.Struct("<BBHf")
_MIN_FACTOR = 2.0**-96  # no step is subnormal, not even a sixteenth of the smallest
_FACTOR_CEILING = 2.0**96  # far from overflow: the values, sums of them, and 1 / step
_ONE_AS_FP16_BITS = 0x3C00

RefusalKind = Literal[
    "length", "version", "bits", "reserved", "factor", "scale", "code", "padding", "value"
]


class PayloadRefused(ValueError):
    """Bytes that are no valid part; `kind` names the field at fault, to count refusals by."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(kind, message)  # both, or it could not be pickled
        self.kind: RefusalKind = kind
        self.message = message

    def __str__(self) -> str:
        return f"payload refused ({self.kind}): {self.message}"


class NotEncodable(ValueError):
    """Values that no part can hold: infinities, NaN, magnitudes beyond what max_factor allows."""


@dataclass(frozen=True)
class GroupCodec:
    """Encodes and decodes parts. Stateless: one serves all threads.

    `bits` per value (32: raw fp32). `max_factor`: the largest factor sent or accepted, which bounds
    magnitudes to max_factor * 7 (2 and 4 bits), 127 or 32767; with 32 bits any finite value passes.
    """

    bits: int
    max_factor: float = DEFAULT_MAX_FACTOR
    workers: Workers = field(default=ALONE, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8, 16, _RAW_BITS):
            raise ValueError(f"codec bits {self.bits!r}: choose 2, 4, 8, 16 or 32")
        if not _MIN_FACTOR <= self.max_factor <= _FACTOR_CEILING:
            raise ValueError(f"codec max_factor {self.max_factor!r}: choose 2^-96 to 2^96")

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return TWO_BIT_GROUP if self.bits == 2 else GROUP_SIZE

    def encoded_bytes(self, numel: int) -> int:
        """The length in bytes of every part of `numel` values."""
        if numel < 0:
            raise ValueError(f"numel {numel}: must be 0 or more")
        if self.bits == _RAW_BITS:
            return _RAW_HEADER.size + 4 * numel
        return _HEADER.size + group_count(numel, self.group_size) * (2 + self._group_bytes)

    def encode(self, values: Tensor) -> Tensor:
        """Encode fp32 values [n], contiguous, into uint8 [encoded_bytes(n)] on the same device.

        Raises NotEncodable for NaN, infinities and values that need a factor above max_factor.
        """
        _check_vector(values, "values", torch.float32)
        values = values.detach()
        # of each group its largest magnitude, of 2 bits its step, which is below that
        sizes = torch.cat(self.workers.over(values.numel(), lambda part: self._sizes(values[part])))
        largest_size = largest(sizes)
        if not math.isfinite(largest_size):
            raise NotEncodable(_describe_non_finite(values))
        numel, device = values.numel(), values.device
        payload = torch.empty(self.encoded_bytes(numel), dtype=torch.uint8, device=device)
        if self.bits == _RAW_BITS:
            _write(payload, _RAW_HEADER.pack(VERSION, self.bits, 0))
            payload[_RAW_HEADER.size :].view(torch.float32).copy_(values)
            return payload
        factor = self._factor(largest_size)
        scales = group_scales(sizes, factor, self._limit)
        codes_start = _HEADER.size + 2 * len(scales)
        _write(payload, _HEADER.pack(VERSION, self.bits, 0, factor))
        payload[_HEADER.size : codes_start].view(torch.float16).copy_(scales)
        steps = scales.float().mul_(factor)

        def write(part: slice) -> None:
            groups = self._groups_of(part)
            packed = payload[codes_start + self._group_bytes * groups.start :]
            if self.bits == 2:
                write_levels(values[part], steps[groups], packed, block_size(values))
            else:
                write_codes(values[part], steps[groups], self.bits, packed)

        self.workers.over(numel, write)
        return payload

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Decode a part of `numel` values into fp32 [numel], into `out` where given.

        payload: uint8 of any length and content, on the device of the result, left as it is. Raises
        PayloadRefused for what breaks the layout or its bounds; `out` may hold anything then.
        """
        read = self._reader(payload, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=payload.device)
        _check_vector(out, "out", torch.float32)
        if out.numel() != numel or out.device != payload.device:
            raise ValueError(
                f"out is [{out.numel()}] on {out.device}: pass [{numel}] on {payload.device}"
            )
        self.workers.over(numel, lambda part: read(part, out[part]))
        return out

    def decode_pieces(
        self, payload: Tensor, numel: int, work: Callable[[slice, Tensor], object]
    ) -> None:
        """Hand on a part of `numel` values a piece at a time, in the memory of a few pieces.

        work: is told where each piece lies, and its values, in one of the threads; the values are
        its own. Raises PayloadRefused as `decode`, before the first piece or in the middle.
        """
        self.decode_together([payload], numel, lambda part, values: work(part, values[0]))

    def decode_together(
        self, payloads: Sequence[Tensor], numel: int, work: Callable[[slice, Tensor], object]
    ) -> None:
        """Hand on several parts of `numel` values, the same piece of all at a time, as
        `decode_pieces` does: work is given the values [len(payloads), n].
        """
        reads = [self._reader(payload, numel) for payload in payloads]
        # all of them together take the memory of a few pieces
        step = max(1, PIECE // len(reads) // self.group_size) * self.group_size

        def hand_on(part: slice) -> None:
            values = torch.empty(len(reads), part.stop - part.start, device=payloads[0].device)
            for read, row in zip(reads, values, strict=True):
                read(part, row)
            work(part, values)

        starts = range(0, numel, step)
        self.workers.map(hand_on, [slice(low, min(low + step, numel)) for low in starts])

    def _reader(self, payload: Tensor, numel: int) -> Callable[[slice, Tensor], None]:
        """What decodes a slice of the part, of whole groups, into the tensor that it is given."""
        _check_vector(payload, "payload", torch.uint8)
        factor = self._read_header(payload, numel)
        if payload.data_ptr() % 4 or int(payload.storage_offset()) % 4:
            payload = payload.clone()  # a slice of a longer message: wider views need alignment
        if self.bits == _RAW_BITS:
            raw = payload[_RAW_HEADER.size :].view(torch.float32)

            def copy(part: slice, out: Tensor) -> None:
                out.copy_(raw[part])
                if not math.isfinite(largest(group_magnitudes(out))):
                    raise PayloadRefused("value", "a value is infinite or not a number")

            return copy
        codes_start = _HEADER.size + 2 * group_count(numel, self.group_size)
        scales = payload[_HEADER.size : codes_start].view(torch.float16)
        _check_scales(scales, factor)

        def read(part: slice, out: Tensor) -> None:
            groups = self._groups_of(part)
            packed = payload[codes_start + self._group_bytes * groups.start :]
            self._decode_codes(packed, scales[groups], factor, out)

        return read

    @property
    def _limit(self) -> int:
        """In what `_sizes` gives, how many scales times the factor are at most in it."""
        return (1 << (self.bits - 1)) - 1

    @property
    def _group_bytes(self) -> int:
        return self.group_size * self.bits // 8

    def _groups_of(self, part: slice) -> slice:
        """The groups of a slice of values, which begins with a group."""
        return slice(part.start // self.group_size, group_count(part.stop, self.group_size))

    def _sizes(self, values: Tensor) -> Tensor:
        """What the scale of each group follows, fp32 [groups]."""
        if self.bits == 2:
            return fitted_steps(values, block_size(values))
        return group_magnitudes(values)

    def _factor(self, magnitude: float) -> float:
        """The smallest factor under which `magnitude` needs no code above the limit."""
        if magnitude <= _MIN_FACTOR * SMALLEST_SCALE / 2:
            return 0.0
        factor = math.ldexp(1.0, math.frexp(magnitude)[1] - self.bits)  # one or two steps short
        while self._limit * factor < magnitude:
            factor *= 2
        factor = max(factor, _MIN_FACTOR)
        if factor > self.max_factor:
            raise NotEncodable(
                f"a magnitude of {magnitude:g} needs a factor of {factor:g}, above max_factor "
                f"{self.max_factor:g}: training has probably diverged; if not, raise max_factor"
            )
        return factor

    def _read_header(self, payload: Tensor, numel: int) -> float:
        """Check version, bits, length and factor; return the factor (0 for raw fp32)."""
        expected = self.encoded_bytes(numel)
        header = payload[: _HEADER.size].cpu().numpy().tobytes()
        if len(header) >= _RAW_HEADER.size:
            version, bits, reserved = _RAW_HEADER.unpack_from(header)
            if version != VERSION:
                raise PayloadRefused("version", f"version {version}, this codec reads {VERSION}")
            if bits != self.bits:
                raise PayloadRefused("bits", f"{bits} bits, this codec reads {self.bits}")
            if reserved:
                raise PayloadRefused("reserved", f"reserved bytes hold {reserved} instead of 0")
        if payload.numel() != expected:
            raise PayloadRefused(
                "length", f"{payload.numel()} bytes, where {numel} values take {expected}"
            )
        if self.bits == _RAW_BITS or header[_RAW_HEADER.size :] == bytes(4):
            return 0.0
        factor = float(_HEADER.unpack(header)[3])
        if math.frexp(factor)[0] != 0.5 or not _MIN_FACTOR <= factor <= self.max_factor:
            raise PayloadRefused(
                "factor",
                f"{factor!r} is neither 0 nor a power of two from 2^-96 to {self.max_factor:g}",
            )
        return factor

    def _decode_codes(self, source: Tensor, scales: Tensor, factor: float, out: Tensor) -> None:
        """Decode the codes in bytes `source` into `out` [n]; refuse codes not in use."""
        steps = scales.float().mul_(factor / 16 if self.bits == 4 else factor).view(-1, 1)
        unscaled, size = scales == 0, self.group_size
        some_unscaled = bool(unscaled.any())
        zero = LEVELS[0] if self.bits == 2 else 0  # what a zero code is read as
        for start in range(0, out.numel(), block_size(out)):
            target = out[start : start + block_size(out)]
            groups = self._groups_of(slice(start, start + len(target)))
            packed = source[groups.start * self._group_bytes : groups.stop * self._group_bytes]
            codes = read_levels(packed) if self.bits == 2 else read_codes(packed, self.bits)
            if self.bits > 2 and int(codes.amin()) == torch.iinfo(codes.dtype).min:
                raise PayloadRefused("code", f"a code is {-self._limit - 1}, which is not in use")
            if bool((codes[len(target) :] != zero).any()):
                raise PayloadRefused("padding", "codes after the last value are not 0")
            if some_unscaled and bool((codes.view(-1, size)[unscaled[groups]] != zero).any()):
                raise PayloadRefused("code", "a group whose scale is 0 has codes other than 0")
            if len(target) == len(codes):
                target.copy_(codes).view(-1, size).mul_(steps[groups])
            else:
                whole = codes.float().view(-1, size).mul_(steps[groups])
                target.copy_(whole.view(-1)[: len(target)])


def _check_scales(scales: Tensor, factor: float) -> None:
    """Refuse scales outside 0 to 1, NaN and minus zero among them, or at odds with the factor."""
    as_bits = scales.view(torch.int16)
    lowest, highest = (int(as_bits.amin()), int(as_bits.amax())) if len(scales) else (0, 0)
    if lowest < 0 or highest > _ONE_AS_FP16_BITS:
        raise PayloadRefused("scale", "a scale is negative, above 1 or not a number")
    if (factor == 0) != (highest == 0):
        raise PayloadRefused("factor", f"factor {factor:g}: it is 0 if and only if all scales are")


def _write(payload: Tensor, header: bytes) -> None:
    payload[: len(header)] = torch.tensor(list(header), dtype=torch.uint8)


def _describe_non_finite(values: Tensor) -> str:
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    return f"{nans} NaN and {infinities} infinite among {values.numel()} values: do not send them"


def _check_vector(tensor: Tensor, name: str, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}: pass a contiguous vector of {dtype}"
        )
