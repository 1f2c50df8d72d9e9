"""Numbers between stages: activations, their gradients and token windows into bytes and back. Apart
from frames.py, which lets bytes alone: this is arithmetic on tensors.

Why: over a volunteer's uplink the codec decides how much of the time a pipeline computes. So every
link has the most faithful one that its speed allows (`tuning`).
How: "fp32", "int8" and "int4" are parts of a `GroupCodec`: one factor a frame and one scale
for every 64 values, which are always values of one token (its last group is filled up with zeros),
for tokens differ in magnitude by thousands. With "int4", what all tokens have in common is taken
out before and stands in front (`take_out`). "bf16" is the values' upper halves, rounded to
nearest even, little-endian. Windows are int32, little-endian.

What is not finite is never sent: the frame says codec "none" instead, and its receiver counts the
microbatch as not finite, as if it had computed so itself. What a peer sent is finite after
decoding, or refused.

`take_out` says once, channel by channel, what all tokens have in common, and takes it out.

Why: 4-bit groups of neighbouring channels have one scale each. In hidden states a few channels are
far larger than their neighbours, and many lie around a centre far from zero, in every token. Codes
are spent on that, which is the same for all tokens, and what tells tokens apart is rounded away.

How: values [n, d] of n tokens become (value - centre of the channel) / level of the channel, where
the centre is a mean, and the level the root mean square of what lies around it. In both, all tokens
count the same however large they are, or one that is a thousand times its neighbours would move all
centres away from them. So levels have no unit: how large a token is, is left to the groups.
Centres and levels are bf16, and taken out as rounded: nothing is lost but what the codes then lose.
They take 4 d bytes, little-endian: all centres, all levels.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.compression.group_quantization import (
    NotEncodable,
    PayloadRefused,
    group_magnitudes,
    largest,
)
from dilocox.pipeline.frames import (
    CODECS,
    GROUP_CODECS,
    NOT_FINITE,
    TENSOR_DTYPE,
    WINDOW_KINDS,
    Frame,
    FrameRefused,
    coded_width,
    encoded_bytes,
    window_bytes,
)

_LARGEST = 2.0**96  # mean magnitude of a token: above it, activations are near overflow
_SMALLEST = 2.0**-96  # tokens below it count as if of this size: sums of 1 / size do not overflow


class NotFinite(ValueError):
    """A tensor that holds infinities, NaN, or magnitudes that its codec cannot hold.

    int4 ends where a token's mean magnitude passes 2^96, int8 at 127 * 2^96, bf16 and fp32 where
    they overflow themselves.
    """


def take_out(values: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and levels of fp32 values [n, d], uint8 [4 d], and the values without them [n, d].

    Raises NotFinite.
    """
    per_size = _reciprocal_sizes(values)
    centres = (per_size / per_size.sum() @ values).bfloat16()
    rest = values - centres.float()
    relative = rest * _reciprocal_sizes(rest).view(-1, 1)
    levels = relative.square_().mean(0).sqrt_().bfloat16()
    rest /= levels.float().masked_fill_(levels == 0, math.inf)
    return torch.cat([centres, levels]).view(torch.uint8), rest


def put_back(stated: Tensor, rest: Tensor) -> Tensor:
    """Undo `take_out`: the values [n, d], in place of `rest`.

    Bytes that somebody else made may give any numbers: the caller checks whether they are finite.
    """
    centres, levels = stated.view(torch.bfloat16).float().chunk(2)
    return rest.mul_(levels).add_(centres)


def _reciprocal_sizes(values: Tensor) -> Tensor:
    """One over the mean magnitude of each token, fp32 [n]; raises NotFinite."""
    sizes = values.abs().mean(1)
    largest = float(sizes.amax())
    if not largest <= _LARGEST:  # nor is what is not a number
        kind = "too large for 4 bits" if math.isfinite(largest) else "infinite or not a number"
        raise NotFinite(f"a value is {kind}")
    return sizes.clamp_(min=_SMALLEST).reciprocal_()


Payload = bytes | memoryview

_BF16_INFINITY = 0x7F80  # its bits; those of larger magnitude are NaN
_MAGNITUDE_MASK = 0x7FFF


def encode(codec: str, tensor: Tensor) -> bytes:
    """Encode floats [b, t, d] of any dtype and device into `encoded_bytes(codec, shape)` bytes.

    Raises NotFinite, and ValueError for a codec that does not exist.
    """
    values = tensor.detach()
    if codec == "bf16":
        bits = values.to(torch.bfloat16).contiguous().view(torch.int16)
        if int((bits & _MAGNITUDE_MASK).amax()) >= _BF16_INFINITY:
            raise NotFinite("an activation is infinite or not a number in bf16")
        return bits.cpu().numpy().tobytes()
    if codec not in GROUP_CODECS:
        raise ValueError(f"codec {codec!r}: choose one of {', '.join(CODECS)}")
    d = values.shape[-1]
    values = values.float().contiguous().view(-1, d)
    levels = values.new_empty(0, dtype=torch.uint8)
    if codec == "int4":
        levels, values = take_out(values)
    try:
        values = F.pad(values, (0, coded_width(codec, d) - d))
        payload = GROUP_CODECS[codec].encode(values.view(-1))
    except NotEncodable as error:
        raise NotFinite(str(error)) from error
    return torch.cat([levels, payload]).cpu().numpy().tobytes()


