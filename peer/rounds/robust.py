"""How far a reducer believes each member: nobody is to move an average alone, or backwards. The
rules alone; shares.py has the parts that they judge.

    gate      parts are left out that go against the coordinate-wise median, by a quarter of the
              cosine with which a usual one goes along it; the others are averaged as by `centered`.
              The default.
    centered  nobody is left out; what lies further from the mean than the voters' median distance
              is drawn to it (centered clipping, arXiv 2012.10333), in five steps from the median.
    clip      parts longer than the median one are shortened to it, wherever they go.
    none      everybody is believed.

Who made more steps than most went further, in its way and in its noise, and is no liar for that.
So each has a pace, the root of the tokens that it states over the voters' median ones, as noise
grows. It is expected at its pace times the mean, and may be its pace times as far from there as
another; a length is taken over the pace, too. But a pace is only stated: what a member weighs for
its tokens and how far away it may be count together, and are no more than of two usual voters. So
who makes more than 1.6 times the usual steps is drawn back a little, whoever it is.

A member that sends ten times its update with the sign flipped would turn a run around; with the
gate one of eight members costs nothing that can be measured, and two of eight little
(docs/results.md); half of the voters can do anything. Shortening alone bounds how far a liar goes,
not where to; a median alone leans one way where members differ. Honest members of other data go
across the others, by chance a little against them: so the quarter, which is all that a liar that
knows it can take back of what one member gives. A member left out of a part keeps it in its
residual, like one whose part came too late.

The voters (standing.py) judge the members, by their median and their distances, or a crowd of fresh
keys would be the median. Of two and three voters nobody can say which one lies: for them `gate` and
`centered` are `clip`, and by the gate another member that goes against them is left out all the
same. Each reducer judges its part by itself, each row of a large group its own, and each phase.

Another row's mean that is more than twice as long as one's own is shortened to that: it comes from
one member, and one of any length would leave nothing that could be encoded.

With `gate` and `centered` the members judge the reducers, too (`not_of_ours`): a mean that holds
one's own values lies along them, at least as other reducers' means usually do, and is not much
longer beside them than these. A member that finds one which does not votes against the record and
names its reducer; where half of its voters do, the attempt is repeated without it. What a reducer
adds that is no longer than the mean itself is not found.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import TypeVar

import torch
from torch import Tensor

from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.standing import MOST_WEIGHT

JUDGED: tuple[RobustRule, ...] = ("gate", "centered")  # with these members judge reducers
LEAST_GATED = 4  # voters: of three, two would leave out the third
STEPS = 5  # of centered clipping
ROUNDING = 1e-6  # of a part's length: how far it may seem to be from itself
AGAINST = 0.25  # of the median cosine; a member that flips its sign is at minus one times it
LONGEST_ROW = 2.0  # times one's own row's mean
MOST_LONGER = 4.0  # than the other means, each beside one's own values there
CHANCE = 3.0  # deviations: what lies along something by less does so by chance
CLEAR = 4.0  # times chance, that one's own values alone make a mean lie along them
FEWEST = 1 / 8  # of the voters' median tokens: who made less is expected no nearer

T = TypeVar("T")


@dataclass(frozen=True)
class Belief:
    """How much of each member's part is in a mean.

    believed: the places of the members in it. parts: by what to multiply each member's part; 0
    where it is left out. middle: by what to multiply the judges' median.
    """

    believed: list[int]
    parts: list[float]
    middle: float = 0.0


def belief(
    rule: RobustRule,
    weights: Sequence[float],
    tokens: Sequence[float],
    norms: Sequence[float],
    votes: Sequence[bool],
    products: Callable[[list[int]], Tensor],
) -> Belief:
    """Of which parts a mean is made.

    weights: what each member counts. tokens: from which it made its part, as it says. norms: of the
    parts, in L2. votes: whether each part's member votes; where none does, all are judges.
    products: of the parts and the coordinate-wise median of those at these places with each other,
    float64 [m + 1, m + 1], the median last; called where they are needed.
    """
    everybody = list(range(len(norms)))
    if rule == "none" or len(norms) == 1:
        return _shortened(everybody, weights, [1.0] * len(norms))
    judges, believed = [n for n in everybody if votes[n]] or everybody, everybody
    pace = paces(tokens, judges)
    enough = len(judges) >= LEAST_GATED
    if rule in JUDGED and (enough or (rule == "gate" and len(judges) < len(norms))):
        found = products(judges)
        if rule == "gate":
            goes = _along(_floats(found[:-1, -1]), norms, judges)
            # of few judges none is left out; nor where all go against the others: there is no way
            enough = enough and any(goes[n] for n in judges)
            believed = [n for n in everybody if goes[n] or (n in judges and not enough)]
        if enough:
            return _centered(believed, weights, judges, found, pace)
    lengths = [norm / each for norm, each in zip(norms, pace, strict=True)]
    limit = median(lengths[n] for n in judges if n in believed)
    return _shortened(believed, weights, _drawn(limit, lengths, [*map(_excess, pace)]))


def paces(tokens: Sequence[float], judges: Sequence[int]) -> list[float]:
    """How far each is expected to have come, beside a usual one of these judges."""
    usual = median(tokens[n] for n in judges)
    return [math.sqrt(min(MOST_WEIGHT, max(FEWEST, each / usual))) for each in tokens]


def _excess(pace: float) -> float:
    """By how many times a member of this pace would move a mean further than two usual ones, if it
    were as far away as its pace lets it be: it weighs its tokens, the square of its pace. Of what
    else its weight is made, probation, it has stated nothing.
    """
    return max(1.0, pace * pace * pace / MOST_WEIGHT)


def _along(along: Sequence[float], norms: Sequence[float], judges: Sequence[int]) -> list[bool]:
    """Whether each part goes along the median, or not much against it; one of zeros does no harm.

    along: their products with it.
    """
    cosines = [each / norm if norm else 0.0 for each, norm in zip(along, norms, strict=True)]
    least = -AGAINST * max(0.0, median(cosines[n] for n in judges))
    return [each > least or norm == 0 for each, norm in zip(cosines, norms, strict=True)]


def _shortened(believed: list[int], weights: Sequence[float], by: Sequence[float]) -> Belief:
    tokens = sum(weights[n] for n in believed)
    parts = [each / tokens * by[n] if n in believed else 0.0 for n, each in enumerate(weights)]
    return Belief([n for n in believed if by[n]], parts)


def _drawn(limit: float, lengths: Sequence[float], excess: Sequence[float]) -> list[float]:
    """By what to multiply each, that none is longer than the limit over its excess."""
    most = [limit / each for each in excess]
    return [
        each / length if length > each else 1.0 for length, each in zip(lengths, most, strict=True)
    ]


def _centered(
    believed: list[int],
    weights: Sequence[float],
    judges: Sequence[int],
    products: Tensor,
    paces: Sequence[float],
) -> Belief:
    """Centered clipping of the believed parts, in their products alone: a point that begins at the
    median moves five times to the mean of them, in which each is drawn to its pace times the point
    as far as it is further from there than its pace times the limit, over its excess. The limit is
    the judges' median distance, each over its pace.

    Of all judges, and no more than at the step before: what is left out, or a point that follows
    liars, must not make it larger.
    """
    share = torch.zeros(len(weights), dtype=torch.float64)
    share[believed] = torch.tensor(weights, dtype=torch.float64)[believed]
    share /= share.sum()
    pace, excess = torch.tensor(paces, dtype=torch.float64), [*map(_excess, paces)]
    pace /= share @ pace  # or the mean of all would not be where the point stays
    squares = products.diag()[:-1]
    rounding = ROUNDING * median(_floats(squares[judges].sqrt()))
    point = torch.zeros(len(products), dtype=torch.float64)
    point[-1] = 1.0
    limit, by = math.inf, list[float]()
    for _ in range(STEPS):
        along = products @ point
        apart = squares - 2 * pace * along[:-1] + pace.square() * (point @ along)
        away = _floats(apart.clamp(min=0.0).sqrt() / pace)
        limit = min(limit, median(away[n] for n in judges) + rounding)
        by = _drawn(limit, away, excess)
        moved = share * torch.tensor(by, dtype=torch.float64)
        point *= 1 - moved @ pace
        point[:-1] += moved
    *parts, middle = _floats(point)
    return Belief([n for n in believed if by[n]], parts, middle)


def _floats(values: Tensor) -> list[float]:
    return [float(each) for each in values]


def row_factors(rule: RobustRule, norms: Sequence[float], own: int | None) -> list[float]:
    """By what to multiply each row's mean of a share. norms: theirs, in L2. own: the place of one's
    own row's; None where it has none.
    """
    some = [norm for norm in norms if norm]
    if rule == "none" or not some:
        return [1.0] * len(norms)
    usual = (norms[own] if own is not None else 0.0) or median_low(some)
    return [min(1.0, LONGEST_ROW * usual / norm) if norm else 1.0 for norm in norms]


def median_of(values: Tensor) -> Tensor:
    """Of each coordinate of a piece [m, n], fp32 [n]: of an even count the middle of the two, or it
    leans one way.
    """
    ranked, count = values.sort(dim=0).values, len(values)
    return ((ranked[(count - 1) // 2].double() + ranked[count // 2].double()) / 2).float()


def products_of(values: Tensor, middle: Tensor) -> Tensor:
    """What `belief` asks of one piece: values [m, n], their judges' median [n]."""
    together = torch.cat([values, middle[None]]).double()
    return together @ together.T


