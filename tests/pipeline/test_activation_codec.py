"""Activations: lengths, error bounds, what is not finite, hostile payloads, choice of codec."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from dilocox.pipeline.activation_codec import (
    NotFinite,
    decode,
    decode_windows,
    encode,
    encode_windows,
    encoded_bytes,
    put_back,
    split_forward,
    split_gradient,
    take_out,
    tensor_frame,
)
from dilocox.pipeline.frames import (
    CODECS,
    GROUP_CODECS,
    NOT_FINITE,
    Frame,
    FrameRefused,
    encode_prefix_and_header,
)
from tests.pipeline.frame_samples import LIMITS, Wire

ALL = pytest.mark.parametrize("codec", CODECS)
SHAPES = [(1, 1, 1), (2, 3, 64), (2, 3, 70), (1, 5, 200)]
VOCABULARY = 500


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def refusal(codec: str, payload: bytes, shape: tuple[int, ...]) -> str:
    with pytest.raises(FrameRefused) as caught:
        decode(codec, payload, shape)
    return caught.value.kind


# ---- round trips ---------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_exact_and_bf16_rounds_as_torch_does(shape: tuple[int, ...]):
    values = normal(*shape)
    assert torch.equal(decode("fp32", encode("fp32", values), shape), values)
    assert torch.equal(decode("bf16", encode("bf16", values), shape), values.bfloat16().float())


def test_int8_errs_by_half_a_step_of_its_tokens_group():
    values = normal(2, 3, 70) * torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1)
    decoded = decode("int8", encode("int8", values), (2, 3, 70))
    for start, stop in ((0, 64), (64, 70)):
        group, got = values[..., start:stop], decoded[..., start:stop]
        step = group.abs().amax(-1, keepdim=True) / 127
        assert bool(((got - group).abs() <= step * 0.51 + 1e3 * 2.0**-24).all())


def test_int4_errs_by_half_a_step_of_its_tokens_group_without_levels():
    values = normal(2, 3, 70) * torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1) + 0.01
    levels, rest = take_out(values.view(6, 70))
    decoded = decode("int4", encode("int4", values), (2, 3, 70)).view(6, 70)
    for start, stop in ((0, 64), (64, 70)):
        steps = torch.zeros(6, 70)
        steps[:, start:stop] = rest[:, start:stop].abs().amax(1, keepdim=True) / 7
        low, high = (put_back(levels, rest + sign * 0.51 * steps) for sign in (-1, 1))
        got, slack = decoded[:, start:stop], 1e-5 * values.view(6, 70).abs().amax(1, keepdim=True)
        assert bool((got >= low[:, start:stop] - slack).all())
        assert bool((got <= high[:, start:stop] + slack).all())


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_and_layout_is_coded_as_its_values(codec: str, dtype: torch.dtype):
    values = normal(2, 70, 3).to(dtype).requires_grad_()
    assert encode(codec, values.mT) == encode(codec, values.detach().float().mT.contiguous())


@ALL
def test_decoding_gives_memory_of_its_own_and_takes_any_offset(codec: str):
    payload = encode(codec, normal(2, 3, 70))
    message = b"xyz" + payload
    decoded = decode(codec, memoryview(message)[3:], (2, 3, 70))
    assert torch.equal(decoded, decode(codec, payload, (2, 3, 70)))
    assert decoded.is_contiguous() and decoded.dtype == torch.float32
    decoded.zero_()
    assert message[3:] == payload


# ---- what is not finite --------------------------------------------------------------------------
@ALL
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_encoded(codec: str, value: float):
    values = normal(2, 3, 70)
    values[1, 2, 69] = value
    with pytest.raises(NotFinite):
        encode(codec, values)


@pytest.mark.parametrize(
    ("codec", "value"), [("bf16", 3.4e38), ("int8", 2.0**103), ("int4", 2.0**97)]
)
def test_what_a_codec_cannot_hold_is_not_encoded(codec: str, value: float):
    values = torch.full((1, 1, 70), value)
    with pytest.raises(NotFinite):
        encode(codec, values)
    decoded = decode(codec, encode(codec, values / 2**6), (1, 1, 70))
    assert decoded.isfinite().all() and decoded[0, 0, 3] > 0


def test_an_unknown_codec_is_a_mistake():
    for mistake in (
        lambda: encode("int2", normal(1, 1, 1)),
        lambda: encoded_bytes("int2", (1, 1, 1)),
        lambda: encoded_bytes("bf16", (1, 1)),
    ):
        with pytest.raises(ValueError):
            mistake()


# ---- hostile payloads ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("codec", "last"),
    [
        *(("bf16", struct.pack("<H", bits)) for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81)),
        *(("fp32", struct.pack("<f", value)) for value in (torch.nan, torch.inf, -torch.inf)),
        ("int8", b"\x80"),  # codes that are not in use
        ("int4", b"\x08"),
    ],
)
def test_a_value_that_no_encoder_makes_is_refused(codec: str, last: bytes):
    payload = encode(codec, normal(2, 3, 64))
    assert refusal(codec, payload[: -len(last)] + last, (2, 3, 64)) == "values"


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_values_behind_the_end_of_a_token_are_refused(codec: str):
    group_bytes = GROUP_CODECS[codec].encoded_bytes(2 * 3 * 128)
    whole, widened = encode(codec, normal(2, 3, 70)), encode(codec, normal(2, 3, 128))
    levels = whole[: len(whole) - group_bytes]
    assert refusal(codec, levels + widened[-group_bytes:], (2, 3, 70)) == "values"
    assert decode(codec, levels + whole[-group_bytes:], (2, 3, 70)).shape == (2, 3, 70)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("position", [0, 69, 70, 139])  # centres, levels
def test_levels_that_are_not_finite_are_refused(bits: int, position: int):
    payload = bytearray(encode("int4", normal(2, 3, 70)))
    struct.pack_into("<H", payload, 2 * position, bits)
    assert refusal("int4", bytes(payload), (2, 3, 70)) == "values"


def test_levels_that_make_infinities_only_together_are_refused():
    payload = bytearray(encode("int4", normal(2, 3, 70)))
    for position in range(2 * 70):
        struct.pack_into("<H", payload, 2 * position, 0x7F00)  # 2^127
    assert refusal("int4", bytes(payload), (2, 3, 70)) == "values"


@ALL
def test_a_payload_of_another_length_is_refused(codec: str):
    payload = encode(codec, normal(2, 3, 70))
    for other in (payload[:-1], payload + b"\0", b""):
        assert refusal(codec, other, (2, 3, 70)) == "length"


@pytest.mark.parametrize("codec", [NOT_FINITE, "int2", ""])
def test_what_is_no_codec_has_no_values(codec: str):
    assert refusal(codec, b"", (2, 3, 70)) == "codec"


@ALL
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_payload_is_refused_or_finite(codec: str, data: st.DataObject):
    payload = bytearray(encode(codec, normal(1, 2, 70)))
    start = data.draw(st.integers(0, len(payload) - 1))
    noise = data.draw(st.binary(max_size=len(payload) - start))
    payload[start : start + len(noise)] = noise
    try:
        decoded = decode(codec, bytes(payload), (1, 2, 70))
    except FrameRefused as refused:
        assert refused.kind == "values"
    else:
        assert decoded.shape == (1, 2, 70) and bool(decoded.isfinite().all())


# ---- windows and frames --------------------------------------------------------------------------
def test_windows_are_int32_little_endian():
    windows = torch.tensor([[0, 1, 499]])
    assert encode_windows(windows) == struct.pack("<3i", 0, 1, 499)
    decoded = decode_windows(encode_windows(windows), 1, 2, VOCABULARY)
    assert torch.equal(decoded, windows) and decoded.dtype == torch.int64


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        *((struct.pack("<3i", 1, token, 2), "values") for token in (VOCABULARY, -1, -(2**31))),
        (bytes(8), "length"),
    ],
)
def test_windows_that_are_none_of_this_run_are_refused(payload: bytes, kind: str):
    with pytest.raises(FrameRefused) as caught:
        decode_windows(payload, 1, 2, VOCABULARY)
    assert caught.value.kind == kind


@pytest.mark.parametrize("token", [-1, 2**31])
def test_tokens_that_no_int32_holds_are_a_mistake(token: int):
    with pytest.raises(ValueError, match="token ids"):
        encode_windows(torch.tensor([[1, token]]))


def sent(frame: Frame) -> Frame:
    return Wire(encode_prefix_and_header(frame) + frame.payload).frame(LIMITS)


def some_windows(b: int = 2) -> Tensor:
    return torch.arange(b * 4).view(b, 4) + 3


@ALL
@pytest.mark.parametrize(("kind", "b"), [("forward", 2), ("evaluate", 5)])
def test_a_forward_frame_brings_activation_and_windows(codec: str, kind: str, b: int):
    values, windows = normal(b, 3, 70), some_windows(b)
    bare = Frame(kind=kind, replica="head", epoch=3, step=4, microbatch=1)
    frame = sent(tensor_frame(bare, codec, values, windows))
    assert (frame.replica, frame.epoch, frame.step, frame.microbatch) == ("head", 3, 4, 1)
    assert frame.payload == encode(codec, values) + encode_windows(windows)
    got, got_windows = split_forward(frame, VOCABULARY)
    assert got is not None
    assert torch.equal(got, decode(codec, encode(codec, values), (b, 3, 70)))
    assert torch.equal(got_windows, windows)
    if kind == "forward":
        gradient = split_gradient(sent(tensor_frame(Frame(kind="gradient"), codec, values)))
        assert gradient is not None
        assert torch.equal(gradient, got)


@ALL
def test_what_is_not_finite_travels_as_such(codec: str):
    values, windows = normal(2, 3, 70), some_windows()
    values[0, 0, 0] = torch.nan
    forward = sent(tensor_frame(Frame(kind="forward"), codec, values, windows))
    assert (forward.codec, forward.payload) == (NOT_FINITE, encode_windows(windows))
    got, got_windows = split_forward(forward, VOCABULARY)
    assert got is None and torch.equal(got_windows, windows)
    gradient = sent(tensor_frame(Frame(kind="gradient"), codec, values))
    assert (gradient.codec, gradient.payload) == (NOT_FINITE, b"")
    assert split_gradient(gradient) is None
    onward = tensor_frame(Frame(kind="gradient", shape=(2, 3, 70)), codec, None)
    assert sent(onward) == gradient


@pytest.mark.parametrize(
    ("kind", "windows"), [("forward", None), ("evaluate", None), ("gradient", some_windows())]
)
def test_windows_go_with_forwards_only(kind: str, windows: Any):
    with pytest.raises(ValueError, match="windows"):
        tensor_frame(Frame(kind=kind), "bf16", normal(2, 3, 70), windows)


# ---- levels: nothing is lost without them, and codes are left for what tells tokens apart --------
def error(values: Tensor, decoded: Tensor) -> float:
    return float((decoded - values).square().mean().sqrt())


def coded(values: Tensor) -> Tensor:
    """Through "int4" and back, [n, d]."""
    return decode("int4", encode("int4", values[None]), (1, *values.shape))[0]


def plain(values: Tensor) -> Tensor:
    """Through groups without levels."""
    codec, flat = GroupCodec(4), values.reshape(-1)
    return codec.decode(codec.encode(flat), flat.numel()).view(values.shape)


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 40), d=st.integers(1, 140), seed=st.integers(0, 99))
def test_putting_back_gives_the_values_again(n: int, d: int, seed: int):
    values = normal(n, d, seed=seed) * normal(n, 1, seed=seed + 1).exp() + normal(d, seed=seed + 2)
    kept = values.clone()
    levels, rest = take_out(values)
    assert torch.equal(values, kept)
    assert levels.numel() == 4 * d and levels.dtype == torch.uint8
    assert torch.allclose(put_back(levels, rest), values, rtol=1e-5, atol=1e-5)


def test_a_channel_that_is_large_in_every_token_costs_its_neighbours_nothing():
    values = normal(256, 128)
    calm = error(values[:, :64], coded(values)[:, :64])
    values[:, 64] = 50 + normal(256, seed=1)
    values[:, 100] *= 30
    for channels in (slice(0, 65), slice(65, 100), slice(101, 128)):
        assert error(values[:, channels], coded(values)[:, channels]) < 1.1 * calm
    assert error(values[:, 100], coded(values)[:, 100]) < 1.1 * 30 * calm
    assert error(values[:, 65:100], plain(values)[:, 65:100]) > 5 * calm, "a weak test"


def test_where_no_channel_stands_out_it_is_as_good_as_plain_groups():
    for values in (normal(256, 128), normal(256, 128) * 10 ** normal(256, 1, seed=1)):
        assert error(values, coded(values)) < 1.03 * error(values, plain(values))


@pytest.mark.parametrize("size", [1e2, 1e3, 1e5])
def test_one_huge_token_costs_the_others_nothing(size: float):
    values = normal(256, 128) + normal(128, seed=1)
    calm = error(values[1:], coded(values)[1:])
    values[0] *= size
    assert error(values[1:], coded(values)[1:]) < 1.05 * calm


@pytest.mark.parametrize("exponent", [-80, -30, 30, 80])
def test_magnitude_does_not_matter(exponent: int):
    values = normal(8, 70)
    assert torch.equal(coded(values * 2.0**exponent), coded(values) * 2.0**exponent)


@pytest.mark.parametrize("zeros", [1, 62])
def test_tokens_of_zeros_stay_near_zero_and_cost_the_others_nothing(zeros: int):
    values = normal(64, 70)
    values[:zeros] = 0
    assert float(coded(values)[:zeros].abs().max()) < 1e-5
    assert error(values, coded(values)) < 1.03 * error(values, plain(values))


def test_what_is_the_same_in_all_tokens_is_exact_to_bf16():
    constant = normal(70).expand(6, 70)
    assert torch.allclose(coded(constant), constant, rtol=1e-3)
    assert not coded(torch.zeros(3, 70)).any()
