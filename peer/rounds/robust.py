"""How far a reducer believes each member: nobody is to move an average alone, or backwards. The
rules alone; shares.py has the parts that they judge.

    gate  parts are left out that go against the coordinate-wise median, by a quarter of the cosine
          with which a usual one goes along it; of the others those longer than the median one are
          shortened to it. The default.
    clip  parts longer than the median one are shortened to it, wherever they go.
    none  everybody is believed.

A member that sends ten times its update with the sign flipped would turn a run around; with it one
of eight members costs nothing that can be measured, and two of eight little (docs/results.md).
Gradient clipping alone bounds how far a liar goes, not where to; a median alone leans one way where
members differ. Honest members of other data go across the others, by chance a little against them:
so the quarter, which is all that a liar that knows it can take back of what one member gives. A
member left out of a part keeps it in its residual, like one whose part came too late.

The voters (standing.py) judge the members, by their median and their norms, or a crowd of fresh
keys would be the median. Of two and three voters nobody can say which one lies: for them `gate` is
`clip`, and another member that goes against them is left out all the same. Each reducer judges its
part by itself, each row of a large group its own, and each phase.

Another row's mean that is more than twice as long as one's own is shortened to that: it comes from
one member, and one of any length would leave nothing that could be encoded.

With the gate the members judge the reducers, too (`not_of_ours`): a mean that holds one's own
values lies along them, and is not much longer beside them than the other reducers' means. A member
that finds one which does not votes against the record and names its reducer; where half of its
voters do, the attempt is repeated without it. What a reducer adds that is no longer than the mean
itself is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeVar

import torch
from torch import Tensor

from dilocox.dht.manifest_sections import RobustRule

LEAST_GATED = 4  # voters: of three, two would leave out the third
AGAINST = 0.25  # of the median cosine; a member that flips its sign is at minus one times it
LONGEST_ROW = 2.0  # times one's own row's mean
MOST_LONGER = 4.0  # than the other means, each beside one's own values there
CHANCE = 3.0  # deviations: what lies along something by less does so by chance
CLEAR = 4.0  # times chance, that one's own values alone make a mean lie along them

T = TypeVar("T")


def factors(
    rule: RobustRule,
    norms: Sequence[float],
    votes: Sequence[bool],
    along: Callable[[list[int]], Tensor],
) -> list[float]:
    """By what to multiply each member's part; 0: it is left out.

    norms: of the parts, in L2. votes: whether each part's member votes; where none does, all are
    judges. along: the products of each part with the coordinate-wise median of the parts at these
    places, [m]; called where they are needed.
    """
    if rule == "none" or len(norms) == 1:
        return [1.0] * len(norms)
    judges = [place for place, each in enumerate(votes) if each] or list(range(len(norms)))
    believed = [True] * len(norms)
    if rule == "gate" and (len(judges) >= LEAST_GATED or len(judges) < len(norms)):
        # a part of zeros does no harm
        cosines = [
            float(a) / norm if norm else 0.0 for a, norm in zip(along(judges), norms, strict=True)
        ]
        least = -AGAINST * max(0.0, median(cosines[place] for place in judges))
        goes = [each > least or norm == 0 for each, norm in zip(cosines, norms, strict=True)]
        # of few judges none is left out; nor where all go against the others: there is no way
        few = len(judges) < LEAST_GATED or not any(goes[place] for place in judges)
        believed = [each or (few and place in judges) for place, each in enumerate(goes)]
    limit = median(norms[place] for place in judges if believed[place])
    return [
        (limit / norm if norm > limit else 1.0) if kept else 0.0
        for norm, kept in zip(norms, believed, strict=True)
    ]


def row_factors(rule: RobustRule, norms: Sequence[float], own: int | None) -> list[float]:
    """By what to multiply each row's mean of a share. norms: theirs, in L2. own: the place of one's
    own row's; None where it has none.
    """
    some = [norm for norm in norms if norm]
    if rule == "none" or not some:
        return [1.0] * len(norms)
    usual = (norms[own] if own is not None else 0.0) or median_low(some)
    return [min(1.0, LONGEST_ROW * usual / norm) if norm else 1.0 for norm in norms]


def along_median(values: Tensor, judges: list[int]) -> Tensor:
    """The products of each member's values with the judges' median, of a piece of a part: float64
    [m].

    values: [m, n]. judges: their rows. Of an even count the median is the middle of the two, or it
    leans one way.
    """
    ranked = values[judges].double().sort(dim=0).values
    count = len(judges)
    middle = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
    return values.double() @ middle


def weighted_sum(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Of a piece [m, n] of a part: fp32 [n], summed in float64 in the order of the members."""
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for row, weight in zip(values, weights, strict=True):
        total.add_(row.double(), alpha=weight)
    return total.float()


def in_order(found: Mapping[int, Tensor]) -> Tensor:
    """The sum over pieces in their order, whichever thread was first."""
    return torch.stack([found[start] for start in sorted(found)]).sum(dim=0)


@dataclass(frozen=True)
class Likeness:
    """A reducer's mean of a share beside the values that one member sent for it.

    cosine: between them. ratio: of the mean's norm to theirs. numel: values. weight: this member's
    share of the mean; 0 where it is not in it. members: those whose values are.
    """

    cosine: float
    ratio: float
    numel: int
    weight: float
    members: int


def likeness(mean: Tensor, own: Tensor, weight: float, members: int) -> Likeness | None:
    """How a decoded mean [n] and one's own values [n] compare; None where one of them is zero."""
    norm, own_norm = math.sqrt(float(mean @ mean)), math.sqrt(float(own @ own))
    if not norm or not own_norm:
        return None
    cosine = float(mean @ own) / norm / own_norm
    return Likeness(cosine, norm / own_norm, len(own), weight, members)


def not_of_ours(found: Mapping[T, Likeness]) -> set[T]:
    """The means that cannot be what they say, of those of one phase."""
    usual = median_low(each.ratio for each in found.values()) if found else 0.0
    return {
        name
        for name, each in found.items()
        if each.ratio > MOST_LONGER * usual or each.cosine < _least_along(each)
    }


def _least_along(each: Likeness) -> float:
    """The cosine below which a mean does not hold one's own values, or goes against them.

    With members that have nothing in common it would come from these alone; where they were
    shortened, no less than of equals. Those of other data may pull against them, in an embedding
    above all: so whatever is more than chance will do.
    """
    chance = CHANCE * each.numel**-0.5
    alone = min(each.weight / each.ratio, each.members**-0.5) if each.weight else 0.0
    return chance if alone > CLEAR * chance else -chance
