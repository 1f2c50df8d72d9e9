"""The exact arithmetic against plain references: same bits, in any order of work."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from dilocox.compression.exact import (
    MAX_RANK,
    exact_product,
    orthonormalise,
    round_directions,
    squared_norms,
    tree_sum,
)
from dilocox.compression.group_quantization import GroupCodec

EXAMPLES = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference_sum(values: list[float]) -> float:
    """The tree of `tree_sum`, in Python floats, with real padding."""
    size = 1
    while size < len(values):
        size *= 2
    values = values + [0.0] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[half + i] for i in range(half)]
    return values[0]


def reference_gram_schmidt(rows: list[list[float]]) -> list[list[float]]:
    whole = [reference_sum([x * x for x in row]) for row in rows]
    for _ in range(2):
        for i, row in enumerate(rows):
            left = reference_sum([x * x for x in row])
            if not left > 1e-6**2 * whole[i]:
                rows[i] = [0.0] * len(row)
                continue
            for j in range(i + 1, len(rows)):
                share = reference_sum([x * y for x, y in zip(rows[j], row, strict=True)]) / left
                rows[j] = [y - share * x for x, y in zip(row, rows[j], strict=True)]
            rows[i] = [x / math.sqrt(left) for x in row]
        whole = [1.0] * len(rows)
    return rows


@EXAMPLES
@given(seeds, st.integers(1, 3), st.integers(1, 70))
def test_tree_sum_is_the_documented_tree(seed: int, count: int, length: int):
    values = normal(seed, count, length).double() * 2.0 ** (20 * normal(seed + 1, count, length))
    expected = [reference_sum(row) for row in values.tolist()]
    assert tree_sum(values.numpy()).tolist() == expected


def test_an_empty_sum_is_zero():
    assert tree_sum(np.empty((2, 0))).tolist() == [0.0, 0.0]
    assert squared_norms(torch.empty(0, 5)) == []


@EXAMPLES
@given(seeds, st.integers(1, 6), st.integers(6, 40))
def test_orthonormalise_has_the_bits_of_plain_floats(seed: int, rank: int, length: int):
    rows = normal(seed, rank, length).double()
    expected = reference_gram_schmidt(rows.tolist())
    assert orthonormalise(rows).tolist() == expected


@pytest.mark.parametrize("spread", [0, 4, 12])  # decimal orders between the first and last row
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (16, 100), (64, 64), (64, 1000)])
def test_rows_become_orthonormal(shape: tuple[int, int], spread: int):
    rank = shape[0]
    rows = normal(3, *shape).double() * torch.logspace(0, -spread, rank).double().view(-1, 1)
    gram = orthonormalise(rows) @ rows.T
    assert (gram - torch.eye(rank).double()).abs().max() < 1e-13


@pytest.mark.parametrize(("noise", "kept"), [(1e-5, True), (1e-7, False)])
def test_a_nearly_dependent_row_is_kept_or_zero_by_what_is_left_of_it(noise: float, kept: bool):
    rows = normal(5, 8, 300).double()
    rows[4] = rows[:4].sum(dim=0)
    rows[4] += noise * rows[4].norm() * functional.normalize(normal(6, 300).double(), dim=0)
    orthonormalise(rows)
    assert bool(rows[4].any()) == kept
    expected = torch.eye(8).double()
    expected[4, 4] = float(kept)
    assert (rows @ rows.T - expected).abs().max() < 1e-13


def test_rows_of_zeros_and_repeated_rows_become_zero():
    rows = normal(6, 5, 50).double()
    rows[0] = 0
    rows[3] = -7 * rows[1]
    orthonormalise(rows)
    assert [bool(row.any()) for row in rows] == [False, True, True, False, True]


def test_round_directions_is_exact_in_fp32():
    rows = orthonormalise(normal(7, 16, 500).double())
    rounded = round_directions(rows.clone())
    assert torch.equal(rounded.float().double(), rounded)
    assert torch.equal(rounded * 2**14, (rounded * 2**14).round())
    assert (rounded - rows).abs().max() <= 2**-15
    assert rounded.abs().max() <= 1


def directions(seed: int, rank: int, length: int) -> torch.Tensor:
    return round_directions(orthonormalise(normal(seed, rank, length).double())).float()


def decoded(seed: int, rank: int, cols: int, bits: int) -> torch.Tensor:
    """What a codec leaves of rows that fall off by eight orders of magnitude."""
    codec = GroupCodec(bits)
    values = normal(seed, rank, cols) * torch.logspace(0, -8, rank).view(-1, 1)
    payload = codec.encode(values.view(-1))
    return codec.decode(payload, rank * cols).view(rank, cols)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = torch.empty(left.shape[1], right.shape[1])
    exact_product(left, right, out)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_is_the_rational_one_rounded_once(bits: int):
    rank, rows, cols = 6, 9, 70
    left, right = directions(1, rank, rows), decoded(2, rank, cols, bits)
    exact = [
        [
            sum(Fraction(left[k, i].item()) * Fraction(right[k, j].item()) for k in range(rank))
            for j in range(cols)
        ]
        for i in range(rows)
    ]
    # the rational numbers are doubles, so float() keeps them and one rounding follows
    assert all(Fraction(float(value)) == value for row in exact for value in row)
    expected = torch.tensor(np.array([[float(v) for v in row] for row in exact], np.float64))
    assert torch.equal(product(left, right), expected.float())


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_the_product_does_not_depend_on_the_order_of_its_terms(bits: int):
    left, right = directions(1, MAX_RANK, 200), decoded(2, MAX_RANK, 300, bits)
    expected = product(left, right)
    for seed in range(4):
        order = torch.randperm(MAX_RANK, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(product(left[order].contiguous(), right[order].contiguous()), expected)


def test_terms_that_cancel_leave_the_same_in_any_order():
    left = torch.ones(3, 1)
    right = torch.tensor([[1.0], [(1 + 2.0**-23) * 2.0**-31], [-1.0]])
    results = {product(left, right[list(order)]).item() for order in permutations(range(3))}
    assert results == {2.0**-31}  # what is below the 32 bits is gone before the sum


def test_the_largest_sums_stay_exact():
    # all terms of one sign and as large as they come: the sum uses all 52 bits
    left = torch.ones(MAX_RANK, 3)
    left[0] = 2.0**-14
    right = torch.full((MAX_RANK, 5), 127 * 0.99951171875)
    right[1] = 2.0**-24
    exact = (
        2.0**-14 * Fraction(right[0, 0].item())
        + Fraction(2.0**-24)
        + 62 * Fraction(right[2, 0].item())
    )
    assert torch.equal(product(left, right), torch.full((3, 5), float(exact)))


def test_parts_of_different_factors_cost_less_than_fp32_rounding():
    left, right = directions(1, 8, 100), decoded(2, 8, 128, 4)
    right[:4] *= 2.0**12
    exact = (left.T.double() @ right.double()).float()
    assert (product(left, right) - exact).abs().max() <= 2.0**-23 * exact.abs().max()


def test_no_result_is_subnormal():
    left, right = directions(1, 4, 64), decoded(2, 4, 64, 4) * 2.0**-110
    results = product(left, right).abs()
    assert bool(results.any())
    assert results[results > 0].min() >= torch.finfo(torch.float32).tiny


def test_squared_norms_are_those_of_the_tree():
    rows = normal(8, 3, 45)
    expected = [reference_sum([x * x for x in row]) for row in rows.tolist()]
    assert squared_norms(rows) == expected
