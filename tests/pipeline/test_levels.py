"""Levels: nothing is lost by taking them out, and codes are left for what tells tokens apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.group_codec import GroupCodec
from dilocox.pipeline.activation_codec import NotLevelled, decode, encode, put_back, take_out
from dilocox.pipeline.frames import level_bytes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    levels, rest = take_out(values)
    assert levels.numel() == level_bytes(d) and levels.dtype == torch.uint8
    assert torch.allclose(put_back(levels, rest), values, rtol=1e-5, atol=1e-5)


def test_values_are_left_as_they_are():
    values = normal(5, 70)
    kept = values.clone()
    take_out(values)
    assert torch.equal(values, kept)


def test_without_levels_channels_are_alike():
    values = normal(256, 128) * normal(128, seed=1).exp()
    values += 10 * values.abs().mean(0) * normal(128, seed=2)
    _, rest = take_out(values)
    sizes = rest.square().mean(0).sqrt()
    assert bool((rest.mean(0).abs() < 0.2 * sizes).all())
    assert torch.allclose(sizes / sizes.mean(), torch.ones(128), rtol=0.2)


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_has_no_level_is_said(value: float):
    values = normal(3, 70)
    values[1, 69] = value
    with pytest.raises(NotLevelled, match="too large" if math.isfinite(value) else "not a number"):
        take_out(values)
