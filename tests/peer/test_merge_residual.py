"""Nothing that a peer learnt is lost or counted twice by error feedback."""

import torch

from dilocox.compression.group_codec import GroupCodec
from dilocox.peer.training.merge import Residual


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


def test_a_send_and_its_end_allocate_no_vector_beside_the_message():
    residual = Residual(torch.tensor([1.0, 2.0]))
    place = residual.values.data_ptr()
    message = residual.take(torch.tensor([10.0, 20.0]))
    assert residual.empty and residual.norm == 0
    assert message.data_ptr() == place
    residual.settle(message, torch.tensor([10.0, 20.0]), 0.5)
    assert residual.values.tolist() == [0.5, 1.0]
    assert residual.values.data_ptr() == place


def test_a_send_that_is_undone_and_counted_after_all_is_settled_once():
    residual, delta = Residual(torch.tensor([1.0, 2.0])), torch.tensor([10.0, 20.0])
    message = residual.take(delta)
    residual.give_back(message, delta)
    assert residual.values.tolist() == [1.0, 2.0]
    residual.values += 4.0  # of a send after it
    residual.take_out(message, delta)
    residual.settle(message, torch.tensor([10.0, 20.0]), 0.5)
    assert residual.values.tolist() == [4.5, 5.0]


def test_error_feedback_delivers_what_4_bits_alone_would_lose():
    codec, residual, rounds = GroupCodec(4), Residual(torch.zeros(640)), 200
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
