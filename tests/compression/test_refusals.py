"""What the codec refuses: bytes from other peers, each field by its kind, and callers' mistakes."""

import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec, NotEncodable, PayloadRefused
from tests.compression.bits import ALL, CODED, SCALED

LIMITS = {2: 7, 4: 7, 8: 127, 16: 32767}  # times the factor: what decoding gives at most
NUMEL = 100  # two groups, the second one with 28 values of padding
SCALES, CODES = 8, 12  # where scales and codes begin


def valid(bits: int) -> bytearray:
    values = torch.linspace(-1, 1, NUMEL)
    return bytearray(GroupCodec(bits).encode(values).numpy().tobytes())


def tensor(raw: bytes | bytearray) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def refusal(bits: int, raw: bytes | bytearray, numel: int = NUMEL) -> str:
    with pytest.raises(PayloadRefused) as caught:
        GroupCodec(bits).decode(tensor(raw), numel)
    return caught.value.kind


def put_code(raw: bytearray, bits: int, index: int, code: int) -> None:
    if bits == 4:
        at, shift = CODES + index // 2, 4 * (index % 2)
        raw[at] = raw[at] & ~(15 << shift) & 255 | (code & 15) << shift
    else:
        width = bits // 8
        at = CODES + width * index
        raw[at : at + width] = code.to_bytes(width, "little", signed=True)


@ALL
def test_a_length_other_than_numel_gives_is_refused(bits: int):
    raw = valid(bits)
    assert refusal(bits, raw[:-1]) == "length"
    assert refusal(bits, raw + b"\0") == "length"
    assert refusal(bits, raw, NUMEL + 256) == "length"
    assert {refusal(bits, raw[:size]) for size in range(9)} == {"length"}


@ALL
@pytest.mark.parametrize(
    ("at", "kind"), [(0, "version"), (1, "bits"), (2, "reserved"), (3, "reserved")]
)
def test_a_header_that_differs_in_any_byte_is_refused(bits: int, at: int, kind: str):
    raw = valid(bits)
    for other in {*range(256)} - {raw[at]}:
        raw[at] = other
        assert refusal(bits, raw) == kind


@SCALED
@pytest.mark.parametrize(
    "factor", [np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 1e-40, 2.0**-97, 0.75, 2.0**17]
)
def test_a_factor_out_of_bounds_is_refused(bits: int, factor: float):
    raw = valid(bits)
    raw[4:8] = struct.pack("<f", factor)
    assert refusal(bits, raw) == "factor"


@SCALED
@pytest.mark.parametrize("factor", [1.0, -0.0])
def test_a_factor_over_groups_that_are_all_zero_is_refused(bits: int, factor: float):
    raw = bytearray(GroupCodec(bits).encode(torch.zeros(NUMEL)).numpy().tobytes())
    raw[4:8] = struct.pack("<f", factor)
    assert refusal(bits, raw) == "factor"


@SCALED
def test_a_factor_for_no_values_is_refused(bits: int):
    assert refusal(bits, struct.pack("<BBHf", 1, bits, 0, 1.0), numel=0) == "factor"


@CODED
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -0.5, -0.0, 1.001, 65504.0])
def test_a_scale_outside_zero_to_one_is_refused(bits: int, group: int, scale: float):
    raw = valid(bits)
    raw[SCALES + 2 * group : SCALES + 2 * group + 2] = struct.pack("<e", scale)
    assert refusal(bits, raw) == "scale"


@CODED
@pytest.mark.parametrize("index", [0, 1, 63, 64, NUMEL - 1])
def test_the_code_below_the_lowest_is_refused(bits: int, index: int):
    raw = valid(bits)
    put_code(raw, bits, index, -LIMITS[bits])
    GroupCodec(bits).decode(tensor(raw), NUMEL)
    put_code(raw, bits, index, -LIMITS[bits] - 1)
    assert refusal(bits, raw) == "code"


