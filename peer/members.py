"""The members of an averaging group as an attempt knows them: who they are, what they agreed on,
and how they are reached. The attempt itself is exchange.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from dilocox.compression.codec import Codec
from dilocox.peer.grid import Grid, Share
from dilocox.peer.record import RoundRecord, part_bytes
from dilocox.peer.vote import Verdict

PHASE_SHARE = 0.25  # of the exchange's time that a phase has whatever its bytes


class ShareRefused(ValueError):
    """A part or a mean that does not belong where it was sent."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The encoded mean of one share, and the members whose values are in it.

    Of a row's mean on its way to the other rows both are empty where nobody's values came.
    """

    part: int  # the index of its share in the attempt's setup, and of its part in the record
    contributors: tuple[str, ...]
    payload: bytes = field(repr=False)


class Transport(Protocol):
    """How a member reaches the others; every method may raise ConnectionError."""

    async def push_part(self, peer: str, column: int, payload: bytes) -> None:
        """Send this member's encoded part to the reducer of a column in its row."""
        ...

    async def push_row(self, peer: str, mean: Mean) -> None:
        """Send this member's row's mean of a share to the one that averages it over the rows."""
        ...

    async def push_mean(self, peer: str, mean: Mean) -> None:
        """Send an averaged part to a member."""
        ...

    async def fetch_mean(self, peer: str, part: int) -> Mean | None:
        """Ask a member for an averaged part; None if it has none."""
        ...

    async def fetch_record(self, peer: str, digest: str) -> bytes | None:
        """Ask a member for the committed record of this round."""
        ...

    async def send_votes(self, peer: str, votes: Sequence[bytes]) -> None:
        """Send signed votes, one's own or those of others."""
        ...

    async def ask_votes(self, peer: str, round_number: int, attempt: int) -> list[bytes]:
        """Ask a member for the votes of this attempt that it holds."""
        ...

    def heartbeats(self, peer: str) -> AsyncIterator[None]:
        """A stream that yields while the member is alive."""
        ...


class Encoder(Protocol):
    """This member's message, as the vector of each phase; called in the pool."""

    def vector(self, phase: int, earlier: Sequence[Tensor]) -> Tensor:
        """The phase's vector, fp32 [n]; `earlier`: the decoded means of the phases before it."""
        ...


class Planner(Protocol):
    """The rule that all members end a record by; pure, called in the pool."""

    def finished(self, record: RoundRecord) -> RoundRecord:
        """The record with its window, next ranks and next inner steps; all else is filled."""
        ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a member said of itself when the group formed."""

    peer: str
    tokens: int
    exchange_s: float
    step_s: float
    client_mode: bool
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PhaseCodecs:
    """How the values of a phase go to a row's reducers, between the rows, and back to all."""

    send: Codec
    row: Codec
    mean: Codec


@dataclass(frozen=True, kw_only=True)
class AttemptSetup:
    """What all members of a group agree on, and who of them this one is.

    A *column* is numbered over all phases: those of phase 0 first. It has one share a row, and in
    each row one member that averages its values there and brings its means.
    """

    me: str
    members: tuple[Member, ...]  # sorted by peer
    grid: Grid
    template: RoundRecord  # the record to be made, without members, parts and means
    shares: tuple[Share, ...]  # as `Grid.shares` orders them
    codecs: tuple[PhaseCodecs, ...]  # one a phase
    plan: Planner
    exchange_s: float  # for all phases together
    vote_s: float
    silence_s: float

    @property
    def columns(self) -> range:
        """The numbers of all columns."""
        return range(len(self.shares) // len(self.grid.rows))

    def shares_of(self, column: int) -> range:
        """The indices of a column's shares."""
        rows = len(self.grid.rows)
        return range(column * rows, (column + 1) * rows)

    def column_of(self, share: int) -> int:
        """The column of a share."""
        return share // len(self.grid.rows)

    def span(self, column: int) -> slice:
        """Where the values of a column lie in its phase's vector."""
        shares = self.shares_of(column)
        return slice(self.shares[shares[0]].start, self.shares[shares[-1]].stop)

    def phase_of(self, column: int) -> int:
        """The phase of a column."""
        return self.shares[self.shares_of(column)[0]].phase

    def reducer_in(self, column: int, row: int) -> str:
        """The member of a row that averages a column there."""
        return self.shares[self.shares_of(column)[row]].reducer

    def collector(self, column: int) -> str:
        """The member of one's own row that averages a column there, and brings its means."""
        return self.reducer_in(column, self.grid.row_of[self.me])

    def sender(self, share: int) -> str:
        """Who brings the mean of a share: the one that encoded it, or one of one's own row."""
        collector = self.collector(self.column_of(share))
        return self.shares[share].reducer if collector == self.me else collector

    def max_bytes(self, index: int, kind: str) -> int:
        """The most bytes of a payload: `index` is a column for a part, a share for row and mean."""
        if kind == "part":
            span = self.span(index)
            return part_bytes(self.codecs[self.phase_of(index)].send, span.stop - span.start)
        share = self.shares[index]
        codecs = self.codecs[share.phase]
        return part_bytes(codecs.row if kind == "row" else codecs.mean, share.numel)

    def phase_ends_s(self) -> tuple[float, ...]:
        """The seconds from the start by which each phase should be over; the last: exchange_s.

        Each has a quarter of the time, for its arithmetic and the ways; the rest goes by bytes.
        """
        sizes = [0] * len(self.codecs)
        for column in self.columns:
            sizes[self.phase_of(column)] += self.max_bytes(column, "part")
        for index, share in enumerate(self.shares):
            sizes[share.phase] += self.max_bytes(index, "mean")
        rest = 1 - PHASE_SHARE * len(sizes)
        spans = [PHASE_SHARE + rest * size / max(1, sum(sizes)) for size in sizes]
        inner = accumulate(self.exchange_s * span for span in spans[:-1])
        return (*inner, self.exchange_s)


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """How an attempt ended. `record` stands where it was committed."""

    verdict: Verdict
    record: bytes | None = field(repr=False)
    certificate: bytes | None = field(repr=False)
    abort: bytes = field(repr=False)  # this member's own, signed, for a repeated attempt
    members: tuple[str, ...]
    seconds: float
    matchmaking_s: float | None = None  # until its group stood; None of a peer alone
