"""What a round teaches the next ones: the ranks of the coming exchange and the H of a coming round.

Why: one rank for all matrices is too small for some and wasted on others, and an H that fits one
line starves another. How: each record carries the facts of the last rounds, its *window*; what
follows from them is a pure function, so every peer reads the same numbers in the record and
anybody can check them. (After the adaptive gradient compression of DiLoCoX, arXiv 2506.21263, which
judges one rank for all matrices by the mean over a window.)

Ranks. A round says of a matrix how many columns hold most of its energy, `needed`. Where that is
almost the whole rank it says only that more are needed: a basis shows no spectrum beyond itself.
So the median over the window decides, in which such a round counts as more than any number:
    almost the whole rank, also in the newest round:   grow by half
    under 7/10 of the rank, and not in the newest:     shrink to where it is 8/10, at most by half
    else:                                              stay
A smaller rank never shows a larger need for the same matrix. So a rank that has shrunk is used to
8/10 at most, does not grow again, and a spectrum that stands still brings a rank that does. Where
exchanges, with what is computed in them, take more than half of the longest round, none grows.

H. An exchange should end within half a round, and training stand still for less than a hundredth of
it (a send, a merge, whatever else a round costs once). So a round takes at least twice the exchange
and a hundred times the stall, in inner steps, medians over the window. H lies up to two fifths
above that, so that times that scatter do not move it; where it must move, it goes to the middle, by
at most half.

`RoundPlan` makes of these rules what a round's record says of the next ones: a pure function of the
record before and of what the members gathered and averaged, so all members write the same, and a
replay of the log finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.manifest import Manifest
from dilocox.peer.rounds.record import WINDOW, RoundFacts, RoundRecord, Times

_FULL_TENTHS = 9  # of a rank: from here on the spectrum may go on beyond the basis
_LOW_TENTHS = 7  # below, a smaller rank saves enough to be worth a new basis
_AIM_TENTHS = 8  # of a rank that has shrunk; noise of a tenth on either side moves nothing
_EXCHANGES = 2  # that fit into a round
_STALLS = 100
_H_BAND = 0.2  # exchange times scatter by more than a tenth on the best of lines


def facts_of(*, ranks: Sequence[int], needed: Sequence[int], times: Sequence[Times]) -> RoundFacts:
    """The facts of one round.

    Args:
        ranks, needed: as in `RoundFacts`.
        times: of every member, in any order.
    """
    return RoundFacts(ranks=tuple(ranks), needed=tuple(needed), **medians(times).times)


def medians(times: Sequence[Times]) -> Times:
    """The lower median of each of the times that are known, one that somebody stated."""
    known = {
        name: [each.times[name] for each in times if each.times[name] > 0] for name in Times().times
    }
    return Times(**{name: median_low(values) for name, values in known.items() if values})


def following_window(window: Sequence[RoundFacts], facts: RoundFacts) -> tuple[RoundFacts, ...]:
    """The window of a record: that of the record before it and its own round, five at most."""
    return (*window, facts)[-WINDOW:]


def next_ranks(
    ranks: Sequence[int],
    window: Sequence[RoundFacts],
    *,
    limits: Sequence[int],
    min_rank: int,
    max_inner_steps: float = math.inf,
) -> tuple[int, ...]:
    """The ranks of the next exchange, one a tensor.

    Args:
        ranks: of the exchange that just ended.
        window: facts of the last rounds, oldest first; without any the ranks stay.
        limits: the largest rank of each tensor; 0 for one that goes dense, whose rank is 0.
        min_rank: the smallest rank of a factored tensor; a smaller limit goes before it.
        max_inner_steps: of the longest round.

    Raises:
        ValueError: these are not about the same number of tensors.
    """
    columns = [zip(facts.ranks, facts.needed, strict=True) for facts in window]
    measured = zip(*columns, strict=True) if columns else ((),) * len(ranks)
    usual = medians(window)
    slow = _EXCHANGES * usual.exchange_s > max_inner_steps * usual.step_s > 0
    return tuple(
        min(max(_next_rank(rank, pairs), min_rank), limit, rank if slow else limit)
        for rank, limit, pairs in zip(ranks, limits, measured, strict=True)
    )


def next_inner_steps(current: int, window: Sequence[RoundFacts], *, low: int, high: int) -> int:
    """H of a later round.

    Args:
        current: the newest H that a record, or the manifest, names.
        window: facts of the last rounds; if they know no step, or nothing that costs time, H stays.
        low, high: the manifest's bounds.
    """
    usual = medians(window)
    following = current
    if usual.step_s and (usual.exchange_s or usual.stall_s):
        least = least_inner_steps(usual.exchange_s, usual.stall_s, usual.step_s)
        steps = (1 + _H_BAND) * least
        if current < least or current > (1 + _H_BAND) * steps + 1:  # it is rounded up
            target = math.ceil(steps) if steps < 2 * current else 2 * current  # also if infinite
            following = _at_most_half(current, target)
    return min(max(following, low), high)


def least_inner_steps(exchange_s: float, stall_s: float, step_s: float) -> float:
    """The H below which exchanges, or what a round costs once, would take too much of it."""
    return max(_EXCHANGES * exchange_s, _STALLS * stall_s) / step_s


def _next_rank(rank: int, measured: Sequence[tuple[int, int]]) -> int:
    """`measured`: pairs of a rank and what was needed at it, the newest last."""
    if not measured or not rank:
        return rank
    # of almost the whole rank it is not known how many more are needed
    needs = [math.inf if 10 * need >= _FULL_TENTHS * at else need for at, need in measured]
    full, need = needs[-1] == math.inf, median_low(needs)
    if need == math.inf:
        return _at_most_half(rank, 2 * rank) if full else rank
    if full or 10 * need >= _LOW_TENTHS * rank:
        return rank
    return _at_most_half(rank, -(-10 * int(need) // _AIM_TENTHS))


def _at_most_half(current: int, target: int) -> int:
    """As near to the target as half of the current number takes it; upwards at least by one."""
    half = current // 2
    return min(max(target, current - half), current + max(half, 1))


class RoundPlan:
    """The plan of one stage of a run."""

    def __init__(self, manifest: Manifest, codec: StageCodec):
        self._manifest = manifest
        self._codec = codec

    def ranks_after(self, last: RoundRecord | None) -> tuple[int, ...]:
        """The ranks of the exchange after a record; None is the manifest, before the first."""
        return self._codec.first_ranks if last is None else last.next_ranks

    def inner_steps_after(self, last: RoundRecord | None) -> int:
        """The newest H that a record, or the manifest, names."""
        return self._manifest.rounds.inner_steps if last is None else last.next_inner_steps

    def inner_steps_of(self, last: RoundRecord | None, stated: Iterable[int]) -> int:
        """H of a replica: the largest that the newest record of any of its stages names.

        stated: by the peers of its other stages, so it counts within the manifest's bound.
        """
        largest = max(stated, default=0)
        return max(
            self.inner_steps_after(last), min(largest, self._manifest.rounds.max_inner_steps)
        )

    def finished(self, record: RoundRecord) -> RoundRecord:
        """A record that is whole but for its plan.

        Its `window` and `next_inner_steps` are still those of the record before it.
        """
        spec, rounds = self._manifest.codec, self._manifest.rounds
        facts = facts_of(
            ranks=record.ranks,
            needed=record.decoded(self._codec).needed(spec.energy) if self._codec.limits else (),
            times=[member for member in record.members if member.peer in record.voters],
        )
        window = following_window(record.window, facts)
        ranks: Sequence[int] = record.ranks
        if spec.adaptive:
            limits = self._codec.limits
            bounds = {"min_rank": spec.min_rank, "max_inner_steps": rounds.max_inner_steps}
            ranks = next_ranks(ranks, window, limits=limits, **bounds)
        low, high = rounds.min_inner_steps, rounds.max_inner_steps
        steps = next_inner_steps(record.next_inner_steps, window, low=low, high=high)
        return replace(record, window=window, next_ranks=tuple(ranks), next_inner_steps=steps)

    def follows(self, record: RoundRecord, last: RoundRecord | None) -> bool:
        """Whether this is the plan that must stand in a record after `last` (with its means)."""
        unplanned = replace(
            record,
            window=() if last is None else last.window,
            next_inner_steps=self.inner_steps_after(last),
        )
        return self.finished(unplanned) == record
