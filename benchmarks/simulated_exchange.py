"""The exchanges of a simulated run: the product's codecs and arithmetic, with no bytes moved.

Every worker reduces one part of each phase's vector. What a group would move is encoded and decoded
by the same classes, and its bytes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import Compression, Phase, StageCodec
from dilocox.peer.rounds.adaptation import facts_of, following_window, next_ranks
from dilocox.peer.rounds.record import RoundFacts
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """One exchange: the average [n], what it left of each message [n], and all bytes sent."""

    average: Tensor
    left: list[Tensor]
    bytes_sent: int


class Exchange:
    """The exchanges of one run, one after the other."""

    def __init__(
        self, layout: FlatLayout, compression: Compression, energy: float | None, seed: int
    ):
        """energy: what the ranks follow; None: they stay."""
        self._codec = StageCodec(layout, compression)
        self._energy = energy
        self._seed = seed
        self._round = 0
        self.ranks = self._codec.first_ranks
        self._basis = self._codec.first_basis(f"{seed}/-1")
        self._window: tuple[RoundFacts, ...] = ()

    def average(self, messages: Sequence[Tensor]) -> Averaged:
        """Average the members' messages [n] as a group does; each member reduces one part."""
        codec, ranks = self._codec, self.ranks
        encoders = [codec.encoder(message, ranks, lambda: self._basis) for message in messages]
        vectors: list[Tensor] = []
        parts: list[slice] = []
        bytes_sent = 0
        for number, phase in enumerate(codec.phases(ranks)):
            sent = [encoder.vector(number, vectors) for encoder in encoders]
            parts = [p for p in split(phase.numel, len(sent)) if p.stop > p.start]
            mean = torch.empty(phase.numel)
            for part in parts:
                payload, bytes_of_part = _reduced(phase, [vector[part] for vector in sent])
                mean[part] = decode(phase.codec, payload, part.stop - part.start)
                bytes_sent += bytes_of_part
            vectors.append(mean)
        means = codec.means(ranks, vectors)
        for message in messages:
            means.take_out(message, parts)
        result = Averaged(average=means.average(), left=list(messages), bytes_sent=bytes_sent)
        if self._energy is not None:
            self._plan(means.needed(self._energy))
        self._basis = means.next_basis(codec.low_rank(self.ranks), f"{self._seed}/{self._round}")
        self._round += 1
        return result

    def _plan(self, needed: tuple[int, ...]) -> None:
        """The ranks of the next exchange, as a record names them."""
        facts = facts_of(ranks=self.ranks, needed=needed, times=())
        self._window = following_window(self._window, facts)
        self.ranks = next_ranks(
            self.ranks,
            self._window,
            limits=self._codec.limits,
            min_rank=self._codec.compression.min_rank,
        )


def _reduced(phase: Phase, values: Sequence[Tensor]) -> tuple[bytes, int]:
    """The encoded mean of the members' values [n] of a part, and the bytes that went around."""
    members = [str(index) for index in range(len(values))]
    weight = dict.fromkeys(members, 1)
    reduction = Reduction(phase.codec, weight, values[0].numel())
    payloads = [encode(phase.codec, member) for member in values]
    for member, payload in zip(members, payloads, strict=True):
        reduction.add(member, payload)
    row = reduction.finish()
    mean = combine(0, [row] if row else [], codec=phase.codec, weight=weight)
    if mean is None:
        raise RuntimeError("a part without members")
    # the reducer is a member: neither its part nor its mean travels
    return mean.payload, sum(map(len, payloads[1:])) + (len(members) - 1) * len(mean.payload)
