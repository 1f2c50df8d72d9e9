"""The codec by example: documented bytes, zeros, bounds, memory, the caller's tensors."""

import ctypes
from pathlib import Path

import pytest
import torch

from dilocox.compression import group_quantization
from dilocox.compression.group_quantization import GroupCodec, NotEncodable
from tests.compression.bits import ALL, CODED, SCALED

LIMITS = {4: 7, 8: 127, 16: 32767}


def test_a_part_of_4_bits_has_the_documented_bytes():
    values = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    codes = bytes([0x97, 0x20, 0x02, 0x0E])  # 7 -7, 0 2 and 2 0 (half to even), -2
    expected = bytes.fromhex("01040000 0000803f 003c") + codes + bytes(28)
    assert GroupCodec(4).encode(values).numpy().tobytes() == expected


def test_the_length_follows_from_bits_and_numel():
    lengths = {bits: [GroupCodec(bits).encoded_bytes(n) for n in (0, 1, 64, 65)] for bits in LIMITS}
    assert lengths == {4: [8, 42, 42, 76], 8: [8, 74, 74, 140], 16: [8, 138, 138, 268]}
    assert [GroupCodec(32).encoded_bytes(n) for n in (0, 1, 65)] == [4, 8, 264]


@ALL
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_zeros_decode_as_zeros(bits: int, numel: int):
    codec = GroupCodec(bits)
    payload = codec.encode(torch.zeros(numel))
    assert not payload[4:].any()
    assert torch.equal(codec.decode(payload, numel), torch.zeros(numel))


@SCALED
def test_minus_zero_has_the_bytes_of_zero(bits: int):
    codec = GroupCodec(bits)
    assert torch.equal(codec.encode(torch.full((70,), -0.0)), codec.encode(torch.zeros(70)))


@SCALED
def test_a_subnormal_part_encodes_as_zero(bits: int):
    codec = GroupCodec(bits)
    values = torch.full((70,), torch.finfo(torch.float32).smallest_normal / 2)
    assert values.all()
    assert torch.equal(codec.encode(values), codec.encode(torch.zeros(70)))


@CODED
def test_a_group_far_below_the_factor_keeps_a_sane_error(bits: int):
    values = torch.cat([torch.full((64,), 1.0), torch.full((64,), 1e-6), torch.full((64,), 1e-15)])
    codec = GroupCodec(bits)
    decoded = codec.decode(codec.encode(values), 192)
    errors = (decoded - values)[64:].abs()
    assert errors.max() <= (1e-6 / LIMITS[bits] + 2.0**-24) / 2  # the factor is at most 1
    assert not decoded[128:].any()


@ALL
def test_nan_and_infinities_are_refused_by_count(bits: int):
    values = torch.zeros(300)
    values[[5, 120]] = float("nan")
    values[299] = float("-inf")
    with pytest.raises(NotEncodable, match="2 NaN and 1 infinite among 300"):
        GroupCodec(bits).encode(values)


@CODED
def test_values_beyond_the_factors_bound_are_not_encodable(bits: int):
    codec = GroupCodec(bits, max_factor=4.0)
    largest = torch.tensor([4.0 * LIMITS[bits]])
    assert codec.decode(codec.encode(largest), 1) == largest
    with pytest.raises(NotEncodable, match="max_factor 4"):
        codec.encode(torch.nextafter(largest, torch.tensor(torch.inf)))


@ALL
def test_bytes_do_not_depend_on_blocks_or_threads(bits: int, monkeypatch: pytest.MonkeyPatch):
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    codec = GroupCodec(bits)
    payload = codec.encode(values)
    decoded = codec.decode(payload, values.numel())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        monkeypatch.setattr(group_quantization, "CPU_BLOCK", 192 * 64)
        assert torch.equal(codec.encode(values), payload)
        assert torch.equal(codec.decode(payload, values.numel()), decoded)
    finally:
        torch.set_num_threads(threads)


@ALL
def test_encoding_and_decoding_leave_their_input_alone(bits: int):
    values = torch.randn(500, generator=torch.Generator().manual_seed(2))
    before = values.clone()
    codec = GroupCodec(bits)
    payload = codec.encode(values)
    sent = payload.clone()
    codec.decode(payload, 500)
    assert torch.equal(values, before)
    assert torch.equal(payload, sent)


@ALL
def test_decode_fills_the_vector_it_is_given(bits: int):
    codec = GroupCodec(bits)
    payload = codec.encode(torch.linspace(-1, 1, 100))
    flat = torch.full((300,), 9.0)
    result = codec.decode(payload, 100, flat[100:200])
    assert result.data_ptr() == flat[100:].data_ptr()
    assert torch.equal(flat[100:200], codec.decode(payload, 100))
    assert (flat[:100] == 9).all()
    assert (flat[200:] == 9).all()


@ALL
def test_temporaries_take_a_small_part_of_the_inputs_size(bits: int):
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("the peak of memory is read from Linux's /proc")

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

    codec = GroupCodec(bits)
    values = torch.ones(1 << 23)
    input_bytes = 4 * values.numel()
    payload = codec.encode(values)
    for call in (lambda: codec.encode(values), lambda: codec.decode(payload, values.numel())):
        ctypes.CDLL(None).malloc_trim(0)  # else the allocator serves the call from what it kept
        clear.write_text("5")  # the peak starts anew
        before = memory("VmRSS")
        result = call()
        extra = memory("VmHWM") - before - result.numel() * result.element_size()
        assert extra < 0.5 * input_bytes
