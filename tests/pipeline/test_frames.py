"""Frames: what is written is read; what is not as it must be is refused by kind."""

from __future__ import annotations

import asyncio
import pickle
import struct
import tracemalloc
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilocox.dht.wire import pack
from dilocox.pipeline import frames
from dilocox.pipeline.frames import (
    CODECS,
    NOT_FINITE,
    PREFIX_BYTES,
    Frame,
    FrameRefused,
    encode_prefix_and_header,
    parse_header,
    parse_prefix,
)
from tests.pipeline.frame_samples import (
    LIMITS,
    PREFIX,
    Wire,
    any_frames,
    payload_bytes,
    plain,
    tensor_frame,
)

EXAMPLES = settings(deadline=None, max_examples=150)


def refusal(header: object, payload: int = 0) -> str:
    data = header if isinstance(header, bytes) else pack(header)
    with pytest.raises(FrameRefused) as caught:
        parse_header(data, payload, LIMITS)
    assert caught.value.kind in str(caught.value)
    return caught.value.kind


# ---- what is written is read ---------------------------------------------------------------------
@EXAMPLES
@given(any_frames())
def test_a_frame_is_read_as_it_was_written(frame: Frame):
    wire = Wire(encode_prefix_and_header(frame) + frame.payload + b"next")
    assert wire.frame() == frame
    assert wire.data[wire.at :] == b"next"


def test_the_bytes_of_a_frame_are_the_documented_ones():
    header = b"\x82\xa4kind\xa2go\xa4step\x07"
    expected = b"dx\x01\x00" + struct.pack("<IQ", len(header), 0) + header
    assert encode_prefix_and_header(Frame(kind="go", step=7)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "hug"},
        {"kind": "go", "payload": b"x"},
        {"kind": "go", "sealed": b"x"},
        {"kind": "sealed", "sealed": "x"},
        {"kind": "sealed", "sealed": bytes(24 * 1024)},
        {"kind": "relay"},
        {"kind": "go", "codec": "bf16"},
        {"kind": "forward"},
        {"kind": "go", "epoch": -1},
        {"kind": "go", "epoch": True},
        {"kind": "go", "replica": "x" * 65},
        {"kind": "go", "facts": {"x": b"bytes"}},
        {"kind": "go", "facts": {"x": {"y": 1}}},
        {"kind": "go", "facts": {"x": [[1]]}},
        {"kind": "go", "facts": {"x": object()}},
        {"kind": "go", "facts": {"x": "\ud800"}},
        {"kind": "go", "facts": {str(i): "x" * 1000 for i in range(30)}},
    ],
)
def test_what_no_receiver_would_take_is_not_written(fields: dict[str, Any]):
    with pytest.raises(ValueError):
        encode_prefix_and_header(Frame(**fields))


def test_a_payload_of_other_than_its_codecs_bytes_is_not_written():
    good = tensor_frame()
    for payload in (good.payload[:-1], good.payload + b"\0", b""):
        with pytest.raises(ValueError, match="payload"):
            encode_prefix_and_header(replace(good, payload=payload))


# ---- what is refused, by kind --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ((b"dx", 2, 0, 9, 0), "version"),
        ((b"dx", 1, 1, 9, 0), "version"),
        ((b"dy", 1, 0, 9, 0), "version"),
        ((b"dx", 1, 0, 0, 0), "length"),
        ((b"dx", 1, 0, frames.MAX_HEADER_BYTES + 1, 0), "length"),
        ((b"dx", 1, 0, 2**32 - 1, 0), "length"),
        ((b"dx", 1, 0, 9, LIMITS.max_payload + 1), "length"),
        ((b"dx", 1, 0, 9, 2**64 - 1), "length"),
    ],
)
def test_a_prefix_is_refused_before_anything_else_is_read(prefix: Any, kind: str):
    wire = Wire(PREFIX.pack(*prefix) + bytes(100))
    with pytest.raises(FrameRefused) as caught:
        wire.frame()
    assert caught.value.kind == kind
    assert wire.asked == [PREFIX_BYTES]


def test_the_largest_lengths_pass():
    largest = PREFIX.pack(b"dx", 1, 0, frames.MAX_HEADER_BYTES, LIMITS.max_payload)
    assert parse_prefix(largest, LIMITS) == (frames.MAX_HEADER_BYTES, LIMITS.max_payload)
    assert LIMITS.max_payload == payload_bytes("evaluate", "fp32", 5)
    with pytest.raises(FrameRefused, match="length"):
        parse_prefix(b"dx", LIMITS)  # cut short


