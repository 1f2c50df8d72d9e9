"""Gradients of stages beside those of a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def assert_gradients_equal(stages: Sequence[nn.Module], whole: nn.Module) -> None:
    """Bit by bit, under the names that transformers gives."""
    found = {name: each.grad for stage in stages for name, each in stage.named_parameters()}
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, each in whole.named_parameters():
        ours, theirs = found[name], each.grad
        assert ours is not None and theirs is not None, name
        assert torch.equal(ours, theirs), name
