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
from dilocox.peer.record import RoundRecord, part_bytes
from dilocox.peer.vote import Verdict

PHASE_SHARE = 0.25  # of the exchange's time that a phase has whatever its bytes


class ShareRefused(ValueError):
    """A part or a mean that does not belong where it was sent."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The encoded mean of one part and the members whose values are in it."""

    part: int  # the index of its share in the attempt's setup
    contributors: tuple[str, ...]
    payload: bytes = field(repr=False)


class Transport(Protocol):
    """How a member reaches the others; every method may raise ConnectionError."""

    async def push_part(self, peer: str, part: int, payload: bytes) -> None:
        """Send this member's encoded part to its reducer."""
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

    async def send_vote(self, peer: str, vote: bytes) -> None:
        """Send a signed vote."""
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
class Share:
    """A part [start, stop) of one phase's vector, and the member that averages it."""

    phase: int
    reducer: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many values it has; where there are none, nothing is sent."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class PhaseCodecs:
    """How the parts of a phase go to their reducers, and how their means come back."""

    send: Codec
    mean: Codec


@dataclass(frozen=True, kw_only=True)
class AttemptSetup:
    """What all members of a group agree on, and who of them this one is."""

    me: str
    members: tuple[Member, ...]  # sorted by peer
    template: RoundRecord  # the record to be made, without members, parts and means
    shares: tuple[Share, ...]  # all of phase 0 in the order of their reducers, then of phase 1
    codecs: tuple[PhaseCodecs, ...]  # one a phase
    plan: Planner
    exchange_s: float  # for all phases together
    vote_s: float
    silence_s: float

    def max_bytes(self, part: int, kind: str) -> int:
        """The most bytes of the payload of a share, or of its mean (`kind`: part, mean)."""
        share = self.shares[part]
        codecs = self.codecs[share.phase]
        codec = codecs.send if kind == "part" else codecs.mean
        return part_bytes(codec, share.numel)

    def phase_ends_s(self) -> tuple[float, ...]:
        """The seconds from the start by which each phase should be over; the last: exchange_s.

        Each has a quarter of the time, for its arithmetic and the ways; the rest goes by bytes.
        """
        sizes = [0] * len(self.codecs)
        for index, share in enumerate(self.shares):
            sizes[share.phase] += self.max_bytes(index, "part") + self.max_bytes(index, "mean")
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
    aborts: bytes = field(repr=False)
    members: tuple[str, ...]
    seconds: float
    matchmaking_s: float | None = None  # until its group stood; None of a peer alone
