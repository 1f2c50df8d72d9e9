"""Hostile bytes: the reader refuses them or reports the end of the stream, and nothing else.

It never asks the stream for more than its limits allow, so a peer cannot make it allocate more.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilocox.dht.wire import pack
from dilocox.pipeline import frames
from dilocox.pipeline.frames import PREFIX_BYTES, Frame, FrameRefused, encode_prefix_and_header
from tests.pipeline.frame_samples import LIMITS, PREFIX, Wire, any_frames, payload_bytes, plain

EXAMPLES = settings(deadline=None, max_examples=150)
FORWARD = {"kind": "forward", "codec": "bf16", "shape": [2, 3, 70], "dtype": "float32"}
DUE = payload_bytes("forward", "bf16", 2)


def survives(data: bytes) -> Frame | None:
    """Read one frame of any bytes: a frame, a refusal or the end, within the limits."""
    wire = Wire(data)
    try:
        frame = wire.frame()
    except (FrameRefused, asyncio.IncompleteReadError):
        frame = None
    else:
        assert frame.kind in frames.KINDS
        assert len(frame.payload) <= LIMITS.max_payload
    assert max(wire.asked) <= max(frames.MAX_HEADER_BYTES, frames.CHUNK_BYTES)
    assert sum(wire.asked) <= PREFIX_BYTES + frames.MAX_HEADER_BYTES + LIMITS.max_payload
    return frame


def framed(header: bytes, payload: int = 0) -> bytes:
    return PREFIX.pack(b"dx", 1, 0, len(header), payload) + header


@EXAMPLES
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_end(data: bytes):
    assert survives(data) is None


@EXAMPLES
@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**64 - 1))
@example(b"\x91" * 5000, 0)
@example(b"\x81\xa4kind" + b"\x91" * 500 + b"\xc0", 0)
@example(b"\x81" * 400 + b"\xa1x" * 400, 0)
@example(b"\x82\xa4kind\xa2go\xa5facts\x81\xa1x" + b"\x91" * 500 + b"\xc0", 0)
@example(b"\x82\xa4kind\xa2go\xa5shape" + b"\x93" + b"\x91" * 400 + b"\xc0" * 3, 0)
@example(b"\xdf\xff\xff\xff\xff", 0)
@example(b"\xdd\xff\xff\xff\xff", 0)
@example(b"\xc6\xff\xff\xff\xffabc", 0)
@example(b"\xdb\xff\xff\xff\xffabc", 0)
@example(b"\xd6\xff\x00\x00\x00\x00", 0)
@example(b"\x82\xa4kind\xa2go\xa5epoch\xd6\xff\x00\x00\x00\x00", 0)
@example(b"\x81\x90\x02", 0)
@example(b"\x81\xa2\xff\xfe\x01", 0)
def test_any_header_is_refused(header: bytes, payload: int):
    assert survives(framed(header, payload)) is None


values = st.recursive(
    st.one_of(plain, st.floats(), st.binary(max_size=8), st.integers(-(2**63), 2**64 - 1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@EXAMPLES
@given(
    st.dictionaries(st.sampled_from([*vars(Frame(kind="")), "more"]), values, max_size=9),
    st.sampled_from([0, 1, DUE, LIMITS.max_payload]),
)
def test_any_fields_make_a_frame_or_a_refusal(fields: dict[str, Any], payload: int):
    survives(framed(pack(FORWARD | fields), payload) + bytes(LIMITS.max_payload))
    survives(framed(pack({"kind": "go"} | fields), payload) + bytes(LIMITS.max_payload))


@EXAMPLES
@given(any_frames(), st.data())
def test_a_damaged_frame_is_read_refused_or_ends(frame: Frame, data: st.DataObject):
    whole = bytearray(encode_prefix_and_header(frame) + frame.payload)
    header_end = len(whole) - len(frame.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(whole))


@EXAMPLES
@given(any_frames(), st.data())
def test_a_frame_cut_short_ends_where_it_ends(frame: Frame, data: st.DataObject):
    whole = encode_prefix_and_header(frame) + frame.payload
    wire = Wire(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(asyncio.IncompleteReadError):
        wire.frame()