FORWARD = {"kind": "forward", "codec": "bf16", "shape": [2, 3, 70], "dtype": "float32"}
DUE = payload_bytes("forward", "bf16", 2)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"kind": "hug"}, "kind"),
        ({"kind": 5}, "kind"),
        ({"kind": ["forward"]}, "kind"),
        ({"kind": "go"}, "codec"),
        ({"codec": "int2"}, "codec"),
        ({"codec": ""}, "codec"),
        ({"codec": 8}, "header"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": ""}, "dtype"),
        ({"shape": []}, "shape"),
        ({"shape": [2, 3]}, "shape"),
        ({"shape": [2, 3, 70, 1]}, "shape"),
        ({"shape": [3, 2, 70]}, "shape"),
        ({"shape": [2, 3, 64]}, "shape"),
        ({"shape": [2, 3, 70.0]}, "shape"),
        ({"kind": "evaluate", "shape": [True, 3, 70]}, "shape"),
        ({"shape": [-2, -3, 70]}, "shape"),
        ({"shape": "abc"}, "shape"),
        ({"replica": "x" * 65}, "header"),
        ({"replica": b"x"}, "header"),
        ({"epoch": -1}, "header"),
        ({"epoch": 2**53 + 1}, "header"),
        ({"step": 1.0}, "header"),
        ({"step": None}, "header"),
        ({"microbatch": True}, "header"),
        ({"facts": [1]}, "header"),
        ({"facts": {"x": 2**53 + 1}}, "header"),
        ({"facts": {"x": b"x"}}, "header"),
        ({"facts": {"x": {}}}, "header"),
        ({"facts": {"x": [[]]}}, "header"),
        ({"facts": {"x": "x" * 1025}}, "header"),
        ({"facts": {"x" * 65: 1}}, "header"),
        ({"facts": {b"x": 1}}, "header"),
        ({"facts": {"x": [0] * 257}}, "header"),
        ({"facts": {str(i): 0 for i in range(257)}}, "header"),
        ({"fact": 1}, "header"),
        ({"kind.x": 1}, "header"),
        ({"payload": b""}, "header"),
        ({b"kind": 1}, "header"),
    ],
    ids=str,
)
def test_a_field_that_is_not_as_it_must_be_is_refused(change: dict[Any, Any], kind: str):
    parse_header(pack(FORWARD), DUE, LIMITS)
    assert refusal(FORWARD | change, DUE) == kind


@pytest.mark.parametrize("missing", list(FORWARD))
def test_a_tensor_frame_needs_all_that_describes_it(missing: str):
    header = {name: value for name, value in FORWARD.items() if name != missing}
    assert refusal(header, DUE) == missing
    if missing != "kind":  # and a frame without one describes none
        assert refusal({"kind": "go", missing: FORWARD[missing]}) == missing


@pytest.mark.parametrize("kind", sorted(frames.TENSOR_KINDS))
@pytest.mark.parametrize("codec", [*CODECS, NOT_FINITE])
def test_a_payload_has_exactly_the_bytes_that_codec_and_shape_give(kind: str, codec: str):
    header = FORWARD | {"kind": kind, "codec": codec}
    due = payload_bytes(kind, codec, 2)
    parse_header(pack(header), due, LIMITS)
    for other in {due - 1, due + 1, 0, LIMITS.max_payload} - {due}:
        assert refusal(header, other) == "length"


def test_a_payload_is_not_read_where_none_is_due():
    wire = Wire(PREFIX.pack(b"dx", 1, 0, 9, 500) + b"\x81\xa4kind\xa2go" + bytes(500))
    with pytest.raises(FrameRefused, match="length"):
        wire.frame()
    assert wire.asked == [PREFIX_BYTES, 9]


@pytest.mark.parametrize(("windows", "kind"), [(1, ""), (5, ""), (6, "shape"), (2**53, "shape")])
def test_an_evaluation_has_one_window_or_more_up_to_its_limit(windows: int, kind: str):
    header = FORWARD | {"kind": "evaluate", "shape": [windows, 3, 70]}
    due = payload_bytes("evaluate", "bf16", windows)
    if kind:
        assert refusal(header, due) == kind
    else:
        assert parse_header(pack(header), due, LIMITS).shape == (windows, 3, 70)


def test_a_refusal_survives_pickling_between_processes():
    refused = pickle.loads(pickle.dumps(FrameRefused("shape", "[1]")))
    assert (refused.kind, str(refused)) == ("shape", "frame refused (shape): [1]")
    assert str(FrameRefused("epoch")) == "frame refused (epoch)"


def test_a_fact_nested_deeper_than_python_can_print_is_refused():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FrameRefused, match="x is list"):
        encode_prefix_and_header(Frame(kind="go", facts={"x": [deep]}))
    while deep:  # or its end would be the recursion
        deep = cast("list[object]", deep.pop())


def test_a_header_full_of_nonsense_takes_little_memory():
    odd = {f"{number:b}".encode(): b"" for number in range(1024)}
    header = pack({"kind": "go", "facts": odd})
    tracemalloc.start()
    try:
        assert refusal(header) == "header"
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_a_name_that_a_peer_chose_is_shown_escaped():
    with pytest.raises(FrameRefused) as caught:
        parse_header(pack({"kind": "go", "x\n\x1b[31m": 1}), 0, LIMITS)
    assert str(caught.value).isprintable()


# ---- hostile bytes -------------------------------------------------------------------------------
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
