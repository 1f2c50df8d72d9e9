"""Frames of every kind, and a stream of given bytes to read them from."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from hypothesis import strategies as st

from dilocox.pipeline import frames
from dilocox.pipeline.frames import (
    CODECS,
    NOT_FINITE,
    Frame,
    FrameLimits,
    encoded_bytes,
    read_frame,
    window_bytes,
)

LIMITS = FrameLimits(microbatch_size=2, sequence_length=3, hidden_size=70, evaluate_windows=5)
PREFIX = struct.Struct("<2sBBIQ")


class Wire:
    """A stream of given bytes that keeps account of what is asked of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.asked: list[int] = []

    async def read(self, count: int) -> bytes:
        self.asked.append(count)
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise asyncio.IncompleteReadError(taken, count)
        self.at += count
        return taken

    def frame(self, limits: FrameLimits = LIMITS) -> Frame:
        return asyncio.run(read_frame(self.read, limits))


def payload_bytes(kind: str, codec: str, b: int) -> int:
    windows = window_bytes(b, 3) if kind != "gradient" else 0
    return encoded_bytes(codec, (b, 3, 70)) + windows


def tensor_frame(kind: str = "forward", codec: str = "int8", b: int = 2, **fields: Any) -> Frame:
    return Frame(
        kind=kind,
        codec=codec,
        shape=(b, 3, 70),
        dtype="float32",
        payload=b"\x5a" * payload_bytes(kind, codec, b),
        **fields,
    )


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False),
    st.text(max_size=40),
)
facts = st.dictionaries(
    st.text(max_size=20),
    st.one_of(plain, st.lists(plain, max_size=6).map(tuple)),
    max_size=8,
)
numbers = st.integers(0, 2**53)


@st.composite
def any_frames(draw: st.DrawFn) -> Frame:
    common: dict[str, Any] = {
        "replica": draw(st.text(max_size=64)),
        "epoch": draw(numbers),
        "step": draw(numbers),
        "microbatch": draw(numbers),
        "facts": draw(facts),
    }
    kind = draw(st.sampled_from(sorted(frames.KINDS)))
    if kind in frames.SEALED_KINDS:
        return Frame(kind=kind, sealed=draw(st.binary(min_size=1, max_size=40)), **common)
    if kind not in frames.TENSOR_KINDS:
        return Frame(kind=kind, **common)
    codec = draw(st.sampled_from([*CODECS, NOT_FINITE]))
    b = draw(st.integers(1, 5)) if kind == "evaluate" else 2
    return tensor_frame(kind, codec, b, **common)
