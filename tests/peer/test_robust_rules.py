"""The rules of averaging that benchmarks/attacks.py compares: whom each believes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.robust import RULES

WEIGHTS = torch.ones(8, dtype=torch.float64)


def parts(liar: float) -> Tensor:
    """Seven members that go one way, each with its own noise, and one that goes `liar` times it."""
    draw = torch.Generator().manual_seed(1)
    way = torch.randn(500, generator=draw, dtype=torch.float64)
    found = way + torch.randn(8, 500, generator=draw, dtype=torch.float64)
    found[0] = liar * way
    return found


def test_the_gate_leaves_out_who_goes_against_the_others_and_nobody_else() -> None:
    assert RULES["gate"](parts(-10.0), WEIGHTS).factors.gt(0).tolist() == [False] + [True] * 7
    assert RULES["gate"](parts(1.0), WEIGHTS).factors.gt(0).all()


def test_the_gate_believes_who_has_nothing_to_say() -> None:
    assert RULES["gate"](parts(0.0), WEIGHTS).factors[0] == 1.0


@pytest.mark.parametrize("name", ["clip", "centered", "gate"])
@pytest.mark.parametrize("liar", [-10.0, 10.0])
def test_one_liar_moves_the_average_little(name: str, liar: float) -> None:
    honest = RULES["mean"](parts(liar)[1:], WEIGHTS[1:]).average
    plain, judged = (RULES[rule](parts(liar), WEIGHTS).average for rule in ("mean", name))
    assert (judged - honest).norm() < 0.5 * (plain - honest).norm()


@pytest.mark.parametrize("name", list(RULES))
def test_members_that_agree_are_averaged_whatever_the_rule(name: str) -> None:
    alike = parts(1.0)[1:2].expand(8, -1)
    torch.testing.assert_close(RULES[name](alike, WEIGHTS).average, alike[0].float())
