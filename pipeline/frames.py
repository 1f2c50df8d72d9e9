"""Frames: everything that peers of one replica say to each other, typed, bounded and checked.

What: a prefix of 16 bytes, a msgpack header of at most 24 KiB, and the coded tensor of those kinds
that carry one.
Why: activations come from strangers' machines. Every length is known to be right before a byte of
it is read, every field before anything acts on it, so that no peer can make another one allocate,
compute or wait for more than its run's shapes ask for.
How: `read_frame` takes the prefix, then the header, then the payload, and refuses (`FrameRefused`)
at the first thing that is not as it must be. Numbers in the prefix are little-endian:

    bytes  content
    2      "dx"
    1      version (1)
    1      zero
    4      bytes of the header
    8      bytes of the payload

The header is a map of the fields of `Frame` without the payload; those at their default are left
out. A tensor's payload: the activation or gradient, coded, then (forward, evaluate) the token
windows; activation_codec.py says how. Its bytes follow from kind, codec and shape, and must be just
so: the names of the codecs and the bytes of what they make stand here, because a frame's length is
checked before its payload is read.

The small facts that a frame carries are plain values and flat lists of them, which become tuples.
What a kind of frame needs of them is a subclass of `Facts`, each with its type and bounds. So
whatever a peer wrote, a fact that is missing or odd becomes a `FrameRefused`, never a KeyError or a
NaN in the middle of a step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Final, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBytes,
    TypeAdapter,
    ValidationError,
)

from dilocox.compression.group_quantization import GroupCodec, padded
from dilocox.dht.invite import MAX_PEER_ID
from dilocox.dht.wire import MAX_INTEGER, Malformed, Many, pack, unpack

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
    levels = 4 * d if codec == "int4" else 0
    return levels + GROUP_CODECS[codec].encoded_bytes(b * t * coded_width(codec, d))


def window_bytes(windows: int, sequence_length: int) -> int:
    """The length in bytes of encoded token windows of shape [windows, sequence_length + 1]."""
    return 4 * windows * (sequence_length + 1)


def coded_width(codec: str, hidden_size: int) -> int:
    """Values per token as coded: int8 and int4 fill a token up to whole groups of 64."""
    return padded(hidden_size) if codec in ("int8", "int4") else hidden_size


MAX_NAME: Final = 64  # characters of a fact's name
MAX_TEXT: Final = 1024  # characters of a text
MAX_ITEMS: Final = 256  # facts of a frame, items of a list


class FrameRefused(ValueError):
    """A frame that is not as it must be; `kind` is a short reason, to count refusals by.

    Kinds raised here: version, kind, length, header, shape, dtype, codec. Others raise it for what
    only they can tell, such as "values" (of a payload), "epoch" or "order".
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)  # both, or it could not be pickled
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"frame refused ({self.kind})" + (f": {self.message}" if self.message else "")


def show(value: object) -> str:
    """A peer's value for a message: short, and safe for what is nested deeply."""
    if isinstance(value, dict | list | tuple):
        return type(cast(object, value)).__name__
    return repr(
        value if value is None or isinstance(value, bool | int | float) else str(value)[:60]
    )


def _refused(error: ValidationError, *kinds: str) -> FrameRefused:
    """kinds: fields that are a kind of refusal, too; all others are the header's."""
    odd = error.errors(include_url=False)[0]
    name = ".".join(map(str, odd["loc"])) or "it"
    value = None if odd["type"] == "missing" else odd["input"]
    kind = odd["loc"][0] if odd["loc"] else ""
    message = f"{repr(name)[1:-1][:MAX_NAME]} is {show(value)}: {odd['msg']}"
    return FrameRefused(str(kind) if kind in kinds else "header", message)


def _plain(value: object) -> bool:
    if type(value) is int:
        return -MAX_INTEGER <= value <= MAX_INTEGER
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, bool | float)


def _fact(value: object) -> object:
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        if len(items) <= MAX_ITEMS and all(map(_plain, items)):
            return tuple(items)
    elif _plain(value):
        return value
    raise ValueError("no plain value, nor a flat list of them")


def _one_of_the_codecs(codec: str) -> str:
    if codec not in CODECS:
        raise ValueError(f"choose one of {', '.join(CODECS)}")
    return codec


