"""The exchanges of a simulated run: the product's codecs and arithmetic, with no bytes moved.

Every worker reduces one part of each phase's vector. What a group would move is encoded and decoded
by the same classes, and its bytes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.robust import centered
from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import Compression, Phase, StageCodec
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.rank_choice import facts_of, following_window, next_ranks
from dilocox.peer.rounds.record import RoundFacts
from dilocox.peer.rounds.robust import (
    LEAST_GATED,
    Likeness,
    likeness,
    not_of_ours,
)
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode
from dilocox.peer.rounds.standing import bounded_weights

Averaging = RobustRule | Literal["centered"]
Lie = Callable[[Tensor], Tensor]
"""What a reducer returns in the place of the mean [n] of its part."""


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

    def average(
        self,
        messages: Sequence[Tensor],
        weights: Sequence[int] | None = None,
        lies: Mapping[int, Lie] | None = None,
    ) -> Averaged:
        """Average the members' messages [n] as a group does; each member reduces one part.

        weights: that they state; all alike without. lies: what some return in the place of the mean
        that they reduced. Where members find that with the gate, all is repeated without them.
        """
        codec = self._codec
        stated = [1] * len(messages) if weights is None else list(weights)
        members, bytes_sent = list(range(len(messages))), 0
        attempt = self._attempt(messages, members, stated, lies or {})
        while attempt.blamed and len(members) > len(attempt.blamed):
            bytes_sent += attempt.bytes_sent
            members = [each for each in members if each not in attempt.blamed]
            attempt = self._attempt(messages, members, stated, lies or {})
        means = codec.means(self.ranks, attempt.vectors)
        for member in members:
            means.take_out(messages[member], attempt.counted[member])
        result = Averaged(
            average=means.average(),
            left=list(messages),
            bytes_sent=bytes_sent + attempt.bytes_sent,
        )
        if self._energy is not None:
            self._plan(means.needed(self._energy))
        self._basis = means.next_basis(codec.low_rank(self.ranks), f"{self._seed}/{self._round}")
        self._round += 1
        return result

    def _attempt(
        self,
        messages: Sequence[Tensor],
        members: Sequence[int],
        stated: Sequence[int],
        lies: Mapping[int, Lie],
    ) -> _Attempt:
        """One try of these members to average what they have."""
        codec, ranks = self._codec, self.ranks
        encoders = [codec.encoder(messages[each], ranks, lambda: self._basis) for each in members]
        weights = [stated[each] for each in members]
        found = _Attempt(counted={member: [] for member in members})
        for number, phase in enumerate(codec.phases(ranks)):
            sent = [encoder.vector(number, found.vectors) for encoder in encoders]
            for counted in found.counted.values():
                counted.clear()
            mean = torch.empty(phase.numel)
            alike: list[dict[int, Likeness]] = [{} for _ in members]
            for reducer, part in zip(members, split(phase.numel, len(sent)), strict=True):
                if part.stop == part.start:
                    continue
                values = [vector[part] for vector in sent]
                reduced = _reduced(phase, values, weights, self._robust)
                mean[part] = decode(phase.codec, reduced.payload, part.stop - part.start)
                if reducer in lies:
                    mean[part] = lies[reducer](mean[part])
                found.bytes_sent += reduced.bytes_sent
                weight, count = reduced.weight, sum(each > 0 for each in reduced.weight)
                for index, member in enumerate(members):
                    if weight[index]:
                        found.counted[member].append(part)
                    if member != reducer and (
                        beside := likeness(mean[part], values[index], weight[index], count)
                    ):
                        alike[index][reducer] = beside
            found.vectors.append(mean)
            if self._robust == "gate" and len(members) >= LEAST_GATED:
                found.blamed |= _blamed(alike, members, honest=set(members) - set(lies))
        return found

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


@dataclass
class _Attempt:
    """The decoded means by phase, the parts by member that its values are in, all bytes sent, and
    the reducers against whom half of the members voted.
    """

    counted: dict[int, list[slice]]
    vectors: list[Tensor] = field(default_factory=list[Tensor])
    bytes_sent: int = 0
    blamed: set[int] = field(default_factory=set[int])


def _blamed(
    alike: Sequence[Mapping[int, Likeness]], members: Sequence[int], honest: set[int]
) -> set[int]:
    """Against whom half of the members vote after a phase; who lies itself says nothing."""
    votes = Counter[int]()
    for member, found in zip(members, alike, strict=True):
        if member in honest:
            votes.update(not_of_ours(found))
    return {reducer for reducer, count in votes.items() if 2 * count >= len(members)}


@dataclass(frozen=True)
class _Reduced:
    """A part's encoded mean, the bytes that went around, and each member's share of the mean."""

    payload: bytes
    bytes_sent: int
    weight: list[float]


def _reduced(
    phase: Phase, values: Sequence[Tensor], stated: Sequence[int], robust: Averaging
) -> _Reduced:
    """What comes of the members' values [n] of a part."""
    payloads = [encode(phase.codec, member) for member in values]
    numel = values[0].numel()
    members = [str(index) for index in range(len(values))]
    weight = bounded_weights(dict(zip(members, stated, strict=True)), ())
    # the reducer is a member: its part does not travel
    sent = sum(map(len, payloads[1:]))
    if robust == "centered":
        decoded = torch.stack([decode(phase.codec, each, numel) for each in payloads])
        payload = encode(phase.codec, centered(decoded, list(weight.values())))
        shares = [count / sum(weight.values()) for count in weight.values()]
        return _Reduced(payload, sent + (len(members) - 1) * len(payload), shares)
    reduction = Reduction(phase.codec, weight, numel, robust)
    for member, payload in zip(members, payloads, strict=True):
        reduction.add(member, payload)
    row = reduction.finish()
    mean = combine(0, [row] if row else [], codec=phase.codec, weight=weight)
    if mean is None:
        raise RuntimeError("a part without members")
    sent += (len(members) - 1) * len(mean.payload)
    tokens = sum(weight[member] for member in mean.contributors)
    shares = [weight[each] / tokens if each in mean.contributors else 0.0 for each in members]
    return _Reduced(mean.payload, sent, shares)
