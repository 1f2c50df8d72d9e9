"""A local swarm (dilocox.local_swarm) some of whose workers lie, whose members judge reducers, and
which notes how far each was believed.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from dilocox.peer.rounds.robust import (
    JUDGED,
    LEAST_GATED,
    Likeness,
    likeness,
    not_of_ours,
    paces,
)
from dilocox.peer.rounds.standing import Standing, bounded_weights, following_standings
from dilocox.peer.training.local_swarm import LocalSwarm


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What the first `liars` workers send instead of what they learnt, or of a mean they reduced.

    kind: `flip` the sign; `noise` of the norm that their message has; `constant`, the same value
        everywhere, of that norm; `little`: the honest mean less `factor` standard deviations of
        each value, which no single value gives away (arXiv 1902.06156); `absent`, nothing, as if
        they were not there; `reverse` the mean of the part that they reduce; `bias` it by a
        constant of its norm. factor: of all that.
    weight: what they state, an honest worker's being 1.
    """

    kind: Literal["flip", "noise", "constant", "little", "absent", "reverse", "bias"]
    liars: int
    factor: float = 1.0
    weight: int = 1

    @property
    def reduces(self) -> bool:
        """Whether they send what they learnt, and lie about the means that they reduced."""
        return self.kind in ("reverse", "bias")

    def returned(self, mean: Tensor) -> Tensor:
        """What they return in the place of a mean [n]."""
        if self.kind == "reverse":
            return mean * -self.factor
        return mean + self.factor * float(mean.norm()) / math.sqrt(mean.numel())

    def change(self, messages: Sequence[Tensor], seed: int) -> None:
        """Put the lies into the messages [n] of the liars, in place."""
        honest = torch.stack(list(messages[self.liars :]))
        for number, message in enumerate(messages[: self.liars]):
            norm = float(message.norm())
            match self.kind:
                case "flip":
                    message.mul_(-self.factor)
                case "noise":
                    draw = torch.Generator().manual_seed(seed * 100 + number)
                    noise = torch.randn(message.shape, generator=draw)
                    message.copy_(noise * (self.factor * norm / float(noise.norm())))
                case "constant":
                    message.fill_(self.factor * norm / math.sqrt(message.numel()))
                case "little":
                    message.copy_(honest.mean(dim=0) - self.factor * honest.std(dim=0))
                case "absent" | "reverse" | "bias":
                    pass  # it sends what it learnt, if anything


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """How far one worker was believed, over all rounds.

    left_out: the share of the values that it sent, in all phases, that are in no mean. drawn: of
        those that are in one further from it than twice the median distance.
    unheard: the share of rounds whose average mostly lacks its values. sat_out: how often the chain
        would have had it sit out for that (standing.py); here it takes part all the same.
    """

    left_out: float
    drawn: float
    unheard: float
    sat_out: int


