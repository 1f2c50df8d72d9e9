"""Local swarms whose workers are of several speeds, are absent in turn, or send values in fp16.

Why: the papers' seeds averaged equal machines in fp16. Everything else is as in
simulated_exchange.py: a worker's progress counts by its tokens, bounded as peers bound it, and what
an absent one learnt goes with its next send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import gcd
from typing import Any

import torch
from torch import Tensor

from benchmarks.fleet import Fleet
from benchmarks.simulated_exchange import AttackedSwarm
from dilocox.dht.manifest import InnerSpec
from dilocox.peer.training.merge import RecordFacts, Remainder

LARGEST_FP16 = torch.finfo(torch.float16).max


def steps_now(pace: int, inner_steps: int, position: int) -> bool:
    """Whether a worker that makes `pace` steps in the time of `inner_steps` makes one at the
    position, from 1 on, of the fastest.
    """
    return position * pace // inner_steps > (position - 1) * pace // inner_steps


class PacedFleet:
    """Replicas of several speeds, with the same calls as Fleet: a fleet for each run of equal ones.

    Each has its own inner optimizer, so that who rests keeps its moments.
    """

    def __init__(
        self,
        model: dict[str, Any],
        seeds: Sequence[int],
        inner: InnerSpec,
        *,
        paces: Sequence[int],
        inner_steps: int,
    ):
        """paces: inner steps of a round of `inner_steps`, one for each of `seeds`."""
        self._inner_steps, self._steps = inner_steps, 0
        self._fleets: list[tuple[int, list[int], Fleet]] = []
        order = sorted(range(len(seeds)), key=lambda row: paces[row])
        for pace, alike in groupby(order, key=lambda row: paces[row]):
            rows = list(alike)
            self._fleets.append((pace, rows, Fleet(model, [seeds[row] for row in rows], inner)))
        found = {
            row: weights
            for _, rows, fleet in self._fleets
            for row, weights in zip(rows, fleet.weights, strict=True)
        }
        self.weights = [found[row] for row in range(len(seeds))]
        self.stage = self._fleets[0][2].stage

    def step(self, windows: Tensor, rate: float, together: Sequence[slice] = ()) -> None:
        """One inner step of those that make one now; windows: int64 [replicas, b, t + 1]."""
        if together:
            raise ValueError("workers of several speeds do not average gradients")
        position = self._steps % self._inner_steps + 1
        self._steps += 1
        for pace, rows, fleet in self._fleets:
            if steps_now(pace, self._inner_steps, position):
                fleet.step(windows[rows], rate)

    def fade_momentum(self, rows: slice, share: float) -> None:
        """Is not tried with several speeds."""
        raise ValueError("Muon's momentum fades with workers of one speed")

    def validation_loss(self, weights: Tensor, windows: Tensor) -> float:
        """Mean nats a token of weights [layout.numel] on windows int64 [n, t + 1]."""
        return self._fleets[0][2].validation_loss(weights, windows)


class UnevenSwarm(AttackedSwarm):
    """Workers of several speeds, or absent in turn.

    paces: inner steps of each worker in a round. absent: worker r mod n is not in round r. half:
        values and means travel in fp16 instead of the codec's 32 bits, and no residual knows of it.
    """

    def __init__(
        self, *arguments: Any, paces: Sequence[int], absent: bool, half: bool, **named: Any
    ):
        super().__init__(*arguments, **named)
        if half and self._spec.bits != 32:
            raise ValueError("fp16 stands in the place of 32 bits")
        self._paces, self._absent, self._half = paces, absent, half
        self._senders: Sequence[int] = ()

    def trained(self, tokens: int) -> None:
        """Every worker whose turn it was made an inner step on so many tokens."""
        round_steps = self._rounds.inner_steps
        position = self._steps % round_steps + 1
        for pace, merge in zip(self._paces, self._merges, strict=True):
            if steps_now(pace, round_steps, position):
                merge.trained(tokens)
        self._steps += 1
        if self._arrival and position == (self._arrival % round_steps or round_steps):
            self.arrive()
        if position == round_steps:
            number = self._steps // round_steps - 1
            away = number % len(self._merges) if self._absent else -1
            self._senders = [n for n in range(len(self._merges)) if n != away]
            sends = [self._merges[n].send(number) for n in self._senders]
            self._tokens = [send.tokens for send in sends]
            messages = [send.message for send in sends]
            self._in_flight = self.average(number, messages), messages
            if not self._arrival:
                self.arrive()

    def arrive(self) -> None:
        """The record in flight, if there is one, reaches all workers now, absent ones too."""
        if self._in_flight is None:
            return
        average, left = self._in_flight
        self._in_flight = None
        first = self._merges[0]
        anchor, momentum = torch.empty_like(first.anchor), torch.empty_like(first.momentum)
        self._outer.apply(first.anchor, first.momentum, average, anchor, momentum)
        number, before = first.round + 1, str(first.round)
        remainders = dict(zip(self._senders, left, strict=True))
        for worker, merge in enumerate(self._merges):
            values = remainders.get(worker)
            record = RecordFacts(
                round=number,
                digest=str(number),
                previous=before,
                contributor=values is not None,
            )
            merge.commit(record, anchor, momentum, None if values is None else Remainder(values))

    def exchange(
        self, messages: Sequence[Tensor], weight: Mapping[str, int]
    ) -> tuple[list[Tensor], list[list[slice]]]:
        """As in AttackedSwarm, each member weighed by its tokens."""
        unit = gcd(*self._tokens)
        return super().exchange(messages, {str(n): t // unit for n, t in enumerate(self._tokens)})

    def reduce(
        self, phase: int, reducer: int, values: Mapping[str, Tensor], weight: Mapping[str, int]
    ) -> tuple[Tensor, Sequence[str]]:
        """The mean of the reducer's part, rounded to fp16 before and after where they travel so."""
        if not self._half:
            return super().reduce(phase, reducer, values, weight)
        before = self.bytes_sent
        rounded = {name: _fp16(each) for name, each in values.items()}
        mean, heard = super().reduce(phase, reducer, rounded, weight)
        self.bytes_sent = before + (self.bytes_sent - before) // 2
        return _fp16(mean), heard


def _fp16(values: Tensor) -> Tensor:
    """As OpenDiLoCo's averager sends them: clamped to the range of fp16, and rounded to it."""
    return values.clamp(-LARGEST_FP16, LARGEST_FP16).half().float()
