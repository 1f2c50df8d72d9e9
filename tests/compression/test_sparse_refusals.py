"""What the sparse codecs refuse: other peers' bytes, each by its kind, and callers' mistakes."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.group_codec import Codec, GroupCodec, NotEncodable, PayloadRefused
from dilocox.compression.top_k import CHUNK, SparseMeanCodec, TopKCodec

CODECS = pytest.mark.parametrize("codec", [TopKCodec(64), SparseMeanCodec(4)], ids=lambda c: c.name)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sparse(numel: int) -> Tensor:
    return normal(numel) * (normal(numel, 1).abs() > 2)


def tensor(raw: bytes | bytearray) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


NUMEL, K = CHUNK + 300, 40  # 40 and 3 values: places of 60 and 5 bytes, codes of 11
LEVELS, PLACES, CODES = 8, 16, 16 + 65


def valid() -> bytearray:
    return bytearray(TopKCodec(K).encode(normal(NUMEL)).numpy().tobytes())


def refusal(codec: Codec, raw: bytes | bytearray, numel: int = NUMEL) -> str:
    with pytest.raises(PayloadRefused) as caught:
        codec.decode(tensor(raw), numel)
    return caught.value.kind


def put_place(raw: bytearray, index: int, place: int) -> None:
    packed = int.from_bytes(raw[PLACES:CODES], "little")
    packed = packed & ~(0xFFF << 12 * index) | place << 12 * index
    raw[PLACES:CODES] = packed.to_bytes(CODES - PLACES, "little")


def place_of(raw: bytearray, index: int) -> int:
    return int.from_bytes(raw[PLACES:CODES], "little") >> 12 * index & 0xFFF


class TestTopKRefuses:
    codec = TopKCodec(K)

    def test_a_wrong_length(self) -> None:
        raw = valid()
        assert refusal(self.codec, raw[:-1]) == "length"
        assert refusal(self.codec, raw + b"\0") == "length"
        assert refusal(self.codec, raw, NUMEL + 1000) == "length"
        assert refusal(TopKCodec(K + 1), raw) == "length"
        assert {refusal(self.codec, raw[:size]) for size in range(12)} == {"length"}

    @pytest.mark.parametrize(
        ("at", "kind"), [(0, "version"), (1, "bits"), (2, "reserved"), (3, "reserved")]
    )
    def test_a_header_that_differs_in_any_byte(self, at: int, kind: str) -> None:
        for other in range(256):
            raw = valid()
            if raw[at] != other:
                raw[at] = other
                assert refusal(self.codec, raw) == kind

    @pytest.mark.parametrize(
        "factor", [np.nan, np.inf, -1.0, -0.0, 0.0, 1e-40, 2.0**-81, 0.75, 2.0**17]
    )
    def test_a_factor_out_of_bounds(self, factor: float) -> None:
        raw = valid()
        raw[4:8] = struct.pack("<f", factor)
        assert refusal(self.codec, raw) == "factor"

    def test_a_factor_over_nothing(self) -> None:
        raw = bytearray(self.codec.encode(torch.zeros(NUMEL)).numpy().tobytes())
        raw[4:8] = struct.pack("<f", 1.0)
        assert refusal(self.codec, raw) == "factor"
        assert refusal(self.codec, struct.pack("<BBHf", 1, 2, 0, 1.0), numel=0) == "factor"

    @pytest.mark.parametrize("at", range(4))
    @pytest.mark.parametrize("scale", [np.nan, np.inf, -0.5, -0.0, 1.001])
    def test_a_level_outside_zero_to_one(self, at: int, scale: float) -> None:
        raw = valid()
        raw[LEVELS + 2 * at : LEVELS + 2 * at + 2] = struct.pack("<e", scale)
        assert refusal(self.codec, raw) == "scale"

    @pytest.mark.parametrize("chunk", [0, 1])
    def test_a_low_level_above_the_high_one(self, chunk: int) -> None:
        raw, at = valid(), LEVELS + 4 * chunk
        raw[at : at + 4] = raw[at + 2 : at + 4] + raw[at : at + 2]
        assert refusal(self.codec, raw) == "scale"

    def test_places_that_do_not_ascend(self) -> None:
        for index in (1, 2, 39, 41, 42):
            raw = valid()
            put_place(raw, index, place_of(raw, index - 1))
            assert refusal(self.codec, raw) == "index"
        raw = valid()
        first, second = place_of(raw, 0), place_of(raw, 1)
        put_place(raw, 0, second)
        put_place(raw, 1, first)
        assert refusal(self.codec, raw) == "index"

    def test_a_place_behind_a_short_last_chunk(self) -> None:
        raw = valid()
        put_place(raw, 42, 299)
        put_place(raw, 41, 298)
        self.codec.decode(tensor(raw), NUMEL)
        put_place(raw, 42, 300)
        assert refusal(self.codec, raw) == "index"

    def test_a_place_may_fall_from_chunk_to_chunk(self) -> None:
        raw = valid()
        put_place(raw, 39, 4095)
        put_place(raw, 40, 0)
        decoded = self.codec.decode(tensor(raw), NUMEL)
        assert decoded[4095] != 0
        assert decoded[4096] != 0

    def test_padding(self) -> None:
        for at, bit in ((CODES - 1, 4), (CODES - 1, 7), (len(valid()) - 1, 6)):
            raw = valid()
            raw[at] |= 1 << bit
            assert refusal(self.codec, raw) == "padding"

    @pytest.mark.parametrize(("low", "code"), [(0.0, 2), (0.5, 1), (0.5, 2), (0.5, 3)])
    def test_a_code_for_a_level_of_zero(self, low: float, code: int) -> None:
        raw = bytearray(self.codec.encode(torch.zeros(NUMEL)).numpy().tobytes())
        # The last chunk has levels; so has the first one only where its low level is the zero.
        raw[LEVELS : LEVELS + 8] = struct.pack("<4e", 0, 0.5 if low == 0 else 0, 1, 1)
        raw[4:8] = struct.pack("<f", 1.0)
        self.codec.decode(tensor(raw), NUMEL)
        raw[CODES] = code
        assert refusal(self.codec, raw) == "code"

    @given(raw=st.binary(max_size=200), numel=st.integers(0, 9000))
    @settings(deadline=None, max_examples=100)
    def test_random_bytes(self, raw: bytes, numel: int) -> None:
        with pytest.raises(PayloadRefused):
            self.codec.decode(tensor(b"\xff" + raw), numel)

    @given(data=st.data())
    @settings(deadline=None, max_examples=200)
    def test_a_damaged_part_or_decodes_within_bounds(self, data: st.DataObject) -> None:
        raw = valid()
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        try:
            decoded = TopKCodec(K, max_factor=8.0).decode(tensor(raw), NUMEL)
        except PayloadRefused as refused:
            assert refused.kind in str(refused)
        else:
            assert decoded.isfinite().all()
            assert decoded.abs().max() <= 8.0
            assert decoded.count_nonzero() <= K + 3


class TestMeanRefuses:
    codec = SparseMeanCodec(4)

    def raw(self, numel: int = 1001) -> bytearray:
        return bytearray(self.codec.encode(sparse(numel)).numpy().tobytes())

    def test_a_wrong_length(self) -> None:
        raw = self.raw()
        assert refusal(self.codec, raw[1:], 1001) in ("length", "version")
        assert refusal(self.codec, raw[:5], 1001) == "length"
        assert refusal(self.codec, b"", 1001) == "length"
        assert refusal(self.codec, b"", 0) == "length"
        parts = int((sparse(1001) != 0).sum())
        size = GroupCodec(4).max_bytes(parts)
        assert refusal(self.codec, raw[:size] + b"\1" + raw[size:], 1001) == "length"
        assert refusal(self.codec, raw[: size - 1] + raw[size:], 1001) == "length"
        assert refusal(self.codec, b"\xff" * 10, 128) == "length"

    def test_padding_of_either_bitmap(self) -> None:
        values = torch.zeros(1001)
        values[1000] = 1.0
        raw = bytearray(self.codec.encode(values).numpy().tobytes())
        for at, bit in ((-1, 6), (-1, 7), (-17, 1), (-17, 7)):
            damaged = bytearray(raw)
            damaged[at] |= 1 << bit
            assert refusal(self.codec, damaged, 1001) == "padding"

    def test_a_zero_byte_that_is_marked(self) -> None:
        values = torch.zeros(64)
        values[3] = 1.0
        raw = bytearray(self.codec.encode(values).numpy().tobytes())
        assert raw[-2:] == bytes([0b1000, 1])
        raw[-2] = 0
        assert refusal(self.codec, raw, 64) == "index"

    def test_another_number_of_values_than_marked(self) -> None:
        values = torch.zeros(128)
        values[:64] = 1.0
        raw = bytearray(self.codec.encode(values).numpy().tobytes())
        raw[-1] |= 1 << 7  # one byte of the bitmap more, taken from the numbers
        assert refusal(self.codec, raw, 128) == "length"

    @pytest.mark.parametrize(("at", "kind"), [(0, "version"), (1, "bits"), (4, "factor")])
    def test_what_the_group_codec_refuses(self, at: int, kind: str) -> None:
        raw = self.raw()
        raw[at] ^= 1
        assert refusal(self.codec, raw, 1001) == kind

    @given(raw=st.binary(max_size=200), numel=st.integers(0, 2000))
    @settings(deadline=None, max_examples=100)
    def test_random_bytes(self, raw: bytes, numel: int) -> None:
        with pytest.raises(PayloadRefused):
            self.codec.decode(tensor(b"\xff" + raw), numel)

    @given(data=st.data())
    @settings(deadline=None, max_examples=200)
    def test_a_damaged_part_or_decodes_within_bounds(self, data: st.DataObject) -> None:
        raw = self.raw(333)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        try:
            decoded = SparseMeanCodec(4, max_factor=8.0).decode(tensor(raw), 333)
        except PayloadRefused as refused:
            assert refused.kind in str(refused)
        else:
            assert decoded.isfinite().all()
            assert decoded.abs().max() <= 7 * 8.0


class TestCallersMistakes:
    @CODECS
    def test_nan_and_infinities_are_not_encodable(self, codec: Codec) -> None:
        values = torch.ones(70_000)
        values[[5, 69_999]] = float("nan")
        values[300] = float("-inf")
        with pytest.raises(NotEncodable, match="2 NaN and 1 infinite among 70000"):
            codec.encode(values)

    @pytest.mark.parametrize(("codec", "largest"), [(TopKCodec(64, 4.0), 4.0)])
    def test_values_beyond_the_factors_bound_are_not_encodable(
        self, codec: Codec, largest: float
    ) -> None:
        values = torch.tensor([largest])
        assert codec.decode(codec.encode(values), 1) == values
        with pytest.raises(NotEncodable, match="max_factor 4"):
            codec.encode(values * 1.01)

    @pytest.mark.parametrize("k", [0, -1, 4097])
    def test_a_senseless_k_is_refused(self, k: int) -> None:
        with pytest.raises(ValueError, match=f"top_k {k}: choose 1 to 4096"):
            TopKCodec(k)

    @pytest.mark.parametrize("max_factor", [0.0, -1.0, float("nan"), float("inf"), 2.0**97])
    def test_a_senseless_max_factor_is_refused(self, max_factor: float) -> None:
        for make in (lambda: TopKCodec(64, max_factor), lambda: SparseMeanCodec(4, max_factor)):
            with pytest.raises(ValueError, match="max_factor"):
                make()

    def test_unknown_bits_are_refused(self) -> None:
        with pytest.raises(ValueError, match="codec bits 5"):
            SparseMeanCodec(5)

    @CODECS
    @pytest.mark.parametrize(
        "values",
        [torch.zeros(64, dtype=torch.float64), torch.zeros(8, 8), torch.zeros(128)[::2]],
        ids=["float64", "matrix", "strided"],
    )
    def test_encode_takes_contiguous_fp32_vectors_only(self, codec: Codec, values: Tensor) -> None:
        with pytest.raises(ValueError, match="values is"):
            codec.encode(values)

    @CODECS
    @pytest.mark.parametrize("out", [torch.zeros(101), torch.zeros(100, dtype=torch.float16)])
    def test_decode_takes_an_out_of_its_length_and_type_only(
        self, codec: Codec, out: Tensor
    ) -> None:
        with pytest.raises(ValueError, match="out is"):
            codec.decode(codec.encode(torch.ones(100)), 100, out)

    @CODECS
    def test_a_negative_numel_is_refused(self, codec: Codec) -> None:
        with pytest.raises(ValueError, match="numel -1"):
            codec.decode(codec.encode(torch.ones(1)), -1)
