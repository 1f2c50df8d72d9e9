"""Ways to average that peers do not have, tried where it is cheap: fewer bits than the product's
codecs, a length of its own for the mean, another momentum. benchmarks/muon.py compares them.

A way stands in the place of an exchange among honest workers of equal weight; what a codec leaves
of a message stays in its residual, as in the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.simulated_exchange import AttackedSwarm
from dilocox.compression.group_quantization import GroupCodec
from dilocox.dht.manifest import OuterSpec
from dilocox.peer.rounds.outer_step import OuterStep

Way = Literal["signs", "signs both ways", "three levels", "halves", "own length", "heavy ball"]
"""signs: 1 bit a value to the reducers, by groups with the mean size of their values, and 2 bits
from them; both ways: 1 from them, too. three levels: of the optimal quantizer of a normal variable
(Lloyd and Max) with the group's root mean square, in as many bits as their entropy says; 2 bits
from them. halves: 2 bits, of every other group in every other round. own length: 2 bits, and the
mean is made as long as the members' vectors are on the average. heavy ball: 2 bits, and the outer
step has Polyak's momentum instead of Nesterov's (SlowMo, arXiv 1910.00643)."""

GROUP = 256
SCALE_BITS = 16  # of a group
THRESHOLD, LEVEL = 0.612, 1.224  # of three levels, in deviations


class TriedSwarm(AttackedSwarm):
    """Its workers are honest, and average in one of the ways."""

    def __init__(self, *arguments: Any, way: Way, outer: OuterSpec, **named: Any):
        super().__init__(*arguments, outer=outer, **named)
        self._way: Way = way
        self._two_bits = GroupCodec(2, self._spec.max_factor)
        if way == "heavy ball":
            self._outer = HeavyBall(outer.learning_rate, outer.momentum)

    def average(self, number: int, messages: Sequence[Tensor]) -> Tensor:
        """The average fp32 [n] of a round's messages [n], in each of which what is left stays."""
        numel, way = len(messages[0]), self._way
        here = torch.arange(numel) // GROUP % 2 == number % 2 if way == "halves" else slice(None)
        sent, up_bits = list[Tensor](), list[float]()
        for message in messages:
            values, bits = self._sent(message[here])
            message[here] -= values
            sent.append(values)
            up_bits.append(bits)
        mean = torch.stack(sent).mean(dim=0)
        if way == "signs both ways":
            back, down_bits = signs(mean)
        else:
            back, down_bits = self._in_two_bits(mean)
        if way == "own length":
            own = fmean(float(each.norm()) for each in sent)
            back = back * (own / max(float(back.norm()), 1e-12))
        average = torch.zeros(numel)
        average[here] = back
        # each sends its parts to the others, and the mean of its own to them
        self.bytes_sent += round((len(messages) - 1) * (fmean(up_bits) + down_bits) / 8)
        return average

    def _sent(self, values: Tensor) -> tuple[Tensor, float]:
        match self._way:
            case "signs" | "signs both ways":
                return signs(values)
            case "three levels":
                return three_levels(values)
            case _:
                return self._in_two_bits(values)

    def _in_two_bits(self, values: Tensor) -> tuple[Tensor, float]:
        payload = self._two_bits.encode(values)
        return self._two_bits.decode(payload, len(values)), 8.0 * len(payload)


class HeavyBall(OuterStep):
    """Polyak's momentum."""

    def apply(
        self,
        anchor: Tensor,
        momentum_buffer: Tensor,
        average: Tensor,
        out_anchor: Tensor,
        out_momentum: Tensor,
    ) -> None:
        """buf = mu * buf + g;  A = A - lr * buf."""
        out_momentum.copy_(momentum_buffer * self.momentum + average)
        out_anchor.copy_(anchor - self.learning_rate * out_momentum)


def signs(values: Tensor) -> tuple[Tensor, float]:
    """Each value's sign, of the mean size of its group: what is decoded, and the bits."""
    grouped, scales = _grouped(values), _grouped(values.abs()).mean(dim=1, keepdim=True)
    found = torch.where(grouped < 0, -scales, scales).flatten()[: len(values)]
    return found, len(values) + SCALE_BITS * len(scales)


def three_levels(values: Tensor) -> tuple[Tensor, float]:
    """Of a normal variable's optimal three levels: what is decoded, and the bits."""
    grouped = _grouped(values)
    deviations = grouped.square().mean(dim=1, keepdim=True).sqrt()
    levels = (grouped.abs() > THRESHOLD * deviations) * grouped.sign()
    found = (levels * LEVEL * deviations).flatten()[: len(values)]
    share = float(levels.abs().mean())
    entropy = _nats(share) + _nats(1 - share) + share * math.log(2)
    return found, len(values) * entropy / math.log(2) + SCALE_BITS * len(grouped)


def _nats(share: float) -> float:
    return -share * math.log(share) if share else 0.0


def _grouped(values: Tensor) -> Tensor:
    """In rows of a group, the last one filled with zeros."""
    rest = -len(values) % GROUP
    return torch.cat([values, values.new_zeros(rest)]).view(-1, GROUP)
