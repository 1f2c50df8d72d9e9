"""Nothing that a peer learnt is lost or counted twice by error feedback."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilocox.compression.group_quantization import GroupCodec
from dilocox.peer.training.merge import Remainder, Residual


def test_what_was_left_out_is_copied_to_nowhere_else() -> None:
    """A peer whose parts came late is left out of most: a copy of them is a vector more."""

    class Watched(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
            return made

    vector, values = torch.zeros(1000), torch.arange(1000.0)
    known = {vector.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()}
    left_out = [slice(300, 990), slice(10, 200), slice(150, 310)]
    residual = Residual(vector)
    with Watched() as watched:
        residual.settle(Remainder(values, left_out=left_out), 0.5)
    expected = values * 0.5
    expected[10:990] = values[10:990]
    assert torch.equal(residual.values, expected) and watched.largest == 0


def test_settle_keeps_the_decayed_rest_and_all_of_it_in_a_part_left_out():
    residual = Residual(torch.zeros(4))
    message = residual.take(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    message -= torch.tensor([0.0, 1.0, 1.0, 4.0])
    residual.settle(Remainder(message, [slice(2, 3)]), 0.5)
    assert residual.values.tolist() == [0.5, 0.5, 2.0, 0.0]


def test_residual_and_message_share_one_vector_and_nothing_is_allocated_beside_it():
    vector = torch.full((2,), float("nan"))  # whatever was there before
    residual = Residual(vector)
    assert residual.values.tolist() == [0, 0]
    residual.values = torch.tensor([1.0, 2.0])
    message = residual.take(torch.tensor([10.0, 20.0]))
    assert residual.empty and residual.norm == 0
    assert message.tolist() == [11.0, 22.0]
    assert residual.values.tolist() == [0.0, 0.0]
    message -= torch.tensor([10.0, 20.0])
    residual.settle(Remainder(message), 0.5)
    assert residual.values.tolist() == [0.5, 1.0]
    assert message.data_ptr() == residual.values.data_ptr() == vector.data_ptr()


def test_a_send_that_is_undone_gives_back_what_it_took():
    residual, delta = Residual(torch.zeros(2)), torch.tensor([10.0, 20.0])
    residual.values = torch.tensor([1.0, 2.0])
    residual.take(delta)
    residual.give_back(delta)
    assert residual.values.tolist() == [1.0, 2.0]


def test_error_feedback_delivers_what_4_bits_alone_would_lose():
    codec, residual, rounds = GroupCodec(4), Residual(torch.zeros(640)), 200
    delta = torch.randn(640, generator=torch.Generator().manual_seed(0))
    with_feedback, without = torch.zeros(2, 640)
    for _ in range(rounds):
        message = residual.take(delta)
        contribution = codec.decode(codec.encode(message), 640)
        residual.settle(Remainder(message - contribution), 1.0)
        with_feedback += contribution
        without += codec.decode(codec.encode(delta), 640)
    step = delta.abs().max() / 7
    assert (without - rounds * delta).abs().max() > 20 * step
    assert (with_feedback - rounds * delta).abs().max() < step
