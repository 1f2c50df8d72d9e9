"""Nothing that a peer learnt is lost or counted twice by error feedback."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.group_codec import GroupCodec
from dilocox.peer.training.merge import Residual

NUMEL = 8
# Multiples of 2^-10 within bounds: their sums are exact in float64.
deltas = st.lists(st.integers(-(2**20), 2**20), min_size=NUMEL, max_size=NUMEL).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float64) / 1024
)
outcomes = st.sampled_from(["committed", "part left out", "undone", "undone, then named"])


def coded(message: Tensor) -> Tensor:
    """A stand-in for a lossy codec, whose results are exact in float64."""
    return (message / 4).round() * 4


@given(st.lists(st.tuples(deltas, outcomes), max_size=12))
@settings(deadline=None)
def test_progress_is_conserved_exactly(schedule: list[tuple[Tensor, str]]):
    residual = Residual.zeros(NUMEL, torch.float64)
    sent, contributed = torch.zeros(2, NUMEL, dtype=torch.float64)
    for delta, outcome in schedule:
        message = residual.take(delta)
        assert torch.equal(sent + delta, contributed + residual.values + message)
        if outcome.startswith("undone"):
            residual.restore(message, delta)
            assert torch.equal(sent, contributed + residual.values)
            if outcome == "undone":
                continue
            residual.reopen(message, delta)
        contribution = coded(message)
        left_out = [slice(2, 5)] if outcome == "part left out" else []
        for part in left_out:
            contribution[part] = 0
        residual.settle(message, contribution, 1.0, left_out)
        sent += delta
        contributed += contribution
        assert torch.equal(sent, contributed + residual.values)


def test_settle_keeps_the_decayed_rest_and_all_of_it_in_a_part_left_out():
    residual = Residual(torch.zeros(4))
    message = residual.take(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    residual.settle(message, torch.tensor([0.0, 1.0, 1.0, 4.0]), 0.5, [slice(2, 3)])
    assert residual.values.tolist() == [0.5, 0.5, 2.0, 0.0]


def test_take_returns_a_message_of_its_own_and_empties_the_residual():
    residual = Residual(torch.tensor([1.0, 2.0]))
    delta = torch.tensor([10.0, 20.0])
    message = residual.take(delta)
    message += 5
    assert message.tolist() == [16.0, 27.0]
    assert delta.tolist() == [10.0, 20.0]
    assert residual.values.tolist() == [0.0, 0.0]


def test_undoing_a_send_puts_the_residual_back():
    residual = Residual(torch.tensor([1.0, -2.0]))
    delta = torch.tensor([0.5, 0.5])
    residual.restore(residual.take(delta), delta)
    assert residual.values.tolist() == [1.0, -2.0]
    residual.clear()
    assert residual.values.tolist() == [0.0, 0.0]


def test_error_feedback_delivers_what_4_bits_alone_would_lose():
    codec, residual, rounds = GroupCodec(4), Residual.zeros(640), 200
    delta = torch.randn(640, generator=torch.Generator().manual_seed(0))
    with_feedback, without = torch.zeros(2, 640)
    for _ in range(rounds):
        message = residual.take(delta)
        contribution = codec.decode(codec.encode(message), 640)
        residual.settle(message, contribution, 1.0)
        with_feedback += contribution
        without += codec.decode(codec.encode(delta), 640)
    step = delta.abs().max() / 7
    assert (without - rounds * delta).abs().max() > 20 * step
    assert (with_feedback - rounds * delta).abs().max() < step


def test_a_residual_must_be_a_flat_vector_of_floats():
    with pytest.raises(ValueError, match="pass a flat vector"):
        Residual(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="pass a flat vector"):
        Residual(torch.zeros(2, dtype=torch.int64))