def weighted_sum(values: Tensor, middle: Tensor, how: Belief) -> Tensor:
    """Of a piece [m, n] of a part, and its judges' median [n]: fp32 [n], summed in float64 in the
    order of the members.
    """
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    if how.middle:  # where it was not asked for there is none
        total.add_(middle.double(), alpha=how.middle)
    for row, weight in zip(values, how.parts, strict=True):
        total.add_(row.double(), alpha=weight)
    return total.float()


class OrderedSum:
    """A sum over pieces in their order, whichever thread is first; those that are early wait."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self._next = 0
        self._early: dict[int, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def add(self, place: slice, value: Tensor) -> None:
        """Add what was found of a piece, all of one shape, float64."""
        with self._lock:
            self._early[place.start] = place.stop, value
            while (early := self._early.pop(self._next, None)) is not None:
                self._next, each = early
                self.total = self.total + each


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
    if not found:
        return set()
    longer = MOST_LONGER * median_low(each.ratio for each in found.values())
    usual = median_high(each.cosine for each in found.values())
    return {
        name
        for name, each in found.items()
        if each.ratio > longer or each.cosine < _least_along(each, usual)
    }


def _least_along(each: Likeness, usual: float) -> float:
    """The cosine below which a mean does not hold one's own values, or goes against them.

    With members that have nothing in common it would come from these alone; where they were
    shortened, no less than of equals. Those of other data may pull against them, in an embedding
    above all: so whatever is more than chance will do. And of a member that is unlike the others
    nearly nothing may be left by all of them: a mean is doubted only where `usual`, the cosine with
    those of the phase, is another one.
    """
    chance = CHANCE * each.numel**-0.5
    alone = min(each.weight / each.ratio, each.members**-0.5) if each.weight else 0.0
    if min(alone, usual) > CLEAR * chance:
        return chance
    return min(-chance, usual - CLEAR * chance)
