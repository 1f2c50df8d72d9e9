"""The validation loss: the mean over all tokens, and the live weights stay what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dilocox.peer.training.data import evaluated_at_once, validation_loss
from dilocox.peer.training.unsent_progress import exchanged

VOCABULARY = 16


def test_the_loss_is_the_mean_over_every_predicted_token() -> None:
    windows = torch.randint(VOCABULARY, (13, 6), generator=torch.Generator().manual_seed(0))
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    loss = validation_loss(lambda ids: table[ids], windows)  # 13 windows: a batch is not full
    expected = F.cross_entropy(table[windows[:, :-1]].flatten(0, 1), windows[:, 1:].flatten())
    assert loss == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "at_once"),
    [
        ((16, 1024, 768), 8),
        ((4, 1024, 768), 4),
        ((4, 2048, 2048), 2),
        ((4, 2048, 5120), 1),  # 168 MB would be a minute of a line of 20 Mbit/s
        ((4, 4096, 4096), 1),
    ],
)
def test_a_batch_is_no_more_than_a_slow_line_carries(
    shape: tuple[int, int, int], at_once: int
) -> None:
    assert evaluated_at_once(shape) == at_once


def test_no_gradient_is_kept() -> None:
    weight = torch.ones(VOCABULARY, VOCABULARY, requires_grad=True)
    seen: list[bool] = []

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        logits = weight[ids]
        seen.append(logits.requires_grad)
        return logits

    validation_loss(logits_of, torch.zeros(2, 3, dtype=torch.int64))
    assert seen == [False]


def test_the_live_weights_come_back_whatever_happens_meanwhile() -> None:
    live, other = torch.arange(4.0), torch.ones(4)
    view = live[1:3]
    with exchanged(live, other):
        assert torch.equal(view, torch.ones(2))
    assert torch.equal(live, torch.arange(4.0))
    with pytest.raises(KeyError), exchanged(live, other):
        raise KeyError
    assert torch.equal(live, torch.arange(4.0))
    assert torch.equal(other, torch.ones(4))
