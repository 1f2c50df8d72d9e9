"""The other members of a group as one member reaches them: every call and every wait has its
deadline, and a member without a sign of life counts as dead. Apart from exchange.py, whose phases
take all that for granted.

A heartbeat waits in line behind all that its sender sent before: two peers have one connection,
whose queue and windows take megabytes, and of a thin line that many share each gets little (27 s
without a heartbeat were measured at 40 kB/s). So the bytes themselves are signs of life, too, and a
silent member counts as dead only until it is heard again.

What an attempt (exchange.py) wants of them is its own matter; nothing here knows what is exchanged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from dilocox.dht.rpc import CallRefused
from dilocox.peer.rounds.group import AttemptSetup
from dilocox.peer.rounds.group_calls import GroupCalls

logger = logging.getLogger(__name__)

SILENT_PIECES = 4
MAX_WATCHED = 7  # neighbours that a member watches in its row; larger groups share the work

T = TypeVar("T")


class LiveGroup:
    """The members of one attempt as this one reaches them; lives in one event loop."""

    def __init__(self, setup: AttemptSetup, transport: GroupCalls, pool: Executor):
        self._setup = setup
        self._transport = transport
        self._pool = pool
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outliving: set[asyncio.Task[Any]] = set()  # held, or they would be collected
        self.members = tuple(member.peer for member in setup.members)
        deaf = setup.clients if setup.me in setup.clients else frozenset[str]()
        # those this member can call: of two that only dial out neither can call the other
        self.others = tuple(peer for peer in self.members if peer not in {setup.me} | deaf)
        grid = setup.grid
        self.row, self.column, self.opposite = (
            tuple(peer for peer in peers if peer in set(self.others))
            for peers in (grid.row(setup.me), grid.column(setup.me), grid.opposite(setup.me))
        )
        self.dial_out = tuple(peer for peer in self.row if peer in setup.clients)
        self.dead: set[str] = set()  # as it looks now
        self.left: set[str] = set()  # of them those whose heartbeats ended: the others are silent
        self._heard_at: dict[str, float] = {}  # when bytes came from a member last (monotonic)
        self._over = False

    def spawn(self, work: Awaitable[T], *, outlives: bool = False) -> asyncio.Task[T]:
        """Start work beside this; `outlives`: it goes on, in its own deadline, after `cancel`."""
        task, kept = asyncio.ensure_future(work), self._outliving if outlives else self._tasks
        kept.add(task)
        # one that was cancelled holds, by its traceback, the attempt and all that it received
        task.add_done_callback(kept.discard)
        task.add_done_callback(_report)
        return task

    def cancel(self) -> None:
        """End all work that does not outlive the attempt."""
        self._over = True
        for task in tuple(self._tasks):
            task.cancel()

    def watch_neighbours(self) -> None:
        """Begin to watch the members that are next to this one in its row, and in its column."""
        me, grid = self._setup.me, self._setup.grid
        watched = set[str]()
        for line in (grid.row(me), grid.column(me)):
            at = line.index(me) if line else 0
            ring = [peer for peer in line[at + 1 :] + line[:at] if peer in self.others]
            watched.update(ring[:MAX_WATCHED])
        for peer in sorted(watched):
            self.spawn(self._watch(peer))

    async def _watch(self, peer: str) -> None:
        """Count a member as dead while nothing comes from it, and when its heartbeats end.

        The silence is waited for in pieces: of a time in which this process stood still itself no
        more than a piece counts against others.
        """
        beats = aiter(self._transport.heartbeats(peer))
        beat: asyncio.Future[None] | None = None
        silent, heard_at = 0, self._heard_at.get(peer)
        try:
            while not self._over:
                beat = beat or asyncio.ensure_future(anext(beats))
                await asyncio.wait([beat], timeout=self._setup.deadlines.silence_s / SILENT_PIECES)
                before, heard_at = heard_at, self._heard_at.get(peer)
                silent = silent + 1 if heard_at == before else 0
                if beat.done():
                    beat.result()
                    beat, silent = None, 0
                if silent == SILENT_PIECES:
                    logger.debug("%s counts as dead: it is silent", peer)
                    self.dead.add(peer)
                    self.notify()
                elif not silent and peer in self.dead:
                    logger.debug("%s is heard again", peer)
                    self.dead.remove(peer)
                    self.notify()
        except (ConnectionError, asyncio.TimeoutError, StopAsyncIteration) as error:
            logger.debug("%s counts as dead: %r", peer, error)
            self.dead.add(peer)
            self.left.add(peer)
            self.notify()
        finally:
            if beat is not None:
                beat.cancel()

    def heard(self, peer: str) -> None:
        """Bytes of the exchange came from a member."""
        self._heard_at[peer] = time.monotonic()

    async def call(
        self, limit_s: float, function: Callable[..., Awaitable[T]], peer: str, *args: Any
    ) -> T | None:
        """A call to a member; None where it could not be reached, or sent what makes no sense."""

        async def answer() -> T | None:
            # caught here: a task that is cancelled as it fails would be told as a fault of ours
            try:
                return await function(peer, *args)
            except (ConnectionError, CallRefused, asyncio.TimeoutError) as error:
                logger.debug("%s not reached: %r", peer, error)
                return None

        try:
            return await asyncio.wait_for(answer(), limit_s)
        except asyncio.TimeoutError:
            logger.debug("%s not reached within %.1f s", peer, limit_s)
            return None

    async def call_while_heard(
        self, limit_s: float, function: Callable[..., Awaitable[T]], peer: str, *args: Any
    ) -> T | None:
        """As `call`, but no longer than bytes come from the member (`heard`), in this call or in
        another one: its answer waits in line behind what it sends us already.
        """
        asked_at, silence_s = time.monotonic(), self._setup.deadlines.silence_s
        call = asyncio.ensure_future(self.call(limit_s, function, peer, *args))
        try:
            while not call.done():
                silent_at = max(asked_at, self._heard_at.get(peer, asked_at)) + silence_s
                if (left_s := silent_at - time.monotonic()) <= 0:
                    logger.debug("%s gives nothing", peer)
                    return None
                await asyncio.wait([call], timeout=left_s)
            return call.result()
        finally:
            call.cancel()

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the pool, so that heartbeats go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def notify(self) -> None:
        """Something happened that somebody may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until a condition holds; False where it does not by the deadline (monotonic)."""
        while not condition():
            if time.monotonic() >= deadline:
                return False
            await self.change(deadline)
        return True

    async def change(self, deadline: float) -> None:
        """Wait for the next `notify`, until the deadline (monotonic) at most."""
        # One event for each change, never cleared: of several that wait one would clear it before
        # `wait_for` has begun to wait for another.
        changed = self._changed
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), deadline - time.monotonic())


def _report(task: asyncio.Task[Any]) -> None:
    """Log what nobody would hear of: a fault of ours, for those of others are waited out."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of the exchange failed", exc_info=error)
