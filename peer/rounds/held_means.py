"""Means that others of a group say they hold, and that nobody brings us. Apart from exchange.py,
which asks for them: this decides which members to believe, and which to blame.

A reducer can give its mean to one member and keep it from the others: these would wait for it until
the exchange is over, and its holder could not tell them. So with the means of each phase every
member tells those near it which it holds. A member that lacks one which a voter has held for a
while, and which is not coming, asks the holders for it. It waits for what comes so fast that it is
whole in half of its phase's time. It names, in its ticket of the next round, the peer that should
have brought what came from a holder and did not even begin to; where most members name that peer,
the round goes without it (group.py). It does not name a slow one, since all that a thin link sends
waits for what it sends before. In a group of several rows few members get a mean from its reducer
itself, and these alone name it.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from dilocox.peer.rounds.group import AttemptSetup
from dilocox.peer.rounds.signed_means import held_by

logger = logging.getLogger(__name__)


class HeldMeans:
    """Of one attempt. Belongs to the event loop.

    Attributes:
        passed_by: peers that kept from this member what they gave others.
    """

    def __init__(self, setup: AttemptSetup, dues: Sequence[float]):
        """dues: when each phase should be over (monotonic time)."""
        self._setup = setup
        self._dues = dues
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._since: dict[int, float] = {}  # when a voter said so first, by share (monotonic)
        self._began: dict[int, float] = {}  # the same, when somebody began to send its mean
        self._came_at: dict[int, float] = {}  # and when bytes of that came last
        self._share_here: dict[int, float] = {}  # of them
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
        """So many of the bytes of this mean are here, from the one that should bring it; none yet,
        where it begins."""
        self._came_at[part] = time.monotonic()
        self._began.setdefault(part, self._came_at[part])
        self._share_here[part] = count / max(1, size)

    def holders(self, part: int) -> list[str]:
        """The members to ask, in any order."""
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
        """Whether it is whole soon if it goes on like that; what has just begun may be."""
        if part not in self._began:
            return False
        now, began = time.monotonic(), self._began[part]
        soon = now - began <= self._share_here[part] * (self._due(part) - began) / 2
        return self.moves(part) and (soon or now - began < self._setup.deadlines.silence_s)

    def moves(self, part: int) -> bool:
        """Whether some of its bytes came of late, at whatever pace."""
        silent_s = time.monotonic() - self._came_at.get(part, -math.inf)
        return silent_s < self._setup.deadlines.silence_s

    def given_by(self, part: int, holder: str) -> None:
        """One that was asked gave it. The blame is its reducer's if that gives it to us itself, or
        the one's that says that it has it from there; where nobody knows it is nobody's.
        """
        sender = self._setup.sender(part)
        known = sender == self._setup.shares[part].reducer or sender in self._holders[part]
        if known and part not in self._began and sender not in (holder, self._setup.me):
            logger.info("%s gave others its average, and this peer none", sender)
            self.passed_by.add(sender)

    def in_vain(self, part: int, asked: Collection[str]) -> None:
        """These did not give it in time, whatever they said."""
        self._holders[part] -= set(asked)
        if not self._holders[part]:
            self._since.pop(part, None)
