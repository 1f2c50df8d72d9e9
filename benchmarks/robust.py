"""Centered clipping, which the product does not have, beside the rules that it has (`attacks.py`):
a point that moves five times to the mean of what lies within the median distance (BTARD,
arXiv 2106.11257).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.peer.rounds.robust import factors

STEPS = 5


def centered(parts: Tensor, weights: Sequence[float]) -> Tensor:
    """The average fp32 [n] of parts [m, n], whose members count these weights."""
    values = parts.double()
    ranked = values.sort(dim=0).values
    centre = (ranked[(len(values) - 1) // 2] + ranked[len(values) // 2]) / 2
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for _ in range(STEPS):
        away = values - centre
        by = factors("clip", [float(norm) for norm in away.norm(dim=1)], (), torch.Tensor)
        centre = centre + (shares * torch.tensor(by, dtype=torch.float64)) @ away
    return centre.float()
