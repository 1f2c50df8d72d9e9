"""How fast a volunteer lets bytes leave, and which of them go first."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 64 * 1024
# An asker gives up after 30 s of silence; eight uploads that send a chunk so rarely take a fifth of
# 1 Mbit/s.
HELD_BACK_S = 20.0
THIN_SHARE = 0.25  # of the time it may take: one that takes longer is held up by its links


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
        self._idle = asyncio.Event()

    def measured(self, sent_bytes: int, seconds: float, *, limit_s: float) -> None:
        """A committed exchange sent so many bytes and took so long of the time that it may take."""
        thin = sent_bytes > 0 and seconds > THIN_SHARE * limit_s
        slowest = CHUNK_BYTES / self._held_back_s  # an asker must hear of us before it gives up
        self._others_rate = max(sent_bytes / seconds / 2, slowest) if thin else None

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