class AttackedSwarm(LocalSwarm):
    """Its first workers may lie; seconds of a processor in all exchanges are `exchange_s`."""

    def __init__(self, *arguments: Any, attack: Attack | None, **named: Any):
        super().__init__(*arguments, **named)
        self._attack = attack or Attack(kind="flip", liars=0)
        self._members: list[int] = []
        self._alike: dict[tuple[int, int], dict[int, Likeness]] = {}
        self._round = 0
        self._standings: tuple[Standing, ...] = ()
        self._noted = Counter[tuple[str, int]]()  # by what and worker: values, or rounds
        self.exchange_s = 0.0

    def hearing(self, worker: int) -> Hearing:
        """How far a worker was believed, in a swarm in which all take part."""
        noted = self._noted
        sent = max(1, noted["sent", worker])
        return Hearing(
            left_out=noted["left out", worker] / sent,
            drawn=noted["drawn", worker] / sent,
            unheard=noted["unheard", worker] / (self._round + 1),
            sat_out=noted["sat out", worker],
        )

    def average(self, number: int, messages: Sequence[Tensor]) -> Tensor:
        """The average of a round's messages, as the liars make it."""
        attack, self._round = self._attack, number
        attack.change(messages, seed=self.seed * 1000 + number)
        started = time.process_time()
        average = super().average(number, messages)
        self.exchange_s += time.process_time() - started
        if not attack.reduces:
            for left in messages[: attack.liars]:
                left.zero_()  # each of its lies is a new one
        return average

    def exchange(
        self, messages: Sequence[Tensor], weight: Mapping[str, int]
    ) -> tuple[list[Tensor], list[list[slice]]]:
        """The attempt in which no half of the members finds a reducer against it any more."""
        absent = self._attack.liars if self._attack.kind == "absent" else 0
        self._members = list(range(absent, len(messages)))
        while True:
            self._alike = defaultdict(dict)
            stated = {
                str(place): weight[str(member)] * (self._attack.weight if self._lies(member) else 1)
                for place, member in enumerate(self._members)
            }
            vectors, counted = super().exchange(
                [messages[n] for n in self._members], bounded_weights(stated, {})
            )
            blamed = self._blamed()
            if not blamed or len(blamed) >= len(self._members):
                break
            self._members = [n for n in self._members if n not in blamed]
        found = dict(zip(self._members, counted, strict=True))
        parts = [found.get(n, []) for n in range(len(messages))]
        self._remember(parts, len(vectors[-1]))
        return vectors, parts

    def _remember(self, parts: Sequence[Sequence[slice]], numel: int) -> None:
        """What the record would say of each member."""
        shares = [sum(part.stop - part.start for part in each) / numel for each in parts]
        heard = {str(n): shares[n] for n in self._members}
        excluded = {str(n) for n in range(len(parts)) if n not in self._members}
        self._standings = following_standings(self._standings, self._round, heard, excluded)
        self._noted.update(("unheard", n) for n, share in enumerate(shares) if share < 0.5)
        self._noted.update(
            ("sat out", int(each.peer))
            for each in self._standings
            if each.left_out == self._round and each.sits_out(self._round + 1)
        )

    def reduce(
        self, phase: int, reducer: int, values: Mapping[str, Tensor], weight: Mapping[str, int]
    ) -> tuple[Tensor, Sequence[str]]:
        """What the reducer returns for the mean of its part, and who is in it."""
        mean, heard = super().reduce(phase, reducer, values, weight)
        self._note(mean, values, weight, heard)
        if self._lies(self._members[reducer]) and self._attack.reduces:
            mean = self._attack.returned(mean)
        total = sum(weight[name] for name in heard)
        for name, own in values.items():
            share = weight[name] / total if name in heard else 0.0
            member = self._members[int(name)]
            if int(name) != reducer and (beside := likeness(mean, own, share, len(heard))):
                self._alike[phase, member][self._members[reducer]] = beside
        return mean, heard

    def _note(
        self,
        mean: Tensor,
        values: Mapping[str, Tensor],
        weight: Mapping[str, int],
        heard: Sequence[str],
    ) -> None:
        """Count what is in a mean; distances, over the paces from where each is expected, are of
        what was sent before the codec changed it.
        """
        stated = [weight[name] for name in values]
        pace = dict(zip(values, paces(stated, range(len(stated))), strict=True))
        usual = sum(weight[n] * pace[n] for n in heard) / sum(weight[n] for n in heard)
        away = {
            name: float((own / pace[name] - mean / usual).norm()) for name, own in values.items()
        }
        limit = median(away[name] for name in heard)
        for name, own in values.items():
            worker = self._members[int(name)]
            self._noted["sent", worker] += len(own)
            if name not in heard:
                self._noted["left out", worker] += len(own)
            elif away[name] > 2 * limit:
                self._noted["drawn", worker] += len(own)

    def _lies(self, worker: int) -> bool:
        return worker < self._attack.liars

    def _blamed(self) -> set[int]:
        """Against whom half of the members vote after a phase; who reduces falsely says nothing."""
        if self._rounds.robust not in JUDGED or len(self._members) < LEAST_GATED:
            return set()
        votes: dict[int, Counter[int]] = defaultdict(Counter)
        for (phase, member), found in self._alike.items():
            if not (self._lies(member) and self._attack.reduces):
                votes[phase].update(not_of_ours(found))
        half = len(self._members) / 2
        return {each for phase in votes.values() for each, n in phase.items() if n >= half}
