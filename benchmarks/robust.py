"""Rules by which a reducer averages the parts of members of which some may lie, to be compared.

    mean      the weighted mean, as the product has it
    clip      parts longer than the median one are shortened to it
    centered  a point that moves five times to the mean of what lies within the median distance
              (centered clipping; BTARD, arXiv 2106.11257)
    gate      parts are left out whose cosine with the coordinate-wise median is not positive; the
              rest are clipped to their median norm

All compute in float64 on decoded parts, so that what they say could stand in a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CENTERED_STEPS = 5


@dataclass(frozen=True)
class Judged:
    """What a rule makes of the parts of one reducer.

    average: fp32 [n]. factors: by which each member's part was multiplied, [m]; 0: left out.
    """

    average: Tensor
    factors: Tensor


Robust = Callable[[Tensor, Tensor], Judged]
"""Takes parts [m, n] float64, and the members' weights [m], which are positive."""


def mean(parts: Tensor, weights: Tensor) -> Judged:
    """Believe everybody."""
    return _averaged(parts, weights, torch.ones_like(weights))


def clip(parts: Tensor, weights: Tensor) -> Judged:
    """Believe everybody's direction."""
    return _averaged(parts, weights, _clipped(parts.norm(dim=1)))


def centered(parts: Tensor, weights: Tensor) -> Judged:
    """Believe what lies near."""
    centre = _median(parts)
    factors = torch.ones_like(weights)
    shares = (weights / weights.sum()).unsqueeze(1)
    for _ in range(CENTERED_STEPS):
        away = parts - centre
        factors = _clipped(away.norm(dim=1))
        centre = centre + (shares * factors.unsqueeze(1) * away).sum(dim=0)
    return Judged(centre.float(), factors)


def gate(parts: Tensor, weights: Tensor) -> Judged:
    """Believe who goes where most go, no further than most."""
    norms = parts.norm(dim=1)
    along = parts @ _median(parts)
    kept = (along > 0) | (norms == 0)  # who has nothing to say does no harm
    if not bool(kept.any()):
        return Judged(torch.zeros(parts.shape[1]), torch.zeros_like(weights))
    factors = torch.zeros_like(weights)
    factors[kept] = _clipped(norms[kept])
    return _averaged(parts, weights, factors, kept)


RULES: dict[str, Robust] = {"mean": mean, "clip": clip, "centered": centered, "gate": gate}


def _clipped(norms: Tensor) -> Tensor:
    """Factors that shorten to the median what is longer."""
    limit = _median(norms)
    return torch.where(norms > limit, limit / norms.clamp_min(1e-300), 1.0)


def _median(values: Tensor) -> Tensor:
    """Along the first dimension; of an even count the middle of the two, or it leans one way."""
    ranked = values.sort(dim=0).values
    return (ranked[(len(values) - 1) // 2] + ranked[len(values) // 2]) / 2


def _averaged(
    parts: Tensor, weights: Tensor, factors: Tensor, kept: Tensor | None = None
) -> Judged:
    held = weights if kept is None else weights * kept
    shares = held / held.sum() * factors
    return Judged((shares.unsqueeze(1) * parts).sum(dim=0).float(), factors)