def or_nan(low: float = -math.inf, high: float = math.inf) -> AfterValidator:
    """From `low` to `high`; all that is not finite passes as NaN.

    A sum that overflowed is no sender's fault.
    """

    def checked(value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        if not low <= value <= high:
            raise ValueError(f"it is not from {low:g} to {high:g}")
        return value

    return AfterValidator(checked)


Codec = Annotated[str, AfterValidator(_one_of_the_codecs)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

_Name = Annotated[str, Field(strict=True, max_length=MAX_NAME)]
_Length = Annotated[int, Field(strict=True, gt=0, le=MAX_INTEGER)]
_Fact = Annotated[object, AfterValidator(_fact)]

F = TypeVar("F", bound="Facts")


class Facts(BaseModel):
    """What a kind of frame says in its facts, each of its type and within its bounds."""

    model_config = ConfigDict(frozen=True, strict=True)

    def to_facts(self) -> dict[str, object]:
        """Plain values that a frame carries."""
        return self.model_dump()

    @classmethod
    def from_facts(cls: type[F], facts: Mapping[str, object], num_stages: int = 0) -> F:
        """What a peer of a replica of so many stages wrote; raises FrameRefused (header)."""
        try:
            read = cls.model_validate(dict(facts))
        except ValidationError as error:
            raise _refused(error) from None
        if reason := read.contradiction(num_stages):
            raise FrameRefused("header", reason)
        return read

    def contradiction(self, num_stages: int) -> str:
        """Why these facts cannot be, each for itself within its bounds; empty if they can."""
        return ""


Shape = tuple[int, int, int]  # [b, t, d]

VERSION: Final = 1
REQUEST_KINDS: Final = frozenset({"ping", "reserve", "assign", "release"})
ANSWER_KINDS: Final = frozenset({"yes", "no"})
LINK_KINDS: Final = frozenset(
    {"hello", "heartbeat", "forward", "gradient", "sum", "go"}
    | {"ready", "fault", "evaluate", "evaluated", "dissolve"}
)
SEALED_KINDS: Final = frozenset({"relay", "sealed", "reply"})  # they carry what is sealed
KINDS: Final = REQUEST_KINDS | ANSWER_KINDS | LINK_KINDS | SEALED_KINDS
TENSOR_KINDS: Final = frozenset({"forward", "gradient", "evaluate"})  # they carry a payload
WINDOW_KINDS: Final = frozenset({"forward", "evaluate"})  # token windows stand behind the tensor
TENSOR_DTYPE: Final = "float32"  # of every tensor before coding and after decoding

MAX_HEADER_BYTES: Final = 24 * 1024

_PREFIX = struct.Struct("<2sBBIQ")
_MAGIC = b"dx"
PREFIX_BYTES: Final = _PREFIX.size


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message between two peers of a replica.

    replica: peer id of the head. epoch, step, microbatch: what it belongs to.
    codec, shape, dtype: of the tensor in the payload: one of `CODECS` (or "none": it was not
    finite, only its windows are here), [b, t, d], "float32"; empty without a tensor.
    facts: what a kind needs besides: None, bool, int, float, str and flat lists of these.
    sealed: for SEALED_KINDS only, see relayed_requests.py.
    payload: coded bytes, for TENSOR_KINDS only.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for `_checked`, not for `Frame()`

    kind: _Name
    replica: Annotated[str, Field(strict=True, max_length=MAX_PEER_ID)] = ""
    epoch: Count = 0
    step: Count = 0
    microbatch: Count = 0
    codec: _Name = ""
    shape: Many[_Length] = ()
    dtype: _Name = ""
    facts: Annotated[Mapping[_Name, _Fact], Field(max_length=MAX_ITEMS)] = field(
        default_factory=dict[str, object]
    )
    sealed: StrictBytes = b""
    payload: bytes = b""


@dataclass(frozen=True, kw_only=True)
class FrameLimits:
    """What the run's manifest says about tensors: all that a frame may be.

    A tensor's shape is exactly [microbatch_size, sequence_length, hidden_size]; that of "evaluate"
    may have 1 to `evaluate_windows` instead of microbatch_size. All are 1 or more.
    """

    microbatch_size: int
    sequence_length: int
    hidden_size: int
    evaluate_windows: int

    @property
    def max_payload(self) -> int:
        """The most bytes that the payload of any frame may have."""
        b = max(self.microbatch_size, self.evaluate_windows)
        shape = (b, self.sequence_length, self.hidden_size)
        tensor = max(encoded_bytes(codec, shape) for codec in CODECS)
        return tensor + window_bytes(b, self.sequence_length)


NO_TENSORS: Final = FrameLimits(
    microbatch_size=1, sequence_length=1, hidden_size=1, evaluate_windows=1
)  # of requests and answers


def encode_prefix_and_header(frame: Frame) -> bytes:
    """The bytes of `frame` before its payload, which is then written as it is.

    Raises ValueError for a frame that no receiver would take: a mistake of the caller.
    """
    values: dict[str, object] = {"kind": frame.kind}
    for spec in fields(Frame):
        value: object = getattr(frame, spec.name)
        if value and spec.name not in ("kind", "payload"):  # every default is empty or 0
            values[spec.name] = dict(frame.facts) if spec.name == "facts" else value
    due = _payload_bytes(_checked(values))
    try:
        header = pack(values)
    except Malformed as error:
        raise ValueError(f"{frame.kind} frame: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"{frame.kind} frame: {len(header)} bytes of header")
    if len(frame.payload) != due:
        raise ValueError(f"{frame.kind} frame: {len(frame.payload)} bytes of payload, {due} due")
    return _PREFIX.pack(_MAGIC, VERSION, 0, len(header), len(frame.payload)) + header


def parse_prefix(data: bytes, limits: FrameLimits) -> tuple[int, int]:
    """Read the first PREFIX_BYTES of a frame: bytes of its header and of its payload.

    Raises FrameRefused (version, length): nothing has been allocated for either yet.
    """
    if len(data) != PREFIX_BYTES:
        raise FrameRefused("length", f"{len(data)} bytes of prefix instead of {PREFIX_BYTES}")
    magic, version, zero, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC or version != VERSION or zero:
        raise FrameRefused("version", f"{data[:4].hex()}: this peer reads version {VERSION}")
    if not 1 <= header_bytes <= MAX_HEADER_BYTES:
        raise FrameRefused("length", f"{header_bytes} bytes of header")
    if payload_bytes > limits.max_payload:
        raise FrameRefused("length", f"{payload_bytes} bytes of payload")
    return header_bytes, payload_bytes


def parse_header(header: bytes, payload_bytes: int, limits: FrameLimits) -> Frame:
    """The frame that a header tells of, still without its payload.

    Checks every field, and that `payload_bytes` is what kind, codec and shape say. Raises
    FrameRefused (kind, header, codec, shape, dtype, length).
    """
    try:
        value = unpack(header, MAX_HEADER_BYTES)
    except Malformed as error:
        raise FrameRefused("header", str(error)) from error
    frame = _checked(value)
    due = _payload_due(frame, limits)
    if payload_bytes != due:
        raise FrameRefused("length", f"{payload_bytes} bytes of payload where {due} are due")
    return frame


async def read_frame(read: Callable[[int], Awaitable[bytes]], limits: FrameLimits) -> Frame:
    """Read one frame; `read(n)` returns exactly n bytes, as StreamReader.readexactly does.

    Raises FrameRefused, and whatever `read` raises (IncompleteReadError at an end).
    """
    header_bytes, payload_bytes = parse_prefix(await read(PREFIX_BYTES), limits)
    frame = parse_header(await read(header_bytes), payload_bytes, limits)
    return replace(frame, payload=await read(payload_bytes)) if payload_bytes else frame


# ---- checks of a header --------------------------------------------------------------------------
_FRAME = TypeAdapter(Frame)


def _checked(values: object) -> Frame:
    """The frame of these fields, each of its type and within its bounds."""
    if isinstance(values, dict) and "payload" in values:
        raise FrameRefused("header", "unknown field 'payload'")  # it comes behind
    try:
        frame = _FRAME.validate_python(values)
    except ValidationError as error:
        raise _refused(error, "kind", "shape") from None
    kind = frame.kind
    if kind not in KINDS:
        raise FrameRefused("kind", show(kind))
    if kind not in TENSOR_KINDS:
        for name in ("codec", "shape", "dtype"):
            if getattr(frame, name):
                raise FrameRefused(name, f"a {kind} frame has no tensor")
    elif frame.codec not in (*CODECS, NOT_FINITE):
        raise FrameRefused("codec", f"{frame.codec!r}: choose one of {', '.join(CODECS)}")
    elif frame.dtype != TENSOR_DTYPE:
        raise FrameRefused("dtype", f"{frame.dtype!r} instead of {TENSOR_DTYPE}")
    elif len(frame.shape) != 3:
        raise FrameRefused("shape", f"{len(frame.shape)} lengths, not three")
    if bool(frame.sealed) != (kind in SEALED_KINDS):
        raise FrameRefused("header", f"what is sealed in a {kind} frame is {show(frame.sealed)}")
    return frame


def _payload_due(frame: Frame, limits: FrameLimits) -> int:
    """How many bytes the payload must have; refuses a shape other than the run's."""
    if frame.kind in TENSOR_KINDS:
        b = limits.microbatch_size
        if frame.kind == "evaluate" and frame.shape:
            b = min(frame.shape[0], limits.evaluate_windows)
        due = (b, limits.sequence_length, limits.hidden_size)
        if frame.shape != due:
            raise FrameRefused("shape", f"{list(frame.shape)} instead of {list(due)}")
    return _payload_bytes(frame)


def _payload_bytes(frame: Frame) -> int:
    if not frame.shape:
        return 0
    b, t, _ = frame.shape
    windows = window_bytes(b, t) if frame.kind in WINDOW_KINDS else 0
    return encoded_bytes(frame.codec, frame.shape) + windows
