"""The arithmetic of an attempt: parts in, a row's mean out; row means in, one mean out; means in,
one record out.

Runs in the averaging process's one pool thread, so that what is in a sum is what is named in its
mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dilocox.compression.codec import Codec, PayloadRefused
from dilocox.peer.members import AttemptSetup, Mean
from dilocox.peer.record import Contribution, Part


@dataclass(frozen=True)
class RowMean:
    """The average of some members' values, fp32 [n], and who they are, sorted."""

    contributors: tuple[str, ...]
    values: Tensor = field(repr=False)

    def part(self, piece: slice) -> RowMean:
        """The same of some of the values."""
        return RowMean(self.contributors, self.values[piece])


class Reduction:
    """Values that one member averages over its row: the sum so far, and whose values are in it."""

    def __init__(self, codec: Codec, weight: Mapping[str, int], numel: int):
        """weight: tokens by member of the row. codec: in which the values come."""
        self._codec = codec
        self._weight = weight
        self._sum = torch.zeros(numel, dtype=torch.float32)
        self.in_sum: set[str] = set()

    def add(self, peer: str, payload: bytes) -> None:
        """Add a member's encoded part; PayloadRefused if it is malformed, nothing is added then."""
        total = self._sum
        values = decode(self._codec, payload, total.numel())
        # shares of the whole, so that one member alone is not rounded: its share is exactly 1
        total.add_(values.mul_(self._weight[peer] / sum(self._weight.values())))
        self.in_sum.add(peer)

    def finish(self) -> RowMean | None:
        """The mean of all that was added; None if nothing was."""
        total = self._sum
        self.give_up()
        contributors = tuple(sorted(self.in_sum))
        if not contributors:
            return None
        if len(contributors) < len(self._weight):
            present = sum(self._weight[peer] for peer in contributors)
            total.mul_(sum(self._weight.values()) / present)
        return RowMean(contributors, total)

    def give_up(self) -> None:
        """Free the sum: an attempt is kept for a while after its end."""
        self._sum = torch.empty(0)


def combine(
    part: int, rows: Sequence[RowMean], *, codec: Codec, weight: Mapping[str, int]
) -> Mean | None:
    """The mean of a share over all rows, encoded once; None where no row has any.

    rows: at most one of each row, in the order of the rows. weight: tokens by member.
    """
    if not rows:
        return None
    tokens = [sum(weight[peer] for peer in row.contributors) for row in rows]
    total = torch.zeros_like(rows[0].values)
    for row, count in zip(rows, tokens, strict=True):
        total.add_(row.values, alpha=count / sum(tokens))
    contributors = tuple(sorted(peer for row in rows for peer in row.contributors))
    return Mean(part=part, contributors=contributors, payload=encode(codec, total))


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
