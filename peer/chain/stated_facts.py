"""What heads and peers state of a run's rounds: losses, void rounds.

Anybody may state anything. So each number is bounded, and of several the middle one counts: a
minority cannot move it. The monitor hears it for its page, a bootstrap for the history of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from dilocox.dht.records import ReplicaRecord, StageRecord

MOST_VOIDS = 8  # that a peer may add between two looks, of seconds
MAX_NUMBER = 1e12  # tokens a second, or seconds, that a peer may state
MAX_LOSS = 1e4  # nats a token
MAX_HEARD = 64  # rounds whose losses are remembered until they are committed
ROUNDS_AHEAD = 8  # of most replicas one may be
NEAR = 1.0  # nats a token from the middle one: a loss further off widens no range
LIVE_ROUNDS = 3  # that are found together are taken as they come
LIVE_S = 60.0  # or as many as there are, where the ones before were found no longer ago than that


def came_now(count: int, since_s: float) -> bool:
    """Whether so many rounds that are found together came about now. Of more nobody knows when that
    was. since_s: seconds since those before were found.
    """
    return count <= LIVE_ROUNDS or since_s <= LIVE_S


def leading(
    replicas: Mapping[str, ReplicaRecord], hosts: Collection[str]
) -> dict[str, ReplicaRecord]:
    """Of replicas by head those that the head itself leads, as one of the hosts of stage 0."""
    return {
        head: each
        for head, each in replicas.items()
        if each.members[:1] == (head,) and head in hosts
    }


class Spread(NamedTuple):
    """What so many heads state of one round: the middle one, and the range of those near it."""

    middle: float
    low: float
    high: float
    heads: int

    @classmethod
    def of(cls, losses: Collection[float]) -> Spread:
        middle = median_low(losses)
        near = [loss for loss in losses if abs(loss - middle) <= NEAR]
        return cls(middle, min(near), max(near), len(losses))


@dataclass(frozen=True)
class StatedLosses:
    """By round, in nats a token: train losses of rounds under way, validation losses of anchors, of
    which each is evaluated by one head.

    not_finite: heads whose newest validation loss is none that can be.
    """

    train: Mapping[int, Spread]
    validation: Mapping[int, float]
    not_finite: int


def stated_losses(
    replicas: Collection[ReplicaRecord], counts: Callable[[int], bool] = lambda number: True
) -> StatedLosses:
    """What the heads state now, a median over them; `counts`: whether a round is one of the run."""
    train: dict[int, list[float]] = {}
    validation: dict[int, list[float]] = {}
    not_finite = 0
    # one absurd number of a round would press the whole curve together
    last = median_low([each.round for each in replicas] or [0]) + ROUNDS_AHEAD
    for each in replicas:
        if max(each.round, each.val_round) > last:
            continue
        # it is of the round under way, the one after the newest record
        under_way = counts(each.round) or counts(each.round - 1)
        if each.train_loss is not None and sensible(each.train_loss) and under_way:
            train.setdefault(each.round, []).append(each.train_loss)
        if not counts(each.val_round):
            continue
        # a head that has evaluated an anchor names its round, and no loss if that is not finite
        if each.val_loss is None or not sensible(each.val_loss):
            not_finite += each.val_round >= 0
        elif each.val_round >= -1:
            validation.setdefault(each.val_round, []).append(each.val_loss)
    return StatedLosses(
        {number: Spread.of(losses) for number, losses in train.items()},
        {number: median_low(losses) for number, losses in validation.items()},
        not_finite,
    )


def more_voids(peers: Mapping[str, StageRecord], told: Mapping[str, int]) -> float:
    """Void rounds that a stage's peers tell beyond what each `told` before, a mean over them; of
    one no more than there can be between two looks.
    """
    more = (max(0, each.voids - told.get(peer, each.voids)) for peer, each in peers.items())
    return sum(min(each, MOST_VOIDS) for each in more) / max(1, len(peers))


def finite(number: float) -> float:
    """A number that a peer states, within what adds up: 0 if it is none or below."""
    return min(number, MAX_NUMBER) if number > 0 else 0.0


def sensible(loss: float) -> bool:
    """Whether a loss can be one; a sum over absurd ones would be no number."""
    return abs(loss) <= MAX_LOSS
