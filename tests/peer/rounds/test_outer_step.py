"""The outer step against the plain loop, bit for bit, and the name of an anchor."""

import hashlib
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from dilocox.peer.rounds import outer_step
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256


def plain_loop(
    step: OuterStep, anchor: Tensor, buffer: Tensor, average: Tensor
) -> tuple[list[float], list[float]]:
    """One value after the other, each operation rounded once, with numpy's scalars."""
    kind = {torch.float32: np.float32, torch.float64: np.float64}[anchor.dtype]
    mu, learning_rate = kind(step.momentum), kind(step.learning_rate)
    anchors: list[float] = []
    buffers: list[float] = []
    for a, before, g in zip(anchor.numpy(), buffer.numpy(), average.numpy(), strict=True):
        buf = kind(mu * before) + g
        direction = g + kind(mu * buf)
        anchors.append(a - kind(learning_rate * direction))
        buffers.append(buf)
    return anchors, buffers


def vectors(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(scale: float) -> Tensor:
        return (torch.randn(numel, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return draw(1.0), draw(1e-3), draw(3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_plain_loop_bit_for_bit_over_ten_steps(dtype: torch.dtype) -> None:
    step = OuterStep(learning_rate=0.7, momentum=0.9)
    anchor, buffer, average = vectors(257, dtype)
    for _ in range(10):
        expected_anchor, expected_buffer = plain_loop(step, anchor, buffer, average)
        step.apply(anchor, buffer, average, anchor, buffer)
        assert anchor.tolist() == [float(value) for value in expected_anchor]
        assert buffer.tolist() == [float(value) for value in expected_buffer]
        average = average * -0.9


def test_without_momentum_it_is_plain_sgd_and_the_buffer_holds_the_average() -> None:
    anchor, buffer, average = vectors(64)
    out_anchor, out_buffer = torch.empty(64), torch.empty(64)
    OuterStep(0.5, 0.0).apply(anchor, buffer, average, out_anchor, out_buffer)
    assert torch.equal(out_anchor, anchor - 0.5 * average)
    assert torch.equal(out_buffer, average)


def test_a_vector_of_many_chunks_is_stepped_as_a_whole_and_inputs_beside_stay_as_they_were() -> (
    None
):
    numel = 3 * outer_step.CHUNK_VALUES + 7
    inputs = anchor, buffer, average = vectors(numel)
    before = [tensor.clone() for tensor in inputs]
    out_anchor, out_buffer = torch.empty(numel), torch.empty(numel)
    OuterStep(0.7, 0.9).apply(anchor, buffer, average, out_anchor, out_buffer)
    whole = buffer * torch.tensor(0.9) + average
    assert torch.equal(out_buffer, whole)
    direction = average + whole * torch.tensor(0.9)
    assert torch.equal(out_anchor, anchor - direction * torch.tensor(0.7))
    assert all(map(torch.equal, inputs, before))


def test_the_next_anchor_may_take_the_place_of_the_average() -> None:
    anchor, buffer, average = vectors(2 * outer_step.CHUNK_VALUES + 7)
    expected, expected_buffer = torch.empty_like(anchor), torch.empty_like(anchor)
    OuterStep(0.7, 0.9).apply(anchor, buffer, average, expected, expected_buffer)
    OuterStep(0.7, 0.9).apply(anchor, buffer, average, average, buffer)
    assert torch.equal(average, expected)
    assert torch.equal(buffer, expected_buffer)


def test_refuses_vectors_that_do_not_fit() -> None:
    step = OuterStep(0.7, 0.5)
    v = torch.zeros(8)
    for wrong in (torch.zeros(9), torch.zeros(8, dtype=torch.float64), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="one length and dtype"):
            step.apply(v, torch.zeros(8), wrong, torch.zeros(8), torch.zeros(8))


def test_refuses_an_output_that_overwrites_what_is_still_read() -> None:
    step = OuterStep(0.7, 0.5)
    anchor, buffer, average = (torch.zeros(8) for _ in range(3))
    for outputs, name in (
        ((anchor, average), "out_momentum"),
        ((buffer, torch.zeros(8)), "out_anchor"),
        ((torch.zeros(8), anchor), "out_momentum"),
    ):
        with pytest.raises(ValueError, match=name):
            step.apply(anchor, buffer, average, *outputs)


@pytest.mark.parametrize("learning_rate, momentum", [(0.0, 0.5), (float("nan"), 0.5), (0.7, 1.0)])
def test_refuses_coefficients_out_of_range(learning_rate: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="outer"):
        OuterStep(learning_rate, momentum)


def test_sha256_is_that_of_the_little_endian_values() -> None:
    values = [1.0, -0.5, 0.0, 3.25e-5]
    expected = hashlib.sha256(struct.pack("<4f", *values)).hexdigest()
    assert anchor_sha256(torch.tensor(values)) == expected


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4), torch.zeros(8)[::2]])
def test_sha256_refuses_what_is_no_flat_vector(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="flat CPU vector"):
        anchor_sha256(wrong)
