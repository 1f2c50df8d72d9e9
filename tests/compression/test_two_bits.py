"""Two bits a value: documented bytes, a reference in plain Python, the error, hostile bytes."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec, NotEncodable, PayloadRefused
from dilocox.compression.workers import PIECE, Workers
from tests.compression.bits import assert_flushing_changes_nothing

GROUP = 256
CODEC = GroupCodec(2)
EXAMPLES = settings(deadline=None, max_examples=60)
MEANING = {0: 2, 1: 7, 2: -7, 3: -2}  # of a code, in steps

some_values = st.one_of(
    hnp.arrays(
        np.float32,
        st.integers(0, 600),
        elements=st.floats(-(2.0**14), 2.0**14, width=32, allow_subnormal=False),
    ),
    st.builds(
        lambda seed, count, exponent: (
            np.random.default_rng(seed).standard_normal(count).astype(np.float32)
            * np.float32(2.0**exponent)
        ),
        st.integers(0, 2**32),
        st.integers(0, 600),
        st.integers(-60, 10),
    ),
)


def halved(group: NDArray[np.float32]) -> np.float32:
    """The sum of 256 numbers by halving."""
    while len(group) > 1:
        group = group[: len(group) // 2] + group[len(group) // 2 :]
    return group[0]


def fitted(group: NDArray[np.float32], counted: int) -> np.float32:
    """The step of a group [256], of which so many are values."""
    magnitudes = np.abs(group)
    total = halved(magnitudes)
    threshold = total * np.float32(1.23) / np.float32(counted)
    over = magnitudes - threshold
    number = np.float32((over >= 0).sum())
    above = halved(np.maximum(over, np.float32(0))) + threshold * number
    numerator = total * np.float32(2) + above * np.float32(5)
    return numerator / (np.float32(4 * counted) + number * np.float32(45))


def reference(values: NDArray[np.float32]) -> bytes:
    """A part by plain numpy and Python, written from the docstrings alone."""
    count = -(-len(values) // GROUP)
    padded = np.zeros((count, GROUP), np.float32)
    padded.reshape(-1)[: len(values)] = values
    steps = [
        fitted(group, min(GROUP, len(values) - GROUP * index)) for index, group in enumerate(padded)
    ]
    peak, factor = float(max(steps, default=0)), 0.0
    if peak > 2.0**-121:
        factor = 2.0**-96
        while factor < peak:
            factor *= 2
    scales = [np.float16(0)] * count
    for index, step in enumerate(steps):
        ideal = float(step) / factor if factor else 0.0
        if ideal > 2.0**-25:
            nearest = np.float16(ideal)
            short = float(nearest) < float(np.float32(ideal) * np.float32(1 - 2.0**-20))
            scales[index] = np.nextafter(nearest, np.float16(np.inf)) if short else nearest
    codes = bytearray()
    for group, scale in zip(padded, scales, strict=True):
        middle = 4.5 * float(scale) * factor
        quotients = group / np.float32(middle or np.inf)
        numbers = [math.floor(each + np.float32(2)) - 2 & 3 for each in quotients.clip(-2, 1)]
        for at in range(0, GROUP, 4):
            codes.append(sum(numbers[at + place] << 2 * place for place in range(4)))
    raw = b"".join(scale.astype("<f2").tobytes() for scale in scales)
    return struct.pack("<BBHf", 1, 2, 0, factor) + raw + bytes(codes)


def of(raw: bytes | bytearray) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def refusal(raw: bytes | bytearray, numel: int) -> str:
    with pytest.raises(PayloadRefused) as caught:
        CODEC.decode(of(raw), numel)
    return caught.value.kind


def error(values: Tensor) -> float:
    decoded = CODEC.decode(CODEC.encode(values), values.numel())
    return float((decoded - values).norm() / values.norm())


def test_a_part_has_the_documented_bytes_and_values():
    values = torch.tensor([2.0, -2.0, 7.0, -7.0] * 64)
    expected = bytes.fromhex("01020000 0000803f 003c") + bytes([0b10_01_11_00]) * 64
    assert CODEC.encode(values).numpy().tobytes() == expected
    assert torch.equal(CODEC.decode(of(expected), 256), values)


def test_the_length_is_two_bits_and_a_sixteenth_a_value():
    assert [CODEC.encoded_bytes(n) for n in (0, 1, 256, 257)] == [8, 74, 74, 140]
    assert CODEC.encoded_bytes(1 << 20) * 8 / (1 << 20) < 2.063


@given(values=some_values)
@EXAMPLES
def test_bytes_match_a_plain_reference(values: NDArray[np.float32]):
    assert CODEC.encode(torch.from_numpy(values)).numpy().tobytes() == reference(values)


@given(values=some_values)
@EXAMPLES
def test_each_value_gets_the_nearest_of_the_four_levels(values: NDArray[np.float32]):
    payload = CODEC.encode(torch.from_numpy(values))
    decoded = CODEC.decode(payload, len(values)).numpy().astype(np.float64)
    factor = struct.unpack("<f", payload.numpy()[4:8].tobytes())[0]
    scales = np.frombuffer(payload.numpy().tobytes(), "<f2", -(-len(values) // GROUP), offset=8)
    steps = np.repeat(scales.astype(np.float64) * factor, GROUP)[: len(values), None]
    levels = steps * np.array([-7, -2, 2, 7])
    least = np.abs(levels - values[:, None].astype(np.float64)).min(1, initial=np.inf)
    found = np.abs(decoded - values)
    assert (found <= least * (1 + 1e-6)).all()  # a tie may fall to either side


@pytest.mark.parametrize(
    ("name", "most"), [("normal", 0.345), ("laplace", 0.44), ("few", 0.62), ("uniform", 0.35)]
)
def test_the_error_is_near_the_best_that_four_levels_allow(name: str, most: float):
    """The best for a normal distribution is 0.343; rounding to a grid with a zero has 0.6."""
    draw = torch.Generator().manual_seed(4)
    normal = torch.randn(1 << 18, generator=draw) * 1e-3
    uniform = torch.rand(1 << 18, generator=draw)
    values = {
        "normal": normal,
        "laplace": uniform.log() * torch.sign(normal),
        "few": normal * (uniform < 0.3),
        "uniform": uniform - 0.5,
    }[name]
    assert error(values) < most


def test_one_huge_value_does_not_hide_its_group():
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(GROUP, generator=draw)
    values[77] = 100.0
    decoded = CODEC.decode(CODEC.encode(values), GROUP)
    rest = torch.arange(GROUP) != 77
    assert torch.equal(torch.sign(decoded), torch.sign(values))
    assert float((decoded - values)[rest].norm() / values[rest].norm()) < 1.0


def test_with_the_residual_carried_on_what_arrives_is_what_was_meant():
    draw = torch.Generator().manual_seed(6)
    values = torch.randn(1000, generator=draw)
    values[:300] = 0.0  # zeros have a level, too
    left, arrived = torch.zeros(1000), torch.zeros(1000)
    for _ in range(50):
        message = values + left
        sent = CODEC.decode(CODEC.encode(message), 1000)
        left, arrived = message - sent, arrived + sent
    assert float((arrived / 50 - values).norm() / values.norm()) < 0.06


def test_bytes_do_not_depend_on_pieces_or_threads():
    draw = torch.Generator().manual_seed(7)
    values = torch.randn(2 * PIECE + 333, generator=draw)
    payload = CODEC.encode(values)
    decoded = CODEC.decode(payload, values.numel())
    several = GroupCodec(2, workers=Workers(3))
    assert torch.equal(several.encode(values), payload)
    assert torch.equal(several.decode(payload, values.numel()), decoded)


@given(values=some_values)
@settings(EXAMPLES, max_examples=30)
def test_bytes_do_not_depend_on_flushing_subnormals(values: NDArray[np.float32]):
    assert_flushing_changes_nothing(CODEC, values)


def test_pieces_of_several_parts_are_those_of_each():
    draw = torch.Generator().manual_seed(8)
    numel = PIECE + 777
    payloads = [CODEC.encode(torch.randn(numel, generator=draw)) for _ in range(3)]
    together = torch.empty(3, numel)
    CODEC.decode_together(payloads, numel, lambda part, rows: together[:, part].copy_(rows))
    for row, payload in zip(together, payloads, strict=True):
        assert torch.equal(row, CODEC.decode(payload, numel))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("at", [0, GROUP - 1, GROUP, 599])
def test_what_is_not_finite_is_refused_in_whichever_group_it_is(bad: float, at: int):
    values = torch.randn(600, generator=torch.Generator().manual_seed(9))
    values[at] = bad
    with pytest.raises(NotEncodable, match="among 600"):
        CODEC.encode(values)


def test_sums_beyond_fp32_are_not_encodable():
    with pytest.raises(NotEncodable):
        CODEC.encode(torch.full((GROUP,), 3e38))
    with pytest.raises(NotEncodable, match="max_factor 1:"):
        GroupCodec(2, max_factor=1.0).encode(torch.full((GROUP,), 2.1))


@pytest.mark.parametrize("at", [0, 63])
def test_codes_of_a_group_without_a_step_are_refused(at: int):
    values = torch.cat([torch.ones(GROUP), torch.zeros(GROUP)])
    raw = bytearray(CODEC.encode(values).numpy().tobytes())
    assert not any(raw[-64:])
    raw[-64 + at] = 1
    assert refusal(raw, 2 * GROUP) == "code"


@pytest.mark.parametrize("index", [100, 101, 255])
def test_codes_behind_the_last_value_are_refused(index: int):
    raw = bytearray(CODEC.encode(torch.linspace(-1, 1, 100)).numpy().tobytes())
    raw[10 + index // 4] |= 1 << 2 * (index % 4)
    assert refusal(raw, 100) == "padding"


def test_every_code_decodes_to_its_level():
    values = torch.tensor([2.0, -2.0, 7.0, -7.0] * 64)
    raw = bytearray(CODEC.encode(values).numpy().tobytes())
    for byte in range(256):
        raw[10] = byte
        expected = [float(MEANING[byte >> shift & 3]) for shift in (0, 2, 4, 6)]
        assert CODEC.decode(of(raw), 256)[:4].tolist() == expected
