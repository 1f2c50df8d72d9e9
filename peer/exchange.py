"""One attempt of one round's exchange, as one member of the group lives it.

Every member splits its flat message over the reducers, *pushes* each reducer its encoded part,
and every reducer averages its part, encodes the mean once and pushes the same bytes to all, so
that all members end with the same record. hivemind's own all-reduce hangs on a member that
freezes and reports success when a part is missing; here every call has its deadline, members
watch each other by heartbeat, and the round is committed only by a majority of signed votes on
the digest of the record (PROTOCOL section 3).

This file knows no network: it talks through `Transport`, and is told what arrives by `on_part`,
`on_mean` and `on_vote`. It runs in one event loop; the codec runs in a one-thread pool beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from dilocox.compression.codec import PayloadRefused
from dilocox.peer.ballots import Ballots
from dilocox.peer.members import AttemptResult, AttemptSetup, Mean, ShareRefused, Transport
from dilocox.peer.record import digest_of, record_bytes
from dilocox.peer.reduction import Reduction, assemble_record, decode, encode
from dilocox.peer.vote import Verdict

logger = logging.getLogger(__name__)

MAX_WATCHED = 7  # neighbours that a member watches; larger groups share the work
PARTS_SHARE = 0.6  # of the exchange's time a reducer waits for parts; the rest is for the means
FETCH_ROUNDS = 2  # how often everybody is asked for a mean whose reducer is gone

T = TypeVar("T")


class Attempt:
    """One member's side of one attempt; `run` returns within the two deadlines of its setup."""

    def __init__(
        self,
        setup: AttemptSetup,
        *,
        message: Tensor,
        transport: Transport,
        ballots: Ballots,
        pool: Executor,
    ):
        self._setup = setup
        self._message = message
        self._transport = transport
        self.ballots = ballots
        self._pool = pool
        self._started = time.monotonic()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        # They outlive `run`, each in its own deadline: a member with a slow link still needs them
        # when the others have all and the round is decided.
        self._mean_pushes: set[asyncio.Task[Any]] = set()
        self._weight = {member.peer: member.tokens for member in setup.members}
        self._others = [member.peer for member in setup.members if member.peer != setup.me]
        self._dead: set[str] = set()
        self._refused: set[str] = set()  # whose part was malformed
        self._liars: set[str] = set()  # whose mean was malformed
        self._offered: set[str] = set()  # whose part came, sound or not
        self._means: dict[int, Mean] = {}
        self._waited_out = False  # the exchange's time is over and means are missing
        self._own_part = setup.reducers.index(setup.me) if setup.me in setup.reducers else None
        self._reduction = Reduction(setup.codec, self._weight, self._part_size(self._own_part))
        self._reduced = False
        self.record: bytes | None = None  # as this member made it, for those who lack parts
        self.digest: str | None = None

    # ---- what others tell us ---------------------------------------------------------------------
    def has_part(self, part: int) -> bool:
        """Whether the vector is split into more parts than that."""
        return 0 <= part < len(self._setup.parts)

    def expected_bytes(self, part: int) -> int:
        """The length that a payload of this part must have."""
        return record_bytes(self._setup.codec, self._part_size(part))

    async def on_part(self, peer: str, part: int, payload: bytes) -> None:
        """A member's share of the part that we average; refused, it leaves the member out."""
        if peer not in self._weight or part != self._own_part:
            raise ShareRefused(f"part {part} is not ours to average for {peer}")
        if peer in self._offered or self._reduced:
            raise ShareRefused(f"the part of {peer} is not waited for any more")
        self._offered.add(peer)
        try:
            await self._compute(self._reduction.add, peer, payload)
        except PayloadRefused:
            self._refused.add(peer)
            raise
        finally:
            self._changed.set()

    async def on_mean(self, peer: str, mean: Mean) -> None:
        """An averaged part from its reducer."""
        if not self.has_part(mean.part) or self._setup.reducers[mean.part] != peer:
            raise ShareRefused(f"part {mean.part} is not averaged by {peer}")
        try:
            await self._keep_mean(mean)
        except (PayloadRefused, ShareRefused):
            self._liars.add(peer)
            self._changed.set()
            raise

    def on_vote(self, vote: bytes) -> None:
        """A signed vote; ValueError if it is not one of this attempt."""
        self.ballots.receive(vote)
        self._changed.set()

    def mean(self, part: int) -> Mean | None:
        """The averaged part, for members that ask for it."""
        return self._means.get(part)

    # ---- the attempt -----------------------------------------------------------------------------
    async def run(self) -> AttemptResult:
        """Exchange, vote, decide. Never raises for what another member does."""
        try:
            for peer in self._neighbours():
                self._spawn(self._watch(peer))
            self._spawn(self._send_parts())
            if self._own_part is not None:
                self._spawn(self._reduce(self._own_part))
            record = await self._collect()
            return await self._decide(record)
        finally:
            for task in self._tasks - self._mean_pushes:
                task.cancel()

    async def _send_parts(self) -> None:
        setup = self._setup
        for index, reducer in enumerate(setup.reducers):
            if self._part_size(index) == 0:
                continue
            values = self._message[setup.parts[index]]
            payload = await self._compute(encode, setup.codec, values)
            if reducer == setup.me:
                await self.on_part(setup.me, index, payload)
            else:
                self._spawn(
                    self._attempt_call(
                        reducer,
                        setup.exchange_s,
                        self._transport.push_part(reducer, index, payload),
                    )
                )

    async def _reduce(self, part: int) -> None:
        """Average what arrived for our part by the deadline, and push the mean to everybody."""
        if self._part_size(part) == 0:
            return
        everyone = set(self._weight)
        await self._until(
            lambda: everyone <= self._reduction.in_sum | self._dead | self._refused,
            self._started + self._setup.exchange_s * PARTS_SHARE,
        )
        self._reduced = True
        mean = await self._compute(self._reduction.finish, part)
        if mean is None:
            return
        self._means[part] = mean
        self._changed.set()
        for peer in self._others:
            if peer not in self._dead:
                call = self._transport.push_mean(peer, mean)
                self._mean_pushes.add(
                    self._spawn(self._attempt_call(peer, self._remaining_s(), call))
                )

    async def _collect(self) -> bytes | None:
        """Wait for every part's mean; None if one cannot be had or the attempt is void.

        Where others have committed already, their means are still under way.
        """
        wanted = {index for index in range(len(self._setup.parts)) if self._part_size(index)}
        deadline = self._started + self._setup.exchange_s
        asked: dict[int, int] = {}
        while not wanted <= self._means.keys():
            gone = self._dead | self._liars
            orphans = {
                part for part in wanted - self._means.keys() if self._setup.reducers[part] in gone
            }
            hopeless = [part for part in orphans if asked.get(part, 0) >= FETCH_ROUNDS]
            if hopeless or self.ballots.decision.verdict is Verdict.VOID:
                return None
            for part in orphans:
                asked[part] = asked.get(part, 0) + 1
                await self._ask_for_mean(part)
            if not orphans:
                known = len(self._means), len(gone), len(self.ballots.voters())
                if not await self._until(
                    lambda known=known: (
                        known
                        != (
                            len(self._means),
                            len(self._dead | self._liars),
                            len(self.ballots.voters()),
                        )
                    ),
                    deadline,
                ):
                    self._waited_out = True
                    return None
        return await self._compute(assemble_record, self._setup, dict(self._means))

    async def settle(self) -> AttemptResult:
        """After an undecided end: ask every member how it, and those it heard, voted."""
        limit_s = self._setup.silence_s
        ballot = self.ballots.ballot
        for peer in self._others:
            asking = self._transport.ask_votes(peer, ballot.round, ballot.attempt)
            for vote in await self._attempt_call(peer, limit_s, asking) or ():
                with suppress(ValueError):
                    self.ballots.receive(vote)
        return await self._result(time.monotonic() + limit_s)

    async def _decide(self, record: bytes | None) -> AttemptResult:
        """Cast the one final vote and hear the others'."""
        setup = self._setup
        self.record = record
        self.digest = None if record is None else digest_of(record)
        vote = self.ballots.cast(self.digest, () if record else tuple(sorted(self._missed())))
        sending = [
            self._spawn(
                self._attempt_call(peer, setup.vote_s, self._transport.send_vote(peer, vote))
            )
            for peer in self._others
        ]
        deadline = time.monotonic() + setup.vote_s
        await self._until(
            lambda: (
                self.ballots.decision.verdict is not Verdict.UNDECIDED
                or set(self._weight) <= self.ballots.voters() | self._dead
            ),
            deadline,
        )
        result = await self._result(deadline)
        if sending:  # a vote that is under way decides the round for others
            await asyncio.wait(sending, timeout=max(0.0, deadline - time.monotonic()))
        return result

    async def _result(self, deadline: float) -> AttemptResult:
        """Read the verdict; who lacks the record that was committed fetches it from its voters."""
        verdict, chosen = self.ballots.decision.verdict, self.ballots.decision.digest
        if chosen is not None and chosen != self.digest:
            self.record = await self._fetch_record(chosen, deadline)
        return AttemptResult(
            verdict=verdict,
            record=self.record if chosen is not None else None,
            certificate=self.ballots.certificate() if chosen is not None else None,
            aborts=self.ballots.aborts(),
            members=tuple(self._weight),
            seconds=time.monotonic() - self._started,
        )

    # ---- pieces ----------------------------------------------------------------------------------
    async def _watch(self, peer: str) -> None:
        """Count a member as dead when its heartbeats stop, whatever the reason."""
        try:
            beats = aiter(self._transport.heartbeats(peer))
            while True:
                await asyncio.wait_for(anext(beats), self._setup.silence_s)
        except (ConnectionError, asyncio.TimeoutError, StopAsyncIteration) as error:
            logger.debug("%s counts as dead: %r", peer, error)
        self._dead.add(peer)
        self._changed.set()

    async def _ask_for_mean(self, part: int) -> None:
        limit_s = min(self._setup.silence_s, max(0.1, self._remaining_s()))
        for peer in self._others:
            if peer in self._dead or part in self._means:
                continue
            mean = await self._attempt_call(peer, limit_s, self._transport.fetch_mean(peer, part))
            if mean is not None and mean.part == part:
                with suppress(PayloadRefused, ShareRefused):
                    await self._keep_mean(mean)

    async def _fetch_record(self, digest: str, deadline: float) -> bytes | None:
        for peer in sorted(self.ballots.voters_for(digest) - {self._setup.me}):
            limit_s = max(0.1, deadline - time.monotonic())
            data = await self._attempt_call(
                peer, limit_s, self._transport.fetch_record(peer, digest)
            )
            if data is not None and digest_of(data) == digest:
                return data
        return None

    async def _keep_mean(self, mean: Mean) -> None:
        names = set(mean.contributors)
        if not names or not names <= set(self._weight) or sorted(names) != list(mean.contributors):
            raise ShareRefused("an averaged part names nobody, strangers, or somebody twice")
        if mean.part not in self._means:
            size = self._part_size(mean.part)
            await self._compute(decode, self._setup.codec, mean.payload, size)
            self._means.setdefault(mean.part, mean)
        self._changed.set()

    def _missed(self) -> set[str]:
        """Whom this member missed: the dead, the refused, and reducers whose mean never came.

        Where the attempt failed before its time was over, a mean that is not here yet is nobody's
        fault: a repeated attempt would leave out a sound reducer.
        """
        silent = {
            self._setup.reducers[index]
            for index in range(len(self._setup.parts))
            if self._waited_out and self._part_size(index) and index not in self._means
        }
        return (silent | self._dead | self._refused | self._liars) - {self._setup.me}

    def _neighbours(self) -> list[str]:
        names = [member.peer for member in self._setup.members]
        at = names.index(self._setup.me)
        return (names[at + 1 :] + names[:at])[:MAX_WATCHED]

    def _part_size(self, part: int | None) -> int:
        if part is None:
            return 0
        return self._setup.parts[part].stop - self._setup.parts[part].start

    def _remaining_s(self) -> float:
        return max(0.1, self._started + self._setup.exchange_s - time.monotonic())

    async def _attempt_call(
        self, peer: str, limit_s: float, call: Coroutine[Any, Any, T]
    ) -> T | None:
        """A call whose failure only means that this member could not be reached."""
        try:
            return await asyncio.wait_for(call, limit_s)
        except (ConnectionError, asyncio.TimeoutError) as error:
            logger.debug("%s not reached: %r", peer, error)
            return None

    async def _compute(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def _spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        while not condition():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining_s)
        return True
