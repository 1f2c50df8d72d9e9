"""The members of an averaging group as an attempt knows them: who they are, what they agreed on,
and how they are reached. The attempt itself is exchange.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from dilocox.compression.codec import GroupCodec
from dilocox.peer.record import RoundRecord
from dilocox.peer.vote import Verdict


class ShareRefused(ValueError):
    """A part or a mean that does not belong where it was sent."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The encoded mean of one part and the members whose values are in it."""

    part: int
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


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a member said of itself when the group formed."""

    peer: str
    tokens: int
    exchange_s: float
    client_mode: bool


@dataclass(frozen=True, kw_only=True)
class AttemptSetup:
    """What all members of a group agree on, and this member's own part of it."""

    me: str
    members: tuple[Member, ...]  # sorted by peer
    template: RoundRecord  # the record to be made, without members, parts and means
    codec: GroupCodec
    parts: tuple[slice, ...]  # one a reducer, in the order of the members that reduce
    exchange_s: float
    vote_s: float
    silence_s: float

    @property
    def reducers(self) -> tuple[str, ...]:
        """The members that can be reached, and so average a part each."""
        return tuple(member.peer for member in self.members if not member.client_mode)


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """How an attempt ended. `record` stands where it was committed."""

    verdict: Verdict
    record: bytes | None = field(repr=False)
    certificate: bytes | None = field(repr=False)
    aborts: bytes = field(repr=False)
    members: tuple[str, ...]
    seconds: float
