"""One exchange without a network: messages through the real codecs and sums to a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.layout import split
from dilocox.compression.stage_codec import Phase, StageCodec
from dilocox.peer.rounds.record import Contribution, ReducedShare, RoundRecord
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode
from tests.peer.members import template

Lost = Callable[[str, int, int], bool]
"""(member, phase, number of the part in it) -> whether its values never reach the reducer."""


@dataclass(frozen=True)
class Averaged:
    """The record, and what its average would be if means travelled without a loss."""

    record: RoundRecord
    lossless: Tensor


def averaged(
    codec: StageCodec,
    messages: Mapping[str, Tensor],
    tokens: Mapping[str, int],
    *,
    ranks: tuple[int, ...],
    basis: Tensor | None,
    round_number: int,
    lost: Lost = lambda *_: False,
) -> Averaged:
    """Average these messages, every member one of the reducers."""
    members = sorted(messages)
    weights = {peer: tokens[peer] for peer in members}
    encoders = {peer: codec.encoder(messages[peer], ranks, lambda: basis) for peer in members}
    parts, payloads = list[ReducedShare](), list[bytes]()
    vectors, lossless = list[Tensor](), torch.empty(0)
    for number, phase in enumerate(codec.phases(ranks)):
        own = {peer: encoders[peer].vector(number, vectors) for peer in members}
        vector, lossless = torch.zeros(phase.numel), torch.zeros(phase.numel)
        for index, place in enumerate(split(phase.numel, len(members), phase.codec.group_size)):
            here = {
                peer: encode(phase.codec, own[peer][place])
                for peer in members
                if place.stop > place.start and not lost(peer, number, index)
            }
            payload = _mean(phase, place, here, weights)
            if payload:
                vector[place] = decode(phase.codec, payload, place.stop - place.start)
                total = sum(weights[peer] for peer in here)
                for peer, sent in here.items():
                    values = decode(phase.codec, sent, place.stop - place.start)
                    lossless[place] += values * (weights[peer] / total)
            contributors = tuple(sorted(here)) or tuple(members)
            facts = {"phase": number, "start": place.start, "stop": place.stop}
            parts.append(ReducedShare(reducer=members[index], contributors=contributors, **facts))
            payloads.append(payload)
        vectors.append(vector)
    record = template(
        round=round_number,
        layout=codec.layout.digest,
        ranks=ranks,
        members=tuple(
            Contribution(peer=peer, tokens=weights[peer], exchange_s=0.0, step_s=0.0)
            for peer in members
        ),
        parts=tuple(parts),
        means=tuple(payloads),
    )
    means = codec.means(ranks, [*vectors[:-1], lossless])
    return Averaged(record=record, lossless=means.average())


def own_contribution(record: RoundRecord, peer: str, message: Tensor, codec: StageCodec) -> Tensor:
    """What the average holds of a member's message, 0 where that was left out: [n], to the rounding
    of the message."""
    left = message.clone()
    record.take_out(peer, left, codec)
    return message - left


def _mean(
    phase: Phase, place: slice, sent: Mapping[str, bytes], weights: Mapping[str, int]
) -> bytes:
    reduction = Reduction(phase.codec, weights, place.stop - place.start, "none")
    for peer, payload in sent.items():
        reduction.add(peer, payload)
    row = reduction.finish()
    mean = combine(0, [row] if row else [], codec=phase.codec, weight=weights)
    return b"" if mean is None else mean.payload
