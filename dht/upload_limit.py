"""How fast a volunteer lets bytes leave, and which of them go first."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

CHUNK_BYTES = 64 * 1024
# An asker gives up after 30 s of silence; eight uploads that send a chunk so rarely take a fifth of
# 1 Mbit/s.
HELD_BACK_S = 20.0
THIN_SHARE = 0.25  # of the time it may take: one that takes longer is held up by its links

MOST_PUSHES = 300  # that are remembered


class _Push(NamedTuple):
    """Bytes that left between two times of the monotonic clock."""

    began: float
    ended: float
    sent: int

    @property
    def bytes_per_s(self) -> float:
        return self.sent / max(self.ended - self.began, 1e-3)


def _most_at_once(pushes: Sequence[_Push]) -> float:
    """The most bytes a second that left in several pushes together."""
    at = [(each.began + each.ended) / 2 for each in pushes]
    return max(sum(p.bytes_per_s for p in pushes if p.began <= t <= p.ended) for t in at)


class UploadLimit:
    """A token bucket: `spend` waits until the bytes fit into the volunteer's limit.

    Bytes of an exchange go first, and while one is under way hardly any others: a joiner that
    downloads a model through a thin link must not make the rounds of all others miss their
    deadlines. What waits for the end of an exchange waits for `held_back_s` at most, or its asker
    would give up. On a link that an exchange has shown to be thin (`measured`) the others are paced
    between exchanges, too: p2pd and the kernel take megabytes at once, which would still drain
    through it when the next exchange begins.
    """

    def __init__(self, bytes_per_s: float | None, *, held_back_s: float = HELD_BACK_S):
        self._rate, self._held_back_s = bytes_per_s, held_back_s
        self._others_rate: float | None = None
        self._free_at: dict[str, float] = defaultdict(float)  # by whose rate it is
        self._exchanges = 0  # under way
        self._pushes: deque[_Push] = deque(maxlen=MOST_PUSHES)
        self._idle = asyncio.Event()

    def measured(self, seconds: float, *, limit_s: float) -> None:
        """A committed exchange took so long of the time that it may take.

        That of all is as long as the thinnest line of any, so how fast this one is say the bytes
        that left it (`pushing`).
        """
        pushes, thin = list(self._pushes), seconds > THIN_SHARE * limit_s
        self._pushes.clear()
        slowest = CHUNK_BYTES / self._held_back_s  # an asker must hear of us before it gives up
        self._others_rate = max(_most_at_once(pushes) / 2, slowest) if thin and pushes else None

    @contextmanager
    def pushing(self, count: int) -> Generator[None]:
        """While so many bytes of an exchange leave; it ends when they are there."""
        began = time.monotonic()
        with self.exchange():
            yield
        self._pushes.append(_Push(began, time.monotonic(), count))

    @contextmanager
    def exchange(self) -> Generator[None]:
        """While something of an exchange is under way."""
        self._exchanges += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._exchanges -= 1
            if not self._exchanges:
                self._idle.set()

    async def spend(self, count: int, *, first: bool) -> None:
        """Wait until `count` more bytes may leave; all but `first` ones wait for an idle link."""
        if self._exchanges and not first:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._held_back_s)
        if self._others_rate is not None and not first:
            await self._pace("others", count / self._others_rate)
        if self._rate is None:
            return
        while not first and (wait_s := self._free_at["all"] - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        await self._pace("all", count / self._rate)

    async def _pace(self, whose: str, span_s: float) -> None:
        """Wait until what was let through before has left, and take the next `span_s`."""
        now = time.monotonic()
        start = max(now, self._free_at[whose])
        self._free_at[whose] = start + span_s
        if start > now:
            await asyncio.sleep(start - now)
