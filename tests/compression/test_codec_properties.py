"""Properties of the codec over all values: error bound, exactness, equal bytes everywhere."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from tests.compression.bits import ALL, CODED, assert_flushing_changes_nothing

LIMITS = {4: 7, 8: 127, 16: 32767}
WIDE = 2.0**96  # the largest max_factor: lets tests use every magnitude that a codec can know
EXAMPLES = settings(deadline=None, max_examples=60)

any_values = hnp.arrays(
    np.float32,
    st.integers(0, 200),
    elements=st.floats(-(2.0**98), 2.0**98, width=32, allow_subnormal=True),
)


@st.composite
def layered_values(draw: st.DrawFn, spread: int = 40, lowest: int = -115) -> NDArray[np.float32]:
    """Normal values whose magnitude differs from group to group, as from layer to layer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numel = draw(st.integers(0, 300))
    exponents = rng.integers(-spread, 1, size=-(-numel // 64)) + draw(st.integers(lowest, 60))
    scales = np.repeat(2.0 ** exponents.astype(np.float64), 64)[:numel]
    return (rng.standard_normal(numel) * scales).astype(np.float32)


@st.composite
def borderline_values(draw: st.DrawFn) -> NDArray[np.float32]:
    """Values a few last-place units around the midpoints of codes and the borders of scales."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    limit, count = draw(st.sampled_from(sorted(LIMITS.values()))), 3
    scales = rng.uniform(2.0**-10, 1, size=(count, 1)).astype(np.float16).astype(np.float64)
    codes = rng.integers(-limit, limit, size=(count, 64)) + 0.5
    codes[:, 0] = limit
    values = (codes * scales * 2.0 ** draw(st.integers(-60, 60))).astype(np.float32)
    units = rng.integers(-1, 1, size=values.shape, endpoint=True)
    units[:, 0] = rng.integers(-20, 20, size=count)
    return (values.view(np.int32) + units.astype(np.int32)).view(np.float32).reshape(-1)


some_values = st.one_of(any_values, layered_values(), borderline_values())


def fields(payload: Tensor, numel: int, bits: int) -> tuple[float, NDArray[np.float16], bytes]:
    """Factor, scales and code bytes, read as the layout in the codec's docstring says."""
    raw = payload.numpy().tobytes()
    count = -(-numel // 64)
    assert raw[:4] == bytes([1, bits, 0, 0])
    scales = np.frombuffer(raw, "<f2", count, offset=8)
    codes = raw[8 + 2 * count :]
    assert len(codes) == 8 * bits * count
    return struct.unpack("<f", raw[4:8])[0], scales, codes


def reference_scales(
    magnitudes: NDArray[np.float32], factor: float, limit: int
) -> NDArray[np.float16]:
    if factor == 0:
        return np.zeros(len(magnitudes), np.float16)
    ideal = magnitudes * np.float32(1 / factor) / np.float32(limit)
    nearest = ideal.astype(np.float16)
    short = nearest.astype(np.float32) < ideal * np.float32(1 - 2.0**-20)
    scales = np.where(short, np.nextafter(nearest, np.float16(np.inf)), nearest)
    return np.where(magnitudes.astype(np.float64) <= factor * 2.0**-25, np.float16(0), scales)


def reference(values: NDArray[np.float32], bits: int) -> bytes:
    """The same part by plain numpy and Python: slow, and written from the docstring alone."""
    limit, count = LIMITS[bits], -(-len(values) // 64)
    padded = np.zeros((count, 64), np.float32)
    padded.reshape(-1)[: len(values)] = values
    peak = float(np.abs(padded).max(initial=0))
    factor = 2.0**-96 if peak > 2.0**-121 else 0.0
    while limit * factor < peak and factor:
        factor *= 2
    scales = reference_scales(np.abs(padded).max(1, initial=0), factor, limit)
    codes: list[int] = []
    for group, scale in zip(padded, scales, strict=True):
        step = np.float32(float(scale) * factor)
        codes += [round(float(value / step)) if step else 0 for value in group]
    if bits == 4:
        nibbles = [code & 15 for code in codes]
        packed = bytes(
            low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)
        )
    else:
        packed = np.array(codes, f"<i{bits // 8}").tobytes()
    header = struct.pack("<BBHf", 1, bits, 0, factor)
    return header + scales.astype("<f2").tobytes() + packed


@CODED
@given(values=some_values)
@EXAMPLES
def test_bytes_match_a_plain_numpy_reference(bits: int, values: NDArray[np.float32]):
    payload = GroupCodec(bits, WIDE).encode(torch.from_numpy(values))
    assert payload.numpy().tobytes() == reference(values, bits)


@CODED
def test_scales_are_found_by_true_division_also_at_their_borders(bits: int):
    rng = np.random.default_rng(0)
    scales = rng.uniform(2.0**-10, 1, size=4000).astype(np.float16)
    peaks = LIMITS[bits] * scales.astype(np.float32)
    peaks = (peaks.view(np.int32) + rng.integers(4, 20, size=4000, dtype=np.int32)).view(np.float32)
    values = np.zeros((4000, 64), np.float32)
    values[:, 0] = peaks
    payload = GroupCodec(bits).encode(torch.from_numpy(values.reshape(-1)))
    factor, found, _ = fields(payload, values.size, bits)
    assert found.tobytes() == reference_scales(peaks, factor, LIMITS[bits]).tobytes()
    assert 0.1 < (found == scales).mean() < 0.9


@CODED
@given(values=some_values)
@EXAMPLES
def test_error_is_at_most_half_a_step(bits: int, values: NDArray[np.float32]):
    codec = GroupCodec(bits, WIDE)
    payload = codec.encode(torch.from_numpy(values))
    decoded = codec.decode(payload, len(values)).numpy()
    factor, scales, _ = fields(payload, len(values), bits)
    # float64 holds values, steps and differences here exactly.
    smallest = 2.0**-24 * max(factor, 2.0**-96)
    steps = np.repeat(np.maximum(scales.astype(np.float64) * factor, smallest), 64)[: len(values)]
    slack = 2.0**-8 if bits == 16 else 0.0  # rounding to fp32
    errors = np.abs(decoded.astype(np.float64) - values.astype(np.float64))
    assert (errors <= (0.5 + slack) * steps).all()


@CODED
@given(values=some_values)
@EXAMPLES
def test_steps_are_as_small_as_fp16_scales_allow(bits: int, values: NDArray[np.float32]):
    payload = GroupCodec(bits, WIDE).encode(torch.from_numpy(values))
    factor, scales, _ = fields(payload, len(values), bits)
    padded = np.zeros(len(scales) * 64)
    padded[: len(values)] = values
    needed = np.abs(padded.reshape(-1, 64)).max(1, initial=0) / LIMITS[bits]
    bound = needed * 1.001 + 2.0**-24 * factor
    assert (scales.astype(np.float64) * factor <= bound).all()


@CODED
@given(data=st.data())
@EXAMPLES
def test_representable_values_round_trip_exactly(bits: int, data: st.DataObject):
    limit, count = LIMITS[bits], data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = rng.integers(-limit, limit, size=(count, 64), endpoint=True)
    codes[:, rng.integers(64)] = limit * rng.choice([-1, 1])
    scales = rng.uniform(2.0**-10, 1, size=(count, 1)).astype(np.float16).astype(np.float64)
    factor = 2.0 ** data.draw(st.integers(-80, 90))
    values = torch.from_numpy((codes * scales * factor).astype(np.float32).reshape(-1))
    codec = GroupCodec(bits, WIDE)
    assert torch.equal(codec.decode(codec.encode(values), values.numel()), values)


@pytest.mark.parametrize("bits", [4, 8])
@given(values=layered_values(spread=8, lowest=-60))
@EXAMPLES
def test_encoding_a_decoded_part_gives_the_same_bytes(bits: int, values: NDArray[np.float32]):
    codec = GroupCodec(bits, WIDE)
    payload = codec.encode(torch.from_numpy(values))
    again = codec.encode(codec.decode(payload, len(values)))
    assert torch.equal(again, payload)


@given(values=any_values)
@EXAMPLES
def test_raw_fp32_keeps_every_finite_value_to_the_bit(values: NDArray[np.float32]):
    codec = GroupCodec(32)
    payload = codec.encode(torch.from_numpy(values))
    assert payload.numpy().tobytes() == b"\x01\x20\x00\x00" + values.tobytes()
    assert codec.decode(payload, len(values)).numpy().tobytes() == values.tobytes()


@CODED
@given(values=some_values)
@settings(EXAMPLES, max_examples=30)
def test_bytes_do_not_depend_on_flushing_subnormals(bits: int, values: NDArray[np.float32]):
    assert_flushing_changes_nothing(GroupCodec(bits, WIDE), values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ALL
@given(values=some_values)
@settings(EXAMPLES, max_examples=50)
def test_cuda_gives_the_bytes_and_values_of_the_cpu(bits: int, values: NDArray[np.float32]):
    codec = GroupCodec(bits, WIDE)
    on_cpu = torch.from_numpy(values.clip(-WIDE, WIDE))  # more is too large for 2 bits
    payload = codec.encode(on_cpu)
    assert torch.equal(codec.encode(on_cpu.cuda()).cpu(), payload)
    decoded = codec.decode(payload.cuda(), len(values))
    assert decoded.is_cuda
    assert torch.equal(decoded.cpu(), codec.decode(payload, len(values)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ALL
def test_cuda_gives_the_bytes_of_the_cpu_for_millions_of_values(bits: int):
    values = torch.randn(20_000_003, generator=torch.Generator().manual_seed(3)) * 1e-3
    codec = GroupCodec(bits)
    payload = codec.encode(values)
    assert torch.equal(codec.encode(values.cuda()).cpu(), payload)
    decoded = codec.decode(payload.cuda(), values.numel()).cpu()
    assert torch.equal(decoded, codec.decode(payload, values.numel()))
