"""The arithmetic of an attempt: parts in, one mean out; means in, one record out.

Runs in the averaging process's one pool thread, so that what is in a sum is what is named in its
mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dilocox.compression.codec import Codec, PayloadRefused
from dilocox.peer.members import AttemptSetup, Mean, PhaseCodecs
from dilocox.peer.record import Contribution, Part


class Reduction:
    """A share that one member averages: the sum so far, and whose values are in it."""

    def __init__(self, codecs: PhaseCodecs, weight: Mapping[str, int], numel: int):
        self._codecs = codecs
        self._weight = weight
        self._sum = torch.zeros(numel, dtype=torch.float32)
        self.in_sum: set[str] = set()

    def add(self, peer: str, payload: bytes) -> None:
        """Add a member's encoded part; PayloadRefused if it is malformed, nothing is added then."""
        values = decode(self._codecs.send, payload, self._sum.numel())
        # shares of the whole, so that one member alone is not rounded: its share is exactly 1
        self._sum.add_(values.mul_(self._weight[peer] / sum(self._weight.values())))
        self.in_sum.add(peer)

    def finish(self, part: int) -> Mean | None:
        """The encoded mean of all that was added, once; None if nothing was."""
        total = self._sum
        self._sum = torch.empty(0)  # an attempt is kept for a while after its end
        contributors = tuple(sorted(self.in_sum))
        if not contributors:
            return None
        if len(contributors) < len(self._weight):
            present = sum(self._weight[peer] for peer in contributors)
            total.mul_(sum(self._weight.values()) / present)
        payload = encode(self._codecs.mean, total)
        return Mean(part=part, contributors=contributors, payload=payload)


def assemble_record(setup: AttemptSetup, means: Mapping[int, Mean]) -> bytes:
    """The record's canonical bytes, from the mean of every share that holds values."""
    names = tuple(member.peer for member in setup.members)
    empty = Mean(part=-1, contributors=names, payload=b"")
    record = replace(
        setup.template,
        members=tuple(
            Contribution(
                peer=member.peer,
                tokens=member.tokens,
                exchange_s=member.exchange_s,
                step_s=member.step_s,
                stall_s=member.stall_s,
            )
            for member in setup.members
        ),
        parts=tuple(
            Part(
                phase=share.phase,
                reducer=share.reducer,
                start=share.start,
                stop=share.stop,
                contributors=means.get(index, empty).contributors,
            )
            for index, share in enumerate(setup.shares)
        ),
        means=tuple(means.get(index, empty).payload for index in range(len(setup.shares))),
    )
    counted = replace(record, chain_tokens=record.chain_tokens + record.tokens)
    return setup.plan.finished(counted).to_bytes()


def encode(codec: Codec, values: Tensor) -> bytes:
    """The payload of these values [n] fp32."""
    return codec.encode(values).numpy().tobytes()


def decode(codec: Codec, payload: bytes, numel: int) -> Tensor:
    """The values of a payload, a new vector [numel]; PayloadRefused if it is malformed."""
    if not payload:  # which torch takes for no buffer
        raise PayloadRefused("length", f"no bytes for {numel} values")
    return codec.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8), numel)
