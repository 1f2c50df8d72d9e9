"""Names of the activation codecs and the exact bytes of what they make.

Why apart: a frame's length is checked before its payload is read (`frames`), by rules that belong
to the coding (`activations`), and both must agree on them.
"""

from __future__ import annotations

from typing import Final

from dilocox.compression.codec import GroupCodec
from dilocox.compression.groups import GROUP_SIZE
from dilocox.pipeline.levels import level_bytes

CODECS: Final = ("fp32", "bf16", "int8", "int4")  # most faithful first
NOT_FINITE: Final = "none"  # in a codec's place: the tensor was not finite and is not sent

# Activations and scaled gradients have no natural bound; what passes this one is near overflow.
_MAX_FACTOR = 2.0**96
GROUP_CODECS: Final = {
    "fp32": GroupCodec(32, _MAX_FACTOR),
    "int8": GroupCodec(8, _MAX_FACTOR),
    "int4": GroupCodec(4, _MAX_FACTOR),
}


def encoded_bytes(codec: str, shape: tuple[int, ...]) -> int:
    """The length in bytes of an encoded tensor of shape [b, t, d]; of "none", nothing.

    Raises ValueError for a codec that does not exist and for other than three dimensions.
    """
    b, t, d = shape
    if codec == NOT_FINITE:
        return 0
    if codec == "bf16":
        return 2 * b * t * d
    if codec not in GROUP_CODECS:
        raise ValueError(f"codec {codec!r}: choose one of {', '.join(CODECS)}")
    levels = level_bytes(d) if codec == "int4" else 0
    return levels + GROUP_CODECS[codec].encoded_bytes(b * t * coded_width(codec, d))


def window_bytes(windows: int, sequence_length: int) -> int:
    """The length in bytes of encoded token windows of shape [windows, sequence_length + 1]."""
    return 4 * windows * (sequence_length + 1)


def coded_width(codec: str, hidden_size: int) -> int:
    """Values per token as coded: int8 and int4 fill a token up to whole groups of 64."""
    if codec not in ("int8", "int4"):
        return hidden_size
    return -(-hidden_size // GROUP_SIZE) * GROUP_SIZE
