"""The exchanges of a simulated run: the product's codecs and arithmetic, with no bytes moved.

Every worker reduces one part of each phase's vector. What a group would move is encoded and decoded
by the same classes, and its bytes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.robust import centered
from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import Compression, Phase, StageCodec
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.rank_choice import facts_of, following_window, next_ranks
from dilocox.peer.rounds.record import RoundFacts
from dilocox.peer.rounds.robust import bounded_weights
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode

Averaging = RobustRule | Literal["centered"]


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """One exchange: the average [n], what it left of each message [n], and all bytes sent."""

    average: Tensor
    left: list[Tensor]
    bytes_sent: int


class Exchange:
    """The exchanges of one run, one after the other."""

    def __init__(
        self,
        layout: FlatLayout,
        compression: Compression,
        energy: float | None,
        seed: int,
        robust: Averaging = "none",
    ):
        """energy: what the ranks follow; None: they stay."""
        self._robust: Averaging = robust
        self._codec = StageCodec(layout, compression)
        self._energy = energy
        self._seed = seed
        self._round = 0
        self.ranks = self._codec.first_ranks
        self._basis = self._codec.first_basis(f"{seed}/-1")
        self._window: tuple[RoundFacts, ...] = ()

    def average(self, messages: Sequence[Tensor], weights: Sequence[int] | None = None) -> Averaged:
        """Average the members' messages [n] as a group does; each member reduces one part.

        weights: that they state; all alike without.
        """
        stated = [1] * len(messages) if weights is None else list(weights)
        codec, ranks = self._codec, self.ranks
        encoders = [codec.encoder(message, ranks, lambda: self._basis) for message in messages]
        vectors: list[Tensor] = []
        counted: list[list[slice]] = []
        bytes_sent = 0
        for number, phase in enumerate(codec.phases(ranks)):
            sent = [encoder.vector(number, vectors) for encoder in encoders]
            counted = [[] for _ in messages]
            mean = torch.empty(phase.numel)
            for part in split(phase.numel, len(sent)):
                if part.stop == part.start:
                    continue
                values = [vector[part] for vector in sent]
                reduced = _reduced(phase, values, stated, self._robust)
                mean[part] = decode(phase.codec, reduced.payload, part.stop - part.start)
                bytes_sent += reduced.bytes_sent
                for member, believed in enumerate(reduced.believed):
                    if believed:
                        counted[member].append(part)
            vectors.append(mean)
        means = codec.means(ranks, vectors)
        for message, parts in zip(messages, counted, strict=True):
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


@dataclass(frozen=True)
class _Reduced:
    """A part's encoded mean, the bytes that went around, and whose values are in it."""

    payload: bytes
    bytes_sent: int
    believed: list[bool]


def _reduced(
    phase: Phase, values: Sequence[Tensor], stated: Sequence[int], robust: Averaging
) -> _Reduced:
    """What comes of the members' values [n] of a part."""
    payloads = [encode(phase.codec, member) for member in values]
    numel = values[0].numel()
    members = [str(index) for index in range(len(values))]
    weight = bounded_weights(dict(zip(members, stated, strict=True)))
    # the reducer is a member: its part does not travel
    sent = sum(map(len, payloads[1:]))
    if robust == "centered":
        decoded = torch.stack([decode(phase.codec, each, numel) for each in payloads])
        payload = encode(phase.codec, centered(decoded, list(weight.values())))
        return _Reduced(payload, sent + (len(members) - 1) * len(payload), [True] * len(members))
    reduction = Reduction(phase.codec, weight, numel, robust)
    for member, payload in zip(members, payloads, strict=True):
        reduction.add(member, payload)
    row = reduction.finish()
    mean = combine(0, [row] if row else [], codec=phase.codec, weight=weight)
    if mean is None:
        raise RuntimeError("a part without members")
    sent += (len(members) - 1) * len(mean.payload)
    believed = [member in mean.contributors for member in members]
    return _Reduced(mean.payload, sent, believed)