def decode(codec: str, payload: Payload, shape: tuple[int, ...]) -> Tensor:
    """Decode `payload` into fp32 [b, t, d] of `shape`, on the CPU, in memory of its own.

    Raises FrameRefused: "codec", "length", or "values" for what is not finite or no valid code.
    """
    if codec not in CODECS:
        raise FrameRefused("codec", f"{codec[:60]!r} has no values")
    b, t, d = shape
    if len(payload) != encoded_bytes(codec, shape):
        raise FrameRefused("length", f"{len(payload)} bytes for {codec} of {list(shape)}")
    if codec == "bf16":
        bits = torch.frombuffer(bytearray(payload), dtype=torch.int16)
        if int((bits & _MAGNITUDE_MASK).amax()) >= _BF16_INFINITY:
            raise FrameRefused("values", "a value is infinite or not a number")
        return bits.view(torch.bfloat16).float().view(b, t, d)
    width = coded_width(codec, d)
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    cut = 4 * d if codec == "int4" else 0
    try:
        values = GROUP_CODECS[codec].decode(raw[cut:], b * t * width).view(-1, width)
    except PayloadRefused as error:
        raise FrameRefused("values", str(error)) from error
    if bool(values[:, d:].any()):
        raise FrameRefused("values", "what fills up a token is not 0")
    values = values[:, :d].contiguous()
    if codec == "int4":
        put_back(raw[:cut], values)
        if not math.isfinite(largest(group_magnitudes(values.view(-1)))):
            raise FrameRefused("values", "its levels make a value infinite or not a number")
    return values.view(b, t, d)


def encode_windows(windows: Tensor) -> bytes:
    """Encode token windows int64 [b, t + 1] into 4 bytes each.

    Raises ValueError for ids that no int32 holds.
    """
    ids = windows.detach().cpu()
    if not 0 <= int(ids.amin()) <= int(ids.amax()) < 2**31:
        raise ValueError(f"token ids from {int(ids.amin())} to {int(ids.amax())}")
    return ids.to(torch.int32).numpy().tobytes()


def decode_windows(payload: Payload, b: int, t: int, vocabulary: int) -> Tensor:
    """Decode token windows int64 [b, t + 1] on the CPU, every id from 0 to `vocabulary` - 1.

    Raises FrameRefused: "length", or "values" for an id beyond the vocabulary.
    """
    if len(payload) != window_bytes(b, t):
        raise FrameRefused("length", f"{len(payload)} bytes for {b} windows of {t + 1} tokens")
    ids = torch.frombuffer(bytearray(payload), dtype=torch.int32).long()
    lowest, highest = int(ids.amin()), int(ids.amax())
    if lowest < 0 or highest >= vocabulary:
        raise FrameRefused(
            "values", f"tokens {lowest} to {highest}, the vocabulary has {vocabulary}"
        )
    return ids.view(b, t + 1)


def split_forward(frame: Frame, vocabulary: int) -> tuple[Tensor | None, Tensor]:
    """Activation fp32 [b, t, d] (None: it was not finite) and windows int64 [b, t + 1] of a frame.

    `frame`: forward or evaluate, as `frames.read_frame` returns it. Raises FrameRefused ("values").
    """
    b, t, _ = frame.shape
    payload = memoryview(frame.payload)
    cut = encoded_bytes(frame.codec, frame.shape)
    windows = decode_windows(payload[cut:], b, t, vocabulary)
    return _tensor(frame, payload[:cut]), windows


def split_gradient(frame: Frame) -> Tensor | None:
    """The gradient fp32 [b, t, d] of a frame, None if it was not finite. Raises FrameRefused."""
    return _tensor(frame, memoryview(frame.payload))


def tensor_frame(
    frame: Frame, codec: str, tensor: Tensor | None, windows: Tensor | None = None
) -> Frame:
    """`frame` (a forward, gradient or evaluate frame without a payload) with these numbers in it.

    tensor: floats [b, t, d]; what is not finite goes as codec "none". None: it was not finite where
    it came from, and `frame.shape` says what it would have been. windows: int64 [b, t + 1], all but
    gradient frames need them.
    """
    if (windows is not None) != (frame.kind in WINDOW_KINDS):
        raise ValueError(f"{frame.kind} frame: pass windows for {sorted(WINDOW_KINDS)} only")
    shape, payload = frame.shape, b""
    if tensor is not None:
        shape = tuple(tensor.shape)
        try:
            payload = encode(codec, tensor)
        except NotFinite:
            tensor = None
    if tensor is None:
        codec = NOT_FINITE
    if windows is not None:
        payload += encode_windows(windows)
    return replace(frame, codec=codec, shape=shape, dtype=TENSOR_DTYPE, payload=payload)


def _tensor(frame: Frame, payload: memoryview) -> Tensor | None:
    return None if frame.codec == NOT_FINITE else decode(frame.codec, payload, frame.shape)
