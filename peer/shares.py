"""What one member holds of an attempt's shares: the sums it makes, the means it has.

Here it is decided what is taken from whom; when to wait and whom to ask is exchange.py. Shares of
a later phase are taken at any time: a member that is ahead must not wait for those behind. Sums,
codecs and records are computed in the pool, everything else happens in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dilocox.compression.codec import PayloadRefused
from dilocox.peer.members import AttemptSetup, Mean, ShareRefused
from dilocox.peer.reduction import Reduction, assemble_record, decode

T = TypeVar("T")


class Compute(Protocol):
    """Calls a function in the pool."""

    def __call__(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """What the function returns, or raises."""
        ...


@dataclass
class _Duty:
    """A share that this member averages."""

    reduction: Reduction
    offered: set[str] = field(default_factory=set[str])  # whose part came, sound or not
    refused: set[str] = field(default_factory=set[str])  # whose part was malformed
    closed: bool = False


class Shares:
    """The parts and means of one attempt as they come in."""

    def __init__(self, setup: AttemptSetup, compute: Compute):
        self._setup = setup
        self._compute = compute
        self._weight = {member.peer: member.tokens for member in setup.members}
        self._duties = {
            part: _Duty(Reduction(setup.codecs[share.phase], self._weight, share.numel))
            for part, share in enumerate(setup.shares)
            if share.reducer == setup.me and share.numel
        }
        self._decoded: dict[int, Tensor] = {}  # means that a later phase builds on
        self.means: dict[int, Mean] = {}
        self.lied: set[int] = set()  # shares whose reducer sent a malformed mean

    # ---- what it is ours to average --------------------------------------------------------------
    @property
    def duties(self) -> list[int]:
        """The shares that this member averages."""
        return list(self._duties)

    async def add_part(self, peer: str, part: int, payload: bytes) -> None:
        """Add a member's part to the sum of its share.

        Raises:
            ShareRefused: not our share, a stranger, a second part, or one that comes too late.
            PayloadRefused: malformed; the member is left out of this share.
        """
        duty = self.check_sender(peer, part)
        duty.offered.add(peer)
        try:
            await self._compute(duty.reduction.add, peer, payload)
        except PayloadRefused:
            duty.refused.add(peer)
            raise

    def check_sender(self, peer: str, part: int) -> _Duty:
        """What a member's part would be added to; ShareRefused as `add_part` would."""
        duty = self._duties.get(part)
        if peer not in self._weight or duty is None:
            raise ShareRefused(f"part {part} is not ours to average for {peer}")
        if peer in duty.offered or duty.closed:
            raise ShareRefused(f"the part of {peer} is not waited for any more")
        return duty

    def awaited(self, part: int) -> set[str]:
        """The members whose part of our share is neither in the sum nor given up."""
        duty = self._duties[part]
        return self._weight.keys() - duty.reduction.in_sum - duty.refused

    async def reduce(self, part: int) -> Mean | None:
        """The mean of what came for our share; None if nothing did. Nothing is taken after that."""
        duty = self._duties[part]
        duty.closed = True
        mean = await self._compute(duty.reduction.finish, part)
        if mean is not None:
            await self._keep(mean, checked=True)
        return mean

    # ---- the means -------------------------------------------------------------------------------
    async def add_mean(self, mean: Mean) -> None:
        """Take an averaged share, whoever brings it.

        Raises:
            ShareRefused: no share of this attempt, or contributors that cannot be.
            PayloadRefused: malformed.
        """
        if not self.known(mean.part) or not self._setup.shares[mean.part].numel:
            raise ShareRefused(f"part {mean.part} has no mean")
        names = set(mean.contributors)
        if not names or not names <= set(self._weight) or sorted(names) != list(mean.contributors):
            raise ShareRefused("an averaged part names nobody, strangers, or somebody twice")
        await self._keep(mean)

    async def _keep(self, mean: Mean, *, checked: bool = False) -> None:
        """Keep the first mean of a share, decoded too where a later phase needs it."""
        share = self._setup.shares[mean.part]
        needed = share.phase + 1 < len(self._setup.codecs)
        if mean.part not in self.means and (needed or not checked):
            codec = self._setup.codecs[share.phase].mean
            values = await self._compute(decode, codec, mean.payload, share.numel)
            if needed and mean.part not in self.means:
                self._decoded[mean.part] = values
        self.means.setdefault(mean.part, mean)

    def known(self, part: int) -> bool:
        """Whether the attempt has this share."""
        return 0 <= part < len(self._setup.shares)

    def missing(self, phase: int) -> set[int]:
        """The shares of a phase whose mean is not here."""
        return {
            part
            for part, share in enumerate(self._setup.shares)
            if share.phase == phase and share.numel and part not in self.means
        }

    def vector(self, phase: int) -> Tensor:
        """The decoded mean of a phase whose means are all here; may be called once."""
        parts = [part for part, share in enumerate(self._setup.shares) if share.phase == phase]
        found = [self._decoded.pop(part) for part in parts if self._setup.shares[part].numel]
        return torch.cat(found) if found else torch.empty(0)

    async def record(self) -> bytes:
        """The record, once no mean is missing."""
        return await self._compute(assemble_record, self._setup, dict(self.means))

    # ---- who is to blame -------------------------------------------------------------------------
    def refused(self) -> set[str]:
        """The members that sent something malformed."""
        senders = {peer for duty in self._duties.values() for peer in duty.refused}
        return senders | {self._setup.shares[part].reducer for part in self.lied}

    def silent(self) -> set[str]:
        """The reducers whose mean is missing in the first phase that lacks one.

        Nobody can be blamed for a later phase: its means are made of what is missing.
        """
        for phase in range(len(self._setup.codecs)):
            if missing := self.missing(phase):
                return {self._setup.shares[part].reducer for part in missing}
        return set()
