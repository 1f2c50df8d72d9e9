"""Means that others of a group say they hold, and that nobody brings us. Apart from exchange.py,
which asks for them: it is whom to believe, and whom to blame.

A reducer can give its mean to one member and keep it from the others: these would wait for it until
the exchange is over, and who has it could not tell them. So with the means of each phase every
member tells those near it which it holds. Who lacks one that a voter has held for a while, and of
which no bytes have come of late, asks the holders for it. Who should have brought it and did not
is told of in the ticket of the next round, and where most members name it, that round goes without
it (group.py). Not so one whose bytes come slowly, through a thin link.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Collection

from dilocox.peer.rounds.group import AttemptSetup
from dilocox.peer.rounds.signed_means import held_by


class HeldMeans:
    """Of one attempt. Belongs to the event loop.

    Attributes:
        passed_by: who kept from this member what it gave others.
    """

    def __init__(self, setup: AttemptSetup):
        self._setup = setup
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._since: dict[int, float] = {}  # when a voter said so first, by share (monotonic)
        self._came_at: dict[int, float] = {}  # when bytes of its mean came last, likewise
        self.passed_by = set[str]()

    def hear(self, peer: str, words: bytes) -> bool:
        """Take a member's words; whether it holds all means."""
        held = held_by(words)
        for part in held:
            self._holders[part].add(peer)
            if peer in self._setup.voters:
                self._since.setdefault(part, time.monotonic())
        return all(part in held for part, share in enumerate(self._setup.shares) if share.numel)

    def bytes_came(self, part: int) -> None:
        """Somebody who should is bringing us this mean."""
        self._came_at[part] = time.monotonic()

    def holders(self, part: int) -> list[str]:
        """Who is to be asked, in any order."""
        return random.sample(sorted(self._holders[part]), len(self._holders[part]))

    def kept_from_us(self, missing: Collection[int]) -> tuple[list[int], float]:
        """Of the missing shares those whose mean is to be asked for, and when there may be others
        (monotonic time).
        """
        silence_s, now = self._setup.deadlines.silence_s, time.monotonic()
        due = {
            part: max(since + silence_s / 2, self._came_at.get(part, -math.inf) + silence_s)
            for part, since in self._since.items()
            if part in missing
        }
        kept = [part for part, at in due.items() if at <= now]
        return kept, min((at for at in due.values() if at > now), default=math.inf)

    def given_by(self, part: int, holder: str) -> None:
        """One that was asked gave it. The blame is its reducer's if that gives it to us itself, or
        the one's that says that it has it from there; where nobody knows it is nobody's.
        """
        sender = self._setup.sender(part)
        known = sender == self._setup.shares[part].reducer or sender in self._holders[part]
        silence_s = self._setup.deadlines.silence_s
        silent = self._came_at.get(part, -math.inf) + silence_s <= time.monotonic()
        if known and silent and sender not in (holder, self._setup.me):
            self.passed_by.add(sender)

    def in_vain(self, part: int, asked: Collection[str]) -> None:
        """These do not hold it, whatever they said."""
        self._holders[part] -= set(asked)
        if not self._holders[part]:
            self._since.pop(part, None)
