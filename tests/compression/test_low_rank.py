"""Low rank: places, exactness, what is conserved, and equal bytes on every kind of processor."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.exact import exact_product
from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.compression.low_rank import LowRank, matrices_of, rank_limits
from tests.sweeps import sweep

SEED = "run/0/1"
SHAPES = [
    ("w", (96, 160)),
    ("norm", (50,)),
    ("heads", (3, 1, 30, 70)),
    ("small", (4, 5)),
    ("g", ()),
]
LAYOUT = FlatLayout.of(SHAPES)
RANKS = (8, 0, 5, 0, 0)
EXAMPLES = settings(deadline=None, max_examples=40)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def message_of(layout: FlatLayout, seed: int = 0) -> Tensor:
    """Normal values in every tensor, zeros in the padding."""
    message = torch.zeros(layout.numel)
    values = normal(layout.numel, seed)
    for piece in layout.slices:
        part = slice(piece.start, piece.start + piece.numel)
        message[part] = values[part]
    return message


def decaying(rows: int, cols: int, decay: float = 0.7, seed: int = 0) -> Tensor:
    """A full-rank matrix with singular values 1, decay, decay^2 ... at most."""
    rank = min(rows, cols)
    left, _ = torch.linalg.qr(normal(rows * rank, seed).view(rows, rank))
    right, _ = torch.linalg.qr(normal(cols * rank, seed + 1).view(cols, rank))
    return (left * decay ** torch.arange(rank)) @ right.T


def coded(values: Tensor, bits: int, parts: int = 1) -> Tensor:
    """What a codec leaves of a vector that is cut into parts."""
    codec = GroupCodec(bits)
    result = torch.zeros_like(values)
    size = -(-values.numel() // 64 // parts) * 64
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        result[start : start + size] = codec.decode(codec.encode(part), part.numel())
    return result


def digest(*vectors: Tensor) -> str:
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in vectors)).hexdigest()


# places


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), None),
        ((7,), None),
        ((3, 4), (1, 3, 4)),
        ((2, 3, 4), (2, 3, 4)),
        ((2, 1, 4), (1, 2, 4)),
        ((2, 3, 4, 5), (1, 24, 5)),
    ],
)
def test_three_dimensions_are_matrices_and_others_join_all_but_the_last(
    shape: tuple[int, ...], expected: tuple[int, int, int] | None
):
    assert matrices_of(shape) == expected


EXPERTS = FlatLayout.of([("experts", (6, 48, 80)), ("w", (96, 160))])


def test_experts_that_learn_different_things_are_carried_each_at_the_rank():
    """Of one matrix of all their rows, the rank would be needed for all experts together."""
    apart = torch.zeros(EXPERTS.numel)
    for number, expert in enumerate(EXPERTS.view(apart)["experts"]):
        expert.copy_(normal(48 * 2, number).view(48, 2) @ normal(2 * 80, 50 + number).view(2, 80))
    together = FlatLayout.of([("experts", (6, 1, 48, 80)), ("w", (96, 160))])

    def error(layout: FlatLayout) -> float:
        low_rank = LowRank(layout, (2, 4))
        basis, found = low_rank.initial_basis(SEED), torch.zeros(())
        for turn in range(4):
            p_hat = low_rank.orthonormal(low_rank.project(apart, basis))
            q = low_rank.contract(apart, p_hat)
            basis = low_rank.next_basis(q, low_rank, f"{SEED}{turn}")
            found = low_rank.expand(p_hat, q)
        return float((found - apart).norm() / apart.norm())

    assert error(EXPERTS) < 0.01
    assert error(together) > 0.7


def test_a_large_matrix_is_averaged_in_blocks_of_rows_to_the_same_bytes():
    layout = FlatLayout.of([("w", (2100, 2048))])
    low_rank, average, places = LowRank(layout, (2,)), torch.zeros(layout.numel), list[slice]()
    p_hat = low_rank.orthonormal(normal(low_rank.p_numel))
    q_mean = coded(normal(low_rank.q_numel, 1), 4)

    def place(part: slice, values: Tensor) -> None:
        places.append(part)
        average[part] = values

    low_rank.expand_pieces(p_hat, q_mean, place)
    assert len(places) == 2
    (matrix,) = low_rank.factored
    whole = torch.empty(2100, 2048)
    exact_product(matrix.p(p_hat), matrix.q(q_mean), whole)
    assert torch.equal(average, whole.view(-1))


def test_the_rank_of_a_stack_of_experts_is_that_of_the_one_that_needs_most():
    low_rank = LowRank(EXPERTS, (4, 4))
    assert len(low_rank.factored) == 7
    q_mean = torch.zeros(low_rank.q_numel)
    assert low_rank.needed(q_mean, 0.9) == (0, 0)
    for number, matrix in enumerate(low_rank.factored[:6]):
        rows = 3 if number == 4 else 1
        matrix.q(q_mean)[:rows] = torch.eye(80)[:rows]
    assert low_rank.needed(q_mean, 0.9) == (3, 0)


def test_experts_are_drawn_apart_and_follow_each_other_in_every_vector():
    low_rank = LowRank(EXPERTS, (3, 0))
    starts = [(m.start, m.p_start, m.q_start) for m in low_rank.factored]
    assert starts == [(48 * 80 * n, 192 * n, 256 * n) for n in range(6)]  # 3 * 48, 3 * 80, padded
    bases = [m.basis(low_rank.initial_basis(SEED)) for m in low_rank.factored]
    assert all(not torch.equal(bases[0], other) for other in bases[1:])
    first, *_ = low_rank.factored
    left_out = [slice(first.q_start, first.q_start + 1)]
    assert low_rank.touched(left_out) == [slice(0, 48 * 80)], "the other experts decay"
    assert rank_limits(EXPERTS)[0] == 29


@EXAMPLES
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 80))
def test_a_rank_limit_is_the_last_rank_that_saves_bytes(rows: int, cols: int, most: int):
    layout = FlatLayout.of([("w", (rows, cols))])
    (limit,) = rank_limits(layout, most)
    dense_bytes = GroupCodec(4).encoded_bytes(layout.numel)

    def factored_bytes(rank: int) -> int:
        low_rank = LowRank(layout, [rank])
        codec = GroupCodec(4)
        header = codec.encoded_bytes(0)
        numels = (low_rank.p_numel, low_rank.q_numel)
        return sum(codec.encoded_bytes(numel) for numel in numels) - header

    assert 0 <= limit <= min(most, 64, rows, cols)
    if limit:
        assert factored_bytes(limit) < dense_bytes
    for rank in range(limit + 1, min(most, 64, rows, cols) + 1):
        assert factored_bytes(rank) >= dense_bytes


def test_vectors_and_small_matrices_have_no_rank():
    assert rank_limits(LAYOUT, 16) == (16, 0, 16, 0, 0)
    assert rank_limits(LAYOUT) == (59, 0, 39, 0, 0)


def test_pieces_start_at_whole_groups_and_do_not_overlap():
    low_rank = LowRank(LAYOUT, RANKS)
    assert low_rank.p_numel == 8 * 96 + 512
    assert low_rank.q_numel == 8 * 160 + 64 + 384 + 64 + 64
    assert low_rank.basis_numel == 8 * 160 + 384
    first, second = low_rank.factored
    assert (first.index, first.rows, first.cols, first.rank) == (0, 96, 160, 8)
    assert (second.index, second.rows, second.cols, second.rank) == (2, 90, 70, 5)
    assert (second.start, second.p_start, second.q_start) == (LAYOUT.slices[2].start, 768, 1344)
    assert second.basis_start == 1280


@pytest.mark.parametrize(
    "ranks", [(8, 0, 5, 0), (8, 1, 5, 0, 0), (-1, 0, 5, 0, 0), (65, 0, 5, 0, 0), (8, 0, 5, 5, 0)]
)
def test_unfit_ranks_are_refused(ranks: tuple[int, ...]):
    with pytest.raises(ValueError, match="rank"):
        LowRank(LAYOUT, ranks)


def test_vectors_of_the_wrong_length_are_refused():
    low_rank = LowRank(LAYOUT, RANKS)
    with pytest.raises(ValueError, match=r"p_hat is .* pass fp32 \[1280\]"):
        low_rank.expand(torch.zeros(1279), torch.zeros(low_rank.q_numel))
    with pytest.raises(ValueError, match="message"):
        low_rank.project(torch.zeros(3), torch.zeros(low_rank.basis_numel))


def test_touched_names_each_tensor_with_a_value_in_the_slices():
    low_rank = LowRank(LAYOUT, RANKS)
    w, norm, heads, _, g = (slice(p.start, p.start + p.numel) for p in LAYOUT.slices)
    assert low_rank.touched([]) == []
    assert low_rank.touched([slice(1280 - 64, 1280)]) == [w]
    assert low_rank.touched([slice(1280, 1344), slice(0, 64)]) == [w, norm]
    assert low_rank.touched([slice(1344 + 350, 1344 + 384)]) == []  # padding alone
    assert low_rank.touched([slice(1344 + 320, 1344 + 384)]) == [heads]
    assert low_rank.touched([slice(low_rank.q_numel - 64, low_rank.q_numel)]) == [g]


# a round


@EXAMPLES
@given(st.integers(1, 90), st.integers(1, 90), st.data())
def test_a_matrix_of_low_rank_is_recovered(rows: int, cols: int, data: st.DataObject):
    rank = data.draw(st.integers(1, min(rows, cols, 12)))
    layout = FlatLayout.of([("before", (3,)), ("w", (rows, cols)), ("after", (2, 2))])
    low_rank = LowRank(layout, [0, rank, 0])
    left, right = normal(rows * rank, 1), normal(cols * rank, 2)
    message = message_of(layout)
    layout.view(message)["w"].copy_(left.view(rows, rank) @ right.view(rank, cols))
    p_hat = low_rank.orthonormal(low_rank.project(message, low_rank.initial_basis(SEED)))
    average = low_rank.expand(p_hat, low_rank.contract(message, p_hat))
    error = (layout.view(average)["w"] - layout.view(message)["w"]).norm()
    # P^ is rounded to 2^-14 and a basis may be nearly blind to a direction
    assert error <= 0.02 * layout.view(message)["w"].norm()
    for name in ("before", "after"):
        assert torch.equal(layout.view(average)[name], layout.view(message)[name])


def test_the_basis_of_past_rounds_finds_the_largest_directions():
    layout = FlatLayout.of([("w", (120, 200))])
    low_rank = LowRank(layout, [6])
    matrix = decaying(120, 200)
    message = torch.zeros(layout.numel)
    layout.view(message)["w"].copy_(matrix)
    best = float(torch.linalg.svdvals(matrix)[6:].norm())
    basis, errors = low_rank.initial_basis(SEED), list[float]()
    for turn in range(6):
        p_hat = low_rank.orthonormal(coded(low_rank.project(message, basis), 8))
        q_mean = coded(low_rank.contract(message, p_hat), 8)
        errors.append(float((low_rank.expand(p_hat, q_mean) - message).norm()) / best)
        basis = low_rank.next_basis(q_mean, low_rank, f"{SEED}{turn}")
    assert errors[0] > 1.3
    assert errors[-1] < 1.02


def own_of(low_rank, p_hat, q_own, counted):
    """What is taken out of a message, [n], of which only these slices of phase 1 counted."""
    left, q_counted = torch.zeros(LAYOUT.numel), torch.zeros_like(q_own)
    for part in counted:
        q_counted[part] = q_own[part]
    low_rank.take_out(left, p_hat, q_counted)
    return -left


def test_own_contributions_weighted_are_the_average():
    low_rank = LowRank(LAYOUT, RANKS)
    weights = torch.tensor([0.5, 0.3, 0.2])
    messages = [message_of(LAYOUT, seed) for seed in range(3)]
    basis = low_rank.initial_basis(SEED)
    everywhere = [slice(0, low_rank.q_numel)]
    projected = [coded(low_rank.project(message, basis), 4) for message in messages]
    p_mean = sum((w * p for w, p in zip(weights, projected, strict=True)), torch.zeros(()))
    p_hat = low_rank.orthonormal(coded(p_mean, 4, parts=3))
    sent = [coded(low_rank.contract(message, p_hat), 4) for message in messages]
    q_mean = sum((w * q for w, q in zip(weights, sent, strict=True)), torch.zeros(()))
    own = [own_of(low_rank, p_hat, q, everywhere) for q in sent]
    weighted = sum((w * c for w, c in zip(weights, own, strict=True)), torch.zeros(()))
    scale = weighted.abs().max()
    # without the second code they are equal, with it as far apart as that code's error
    assert (low_rank.expand(p_hat, q_mean) - weighted).abs().max() < 1e-5 * scale
    q_coded = coded(q_mean, 4, parts=3)
    error = (low_rank.expand(p_hat, q_coded) - weighted).norm()
    assert 0 < error < 1.01 * (q_coded - q_mean).norm()


def test_an_own_contribution_is_zero_where_it_did_not_count():
    low_rank = LowRank(LAYOUT, RANKS)
    message = message_of(LAYOUT)
    p_hat = low_rank.orthonormal(low_rank.project(message, low_rank.initial_basis(SEED)))
    q_own = low_rank.contract(message, p_hat)
    # the border lies inside the first matrix's factor, one more inside the second one's
    counted = [slice(448, 1472)]
    kept = torch.zeros_like(q_own)
    kept[counted[0]] = q_own[counted[0]]
    own = own_of(low_rank, p_hat, q_own, counted)
    assert torch.allclose(own, low_rank.expand(p_hat, kept), atol=1e-5)
    assert not torch.allclose(own, low_rank.expand(p_hat, q_own), atol=1e-2)
    assert LAYOUT.view(own)["norm"].any()
    assert not LAYOUT.view(own)["small"].any()
    # what is untouched by the left-out slices is there in full
    left_out = [slice(0, 448), slice(1472, low_rank.q_numel)]
    whole = own_of(low_rank, p_hat, q_own, [slice(0, low_rank.q_numel)])
    touched = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for part in low_rank.touched(left_out):
        touched[part] = True
    assert torch.equal(own[~touched], whole[~touched])


def test_directions_are_orthonormal_multiples_of_a_unit():
    low_rank = LowRank(LAYOUT, RANKS)
    p_hat = low_rank.orthonormal(normal(low_rank.p_numel) * 1e-9)
    assert torch.equal(p_hat * 2**14, (p_hat * 2**14).round())
    for matrix in low_rank.factored:
        products = matrix.p(p_hat).double() @ matrix.p(p_hat).double().T
        assert (products - torch.eye(matrix.rank)).abs().max() < 1e-3


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_borders_inside_factors_leave_the_average_exact(parts: int):
    low_rank = LowRank(LAYOUT, RANKS)
    message = message_of(LAYOUT)
    LAYOUT.view(message)["w"].mul_(1e-3)
    p_hat = low_rank.orthonormal(low_rank.project(message, low_rank.initial_basis(SEED)))
    q_mean = coded(low_rank.contract(message, p_hat), 4, parts)
    average = LAYOUT.view(low_rank.expand(p_hat, q_mean))
    for matrix, name in zip(low_rank.factored, ("w", "heads"), strict=True):
        expected = matrix.p(p_hat).double().T @ matrix.q(q_mean).double()
        assert torch.equal(average[name].view(matrix.rows, matrix.cols), expected.float())


def test_a_device_gives_the_same_projections():
    low_rank = LowRank(LAYOUT, RANKS)
    message, basis = message_of(LAYOUT), low_rank.initial_basis(SEED)
    p = low_rank.project(message, basis)
    assert torch.allclose(low_rank.project(message, basis, device="cpu"), p, atol=1e-5)
    p_hat = low_rank.orthonormal(p)
    q = low_rank.contract(message, p_hat)
    assert torch.allclose(low_rank.contract(message, p_hat, device="cpu"), q, atol=1e-5)


def test_a_message_of_zeros_averages_to_zeros_and_draws_a_new_basis():
    low_rank = LowRank(LAYOUT, RANKS)
    message = torch.zeros(LAYOUT.numel)
    p_hat = low_rank.orthonormal(low_rank.project(message, low_rank.initial_basis(SEED)))
    q_mean = low_rank.contract(message, p_hat)
    assert not p_hat.any()
    assert not low_rank.expand(p_hat, q_mean).any()
    assert low_rank.needed(q_mean, 0.95) == (0, 0, 0, 0, 0)
    following = low_rank.next_basis(q_mean, low_rank, "other")
    assert torch.equal(following, low_rank.initial_basis("other"))


# ranks and bases


def test_needed_counts_the_largest_columns():
    low_rank = LowRank(LAYOUT, RANKS)
    q_mean = torch.zeros(low_rank.q_numel)
    q_mean += 5  # of no account outside the factors
    first, second = low_rank.factored
    first.q(q_mean).zero_()
    first.q(q_mean)[:, 3] = torch.tensor([1.0, 3, 0, 2, 0, 0, 1, 1])  # squares 9 4 1 1 1 of 16
    second.q(q_mean).copy_(torch.eye(5, 70))
    assert low_rank.needed(q_mean, 9 / 16)[0] == 1
    assert low_rank.needed(q_mean, 0.57)[0] == 2
    assert low_rank.needed(q_mean, 13 / 16)[0] == 2
    assert low_rank.needed(q_mean, 0.95) == (5, 0, 5, 0, 0)
    assert low_rank.needed(q_mean, 1.0) == (5, 0, 5, 0, 0)
    with pytest.raises(ValueError, match="energy"):
        low_rank.needed(q_mean, 0.0)


def gram(basis: Tensor, low_rank: LowRank) -> list[Tensor]:
    return [m.basis(basis).double() @ m.basis(basis).double().T for m in low_rank.factored]


def assert_orthonormal(basis: Tensor, low_rank: LowRank):
    for products in gram(basis, low_rank):
        assert (products - torch.eye(len(products))).abs().max() < 1e-6


def test_an_initial_basis_depends_on_seed_and_tensor_alone():
    low_rank = LowRank(LAYOUT, RANKS)
    basis = low_rank.initial_basis(SEED)
    assert_orthonormal(basis, low_rank)
    assert torch.equal(basis, low_rank.initial_basis(SEED))
    assert not torch.equal(basis, low_rank.initial_basis("run/0/2"))
    alone = LowRank(FlatLayout.of([("heads", (3, 1, 30, 70))]), [5])
    second = low_rank.factored[1]
    assert torch.equal(second.basis(basis).reshape(-1), alone.initial_basis(SEED)[:350])
    twins = LowRank(FlatLayout.of([("a", (9, 9)), ("b", (9, 9))]), [3, 3])
    one, other = (matrix.basis(twins.initial_basis(SEED)) for matrix in twins.factored)
    assert not torch.equal(one, other)


def test_the_initial_basis_is_pinned():
    # a change here splits a swarm of mixed versions
    low_rank = LowRank(FlatLayout.of([("w", (8, 9))]), [2])
    expected = "d6a22bbe9f461ec5fe0af2b26792f86da177156630712d0a77e0ffb7e5bbc711"
    assert digest(low_rank.initial_basis(SEED)) == expected


def test_draws_look_normal():
    low_rank = LowRank(FlatLayout.of([("w", (4096, 4096))]), [1])
    values = low_rank.initial_basis(SEED) * 64
    assert abs(float(values.mean())) < 0.05
    assert abs(float((values**4).mean()) - 2.7) < 0.2  # 3 of a normal one, 1.8 of a uniform one


def test_a_shrinking_rank_keeps_the_largest_columns_and_a_growing_one_draws_the_rest():
    layout = FlatLayout.of([("w", (40, 60))])
    before = LowRank(layout, [4])
    q_mean = torch.zeros(before.q_numel)
    before.factored[0].q(q_mean).copy_(
        torch.diag(torch.tensor([2.0, 5, 2, 7]))[:, :4] @ torch.eye(4, 60)
    )
    smaller = LowRank(layout, [3])
    kept = smaller.factored[0].basis(before.next_basis(q_mean, smaller, SEED))
    assert torch.equal(kept, torch.eye(60)[[3, 1, 0]])  # of equals the lower index
    larger = LowRank(layout, [6])
    basis = before.next_basis(q_mean, larger, SEED)
    assert_orthonormal(basis, larger)
    assert torch.equal(larger.factored[0].basis(basis)[:4], torch.eye(60)[[3, 1, 0, 2]])


def test_a_tensor_newly_factored_starts_as_in_an_initial_basis():
    before, after = LowRank(LAYOUT, (8, 0, 0, 0, 0)), LowRank(LAYOUT, RANKS)
    basis = before.next_basis(normal(before.q_numel), after, SEED)
    matrix = after.factored[1]
    assert torch.equal(matrix.basis(basis), matrix.basis(after.initial_basis(SEED)))


def test_zero_and_dependent_columns_are_drawn_anew():
    layout = FlatLayout.of([("w", (40, 60))])
    low_rank = LowRank(layout, [5])
    q_mean = torch.zeros(low_rank.q_numel)
    rows = low_rank.factored[0].q(q_mean)
    rows[:] = normal(300).view(5, 60)
    rows[1] = 0
    rows[2] = 2 * rows[0]
    basis = low_rank.next_basis(q_mean, low_rank, SEED)
    assert_orthonormal(basis, low_rank)
    other = low_rank.next_basis(q_mean, low_rank, "other")
    same = [
        torch.allclose(a, b)
        for a, b in zip(
            low_rank.factored[0].basis(basis), low_rank.factored[0].basis(other), strict=True
        )
    ]
    assert same.count(False) >= 2
    span = low_rank.factored[0].basis(basis)
    for row in rows[[0, 3, 4]]:
        assert (row - (row @ span.T) @ span).norm() < 1e-5 * row.norm()


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_a_full_basis_stays_full(size: int):
    layout = FlatLayout.of([("w", (size, size))])
    low_rank = LowRank(layout, [size])
    basis = low_rank.initial_basis(SEED)
    assert_orthonormal(basis, low_rank)
    q_mean = torch.zeros(low_rank.q_numel)
    q_mean[: size * size] = torch.eye(size).view(-1)
    low_rank.factored[0].q(q_mean)[-1] = 0
    assert_orthonormal(low_rank.next_basis(q_mean, low_rank, SEED), low_rank)


def test_the_ranks_that_follow_are_for_the_same_layout():
    low_rank = LowRank(LAYOUT, RANKS)
    other = LowRank(FlatLayout.of([("w", (9, 9))]), [1])
    with pytest.raises(ValueError, match="layout"):
        low_rank.next_basis(torch.zeros(low_rank.q_numel), other, SEED)


# equal bytes


def agreed_digest() -> str:
    """Everything that peers must agree on, from means that no fp32 product touched."""
    layout = FlatLayout.of([("w", (300, 500)), ("norm", (70,)), ("v", (64, 333))])
    low_rank, following = LowRank(layout, (33, 0, 16)), LowRank(layout, (40, 0, 9))
    p_mean = coded(low_rank_vector(low_rank.p_numel), 4, parts=3)
    q_mean = coded(low_rank_vector(low_rank.q_numel), 8, parts=3)
    p_hat = low_rank.orthonormal(p_mean)
    return digest(
        p_hat,
        low_rank.expand(p_hat, q_mean),
        low_rank.next_basis(q_mean, following, SEED),
        low_rank.initial_basis(SEED),
        torch.tensor(low_rank.needed(q_mean, 0.9)),
    )


def low_rank_vector(numel: int) -> Tensor:
    """Values from a hash, of a magnitude that falls along the vector."""
    raw = hashlib.shake_256(b"values").digest(2 * numel)
    values = torch.frombuffer(bytearray(raw), dtype=torch.int16).float() * 2.0**-15
    return values * 2.0 ** -(torch.arange(numel) * 8 // numel)


def test_threads_change_no_byte():
    threads = torch.get_num_threads()
    digests: set[str] = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            digests.add(agreed_digest())
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == 1


PLAIN_NUMPY = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX512_SKX AVX512F AVX2 FMA3"  # old names too


@pytest.mark.parametrize(
    ("torch_level", "mkl_level", "numpy_without"),
    sweep([("default", "SSE4_2", PLAIN_NUMPY), ("avx2", "AVX2", "X86_V4 AVX512_SKX")]),
)
def test_other_instructions_change_no_byte(torch_level: str, mkl_level: str, numpy_without: str):
    levels = {
        "ATEN_CPU_CAPABILITY": torch_level,
        "MKL_ENABLE_INSTRUCTIONS": mkl_level,
        "NPY_DISABLE_CPU_FEATURES": numpy_without,
    }
    code = "import sys, runpy; print(runpy.run_path(sys.argv[1])['agreed_digest']())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, __file__],
        env={**os.environ, **levels, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == agreed_digest()
