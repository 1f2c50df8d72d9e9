"""Means that others of a group say they hold, and that nobody brings us. Apart from exchange.py,
which asks for them: it is whom to believe, and whom to blame.

A reducer can give its mean to one member and keep it from the others: these would wait for it until
the exchange is over, and who has it could not tell them. So with the means of each phase every
member tells those near it which it holds. Who lacks one that a voter has held for a while, and that
is not coming, asks the holders for it. What comes so fast that it is whole before its phase is over
is waited for: it may be a thin link. Who should have brought what came from a holder is told of in
the ticket of the next round, and where most members name it, that round goes without it (group.py).
In a group of several rows few members get a mean from its reducer itself, and these alone name it.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from dilocox.peer.rounds.group import AttemptSetup
from dilocox.peer.rounds.signed_means import held_by


class HeldMeans:
    """Of one attempt. Belongs to the event loop.

    Attributes:
        passed_by: who kept from this member what it gave others.
    """

    def __init__(self, setup: AttemptSetup, dues: Sequence[float]):
        """dues: when each phase should be over (monotonic time)."""
        self._setup = setup
        self._dues = dues
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._since: dict[int, float] = {}  # when a voter said so first, by share (monotonic)
        self._began: dict[int, float] = {}  # when the first bytes of its mean came, likewise
        self._share_here: dict[int, float] = {}  # of its mean's bytes
        self.passed_by = set[str]()

    def hear(self, peer: str, words: bytes) -> bool:
        """Take a member's words; whether it holds all means."""
        held = held_by(words)
        for part in held:
            self._holders[part].add(peer)
            if peer in self._setup.voters:
                self._since.setdefault(part, time.monotonic())
        return all(part in held for part, share in enumerate(self._setup.shares) if share.numel)

    def bytes_came(self, part: int, count: int, size: int) -> None:
        """So many of the bytes of this mean are here, from the one that should bring it."""
        self._began.setdefault(part, time.monotonic())
        self._share_here[part] = count / max(1, size)

    def holders(self, part: int) -> list[str]:
        """Who is to be asked, in any order."""
        return random.sample(sorted(self._holders[part]), len(self._holders[part]))

    def kept_from_us(self, missing: Collection[int]) -> tuple[list[int], float]:
        """Of the missing shares those whose mean is to be asked for, and when there may be others
        (monotonic time).
        """
        silence_s, now = self._setup.deadlines.silence_s, time.monotonic()
        looked_at = {
            part: now + silence_s / 2 if self._coming(part) else since + silence_s / 2
            for part, since in self._since.items()
            if part in missing and now < self._due(part)
        }
        kept = [part for part, at in looked_at.items() if at <= now]
        return kept, min((at for at in looked_at.values() if at > now), default=math.inf)

    def _due(self, part: int) -> float:
        return self._dues[self._setup.shares[part].phase]

    def _coming(self, part: int) -> bool:
        """Whether it is whole in time if it goes on like that; whoever has just begun may."""
        began, here = self._began.get(part), self._share_here.get(part, 0.0)
        if began is None:
            return False
        since_s = time.monotonic() - began
        just = since_s < self._setup.deadlines.silence_s
        return just or since_s <= here * (self._due(part) - began)

    def given_by(self, part: int, holder: str) -> None:
        """One that was asked gave it. The blame is its reducer's if that gives it to us itself, or
        the one's that says that it has it from there; where nobody knows it is nobody's.
        """
        sender = self._setup.sender(part)
        known = sender == self._setup.shares[part].reducer or sender in self._holders[part]
        if known and not self._coming(part) and sender not in (holder, self._setup.me):
            self.passed_by.add(sender)

    def in_vain(self, part: int, asked: Collection[str]) -> None:
        """These did not give it in time, whatever they said."""
        self._holders[part] -= set(asked)
        if not self._holders[part]:
            self._since.pop(part, None)