@CODED
@pytest.mark.parametrize("group", [0, 1])
def test_codes_under_a_scale_of_zero_are_refused(bits: int, group: int):
    raw = valid(bits)
    raw[SCALES + 2 * group : SCALES + 2 * group + 2] = bytes(2)
    assert refusal(bits, raw) == "code"


@CODED
@pytest.mark.parametrize("index", [NUMEL, NUMEL + 1, 127])
def test_padding_other_than_zero_is_refused(bits: int, index: int):
    raw = valid(bits)
    put_code(raw, bits, index, 1)
    assert refusal(bits, raw) == "padding"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_raw_values_that_are_not_finite_are_refused(value: float):
    raw = valid(32)
    raw[-4:] = struct.pack("<f", value)
    assert refusal(32, raw) == "value"


@ALL
@given(raw=st.binary(max_size=600), numel=st.integers(0, 200))
@settings(deadline=None, max_examples=100)
def test_random_bytes_raise_nothing_but_a_refusal(bits: int, raw: bytes, numel: int):
    with pytest.raises(PayloadRefused):
        GroupCodec(bits).decode(tensor(b"\xff" + raw), numel)


@ALL
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_damaged_part_is_refused_or_decodes_within_bounds(bits: int, data: st.DataObject):
    raw = valid(bits)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    codec = GroupCodec(bits, max_factor=8.0)
    try:
        decoded = codec.decode(tensor(raw), NUMEL)
    except PayloadRefused as refused:
        assert refused.kind in str(refused)
    else:
        assert decoded.isfinite().all()
        assert bits == 32 or decoded.abs().max() <= LIMITS[bits] * 8.0


@ALL
def test_a_part_inside_a_longer_message_decodes_at_any_offset(bits: int):
    raw = bytes(valid(bits))
    expected = GroupCodec(bits).decode(tensor(raw), NUMEL)
    for offset in range(5):
        message = tensor(bytes(offset) + raw)
        assert torch.equal(GroupCodec(bits).decode(message[offset:], NUMEL), expected)
        foreign = torch.frombuffer(bytearray(bytes(offset) + raw), dtype=torch.uint8, offset=offset)
        assert torch.equal(GroupCodec(bits).decode(foreign, NUMEL), expected)


def test_errors_survive_pickling_between_processes():
    refused = pickle.loads(pickle.dumps(PayloadRefused("scale", "a scale is negative")))
    assert (refused.kind, str(refused)) == ("scale", "payload refused (scale): a scale is negative")
    assert str(pickle.loads(pickle.dumps(NotEncodable("2 NaN")))) == "2 NaN"


@pytest.mark.parametrize("bits", [0, 3, 5, 64, -4])
def test_unknown_bits_are_refused_by_value(bits: int):
    with pytest.raises(ValueError, match=f"codec bits {bits}: choose 2, 4, 8, 16 or 32"):
        GroupCodec(bits)


@pytest.mark.parametrize("max_factor", [0.0, -1.0, float("nan"), float("inf"), 2.0**97])
def test_a_senseless_max_factor_is_refused(max_factor: float):
    with pytest.raises(ValueError, match="max_factor"):
        GroupCodec(4, max_factor)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(64, dtype=torch.float64), torch.zeros(8, 8), torch.zeros(128)[::2]],
    ids=["float64", "matrix", "strided"],
)
def test_encode_takes_contiguous_fp32_vectors_only(values: Tensor):
    with pytest.raises(ValueError, match="values is"):
        GroupCodec(4).encode(values)


@pytest.mark.parametrize("out", [torch.zeros(NUMEL + 1), torch.zeros(NUMEL, dtype=torch.float16)])
def test_decode_takes_an_out_of_its_length_and_type_only(out: Tensor):
    with pytest.raises(ValueError, match="out is"):
        GroupCodec(4).decode(tensor(valid(4)), NUMEL, out)


def test_a_negative_numel_is_refused():
    with pytest.raises(ValueError, match="numel -1"):
        GroupCodec(4).decode(tensor(valid(4)), -1)
