"""One attempt of one round's exchange, as one member of the group lives it.

An exchange has one phase or two (compression/stage_codec.py). In each, every member splits its flat
vector over the reducers, *pushes* each reducer its encoded part, and every reducer averages its
part, encodes the mean once and pushes the same bytes to all, so that all members end with the same
record. A member's vector of the second phase is made of the means of the first. hivemind's own
all-reduce hangs on a member that freezes and reports success when a part is missing; here every
call has its deadline, members watch each other by heartbeat, and the round is committed only by a
majority of signed votes on the digest of the record (PROTOCOL section 3).

A phase has its share of the exchange's time. It bounds how long reducers wait for parts, so that
who is slow is left out, and when all are asked for a mean that has not come; a member that got its
means of the first phase too late to be counted in the second can still reduce, and vote.

This file knows no network: it talks through `Transport`, and is told what arrives by `on_part`,
`on_mean` and `on_vote`. It runs in one event loop; the codec runs in a one-thread pool beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from torch import Tensor

from dilocox.compression.codec import NotEncodable, PayloadRefused
from dilocox.peer.ballots import Ballots
from dilocox.peer.members import (
    AttemptResult,
    AttemptSetup,
    Encoder,
    Mean,
    ShareRefused,
    Transport,
)
from dilocox.peer.reach import Reach
from dilocox.peer.record import digest_of
from dilocox.peer.reduction import encode
from dilocox.peer.shares import Shares
from dilocox.peer.vote import Verdict

logger = logging.getLogger(__name__)

PARTS_SHARE = 0.6  # of a phase's time a reducer waits for parts; the rest is for the means
FETCH_ROUNDS = 2  # how often everybody is asked for a mean whose reducer is gone


class Attempt:
    """One member's side of one attempt; `run` returns within the two deadlines of its setup."""

    def __init__(
        self,
        setup: AttemptSetup,
        *,
        encoder: Encoder,
        transport: Transport,
        ballots: Ballots,
        pool: Executor,
    ):
        self._setup = setup
        self._encoder = encoder
        self._transport = transport
        self.ballots = ballots
        self._started = time.monotonic()
        self._reach = Reach(setup, transport, pool)
        self._shares = Shares(setup, self._reach.compute)
        self.running = False
        self._waited_out = False  # the exchange's time is over and means are missing
        self.record: bytes | None = None  # as this member made it, for those who lack parts
        self.digest: str | None = None

    # ---- what others tell us ---------------------------------------------------------------------
    def has_part(self, part: int) -> bool:
        """Whether the vectors are split into more parts than that."""
        return self._shares.known(part)

    def max_bytes(self, part: int, kind: str) -> int:
        """The most bytes that a payload of this part may have (`kind`: part, mean)."""
        return self._setup.max_bytes(part, kind)

    def check_sender(self, peer: str, part: int, kind: str) -> None:
        """Raise ShareRefused unless this peer may send this part (`kind`: part, mean) to us."""
        if kind == "mean" and self._setup.shares[part].reducer != peer:
            raise ShareRefused(f"part {part} is not averaged by {peer}")
        if kind == "part":
            self._shares.check_sender(peer, part)

    async def on_part(self, peer: str, part: int, payload: bytes) -> None:
        """A member's values of a part that we average; refused, it leaves the member out."""
        try:
            await self._shares.add_part(peer, part, payload)
        finally:
            self._reach.notify()

    async def on_mean(self, peer: str, mean: Mean) -> None:
        """An averaged part from its reducer."""
        if not self.has_part(mean.part):
            raise ShareRefused(f"there is no part {mean.part}")
        self.check_sender(peer, mean.part, "mean")
        try:
            await self._shares.add_mean(mean)
        except (PayloadRefused, ShareRefused):
            self._shares.lied.add(mean.part)
            raise
        finally:
            self._reach.notify()

    def on_vote(self, vote: bytes) -> None:
        """A signed vote; ValueError if it is not one of this attempt."""
        known = self.ballots.voters()
        self.ballots.receive(vote)
        self._reach.notify()
        self._pass_on(vote, self.ballots.voters() - known)

    def _pass_on(self, vote: bytes, voter: set[str]) -> None:
        """Those that only dial out do not hear each other."""
        if not voter or not voter <= set(self._reach.dial_out):
            return
        for peer in set(self._reach.dial_out) - voter:
            call = self._reach.call(self._setup.vote_s, self._transport.send_vote, peer, vote)
            self._reach.spawn(call, outlives=True)

    def mean(self, part: int) -> Mean | None:
        """The averaged part, for members that ask for it."""
        return self._shares.means.get(part)

    # ---- the exchange ----------------------------------------------------------------------------
    async def run(self) -> AttemptResult:
        """Exchange, vote, decide. Never raises for what another member does."""
        self.running = True
        try:
            self._reach.watch_neighbours()
            for part in self._shares.duties:
                self._reach.spawn(self._reduce(part))
            record = await self._exchange()
            return await self._decide(record)
        finally:
            self.running = False
            self._reach.cancel()

    async def _exchange(self) -> bytes | None:
        """The record; None if a mean cannot be had or the attempt is void."""
        last = len(self._setup.codecs) - 1
        earlier: list[Tensor] = []
        for phase in range(last + 1):
            self._reach.spawn(self._send_parts(phase, tuple(earlier)))
            if not await self._collect(phase):
                return None
            if phase < last:
                earlier.append(await self._reach.compute(self._shares.vector, phase))
        return await self._shares.record()

    async def _send_parts(self, phase: int, earlier: tuple[Tensor, ...]) -> None:
        setup = self._setup
        try:
            vector = await self._reach.compute(self._encoder.vector, phase, earlier)
            for part, share in enumerate(setup.shares):
                if share.phase != phase or not share.numel:
                    continue
                values = vector[share.start : share.stop]
                payload = await self._reach.compute(encode, setup.codecs[phase].send, values)
                if share.reducer == setup.me:
                    with suppress(ShareRefused):  # the phase's time is over for us too
                        await self.on_part(setup.me, part, payload)
                else:
                    self._push(self._transport.push_part, share.reducer, part, payload)
        except NotEncodable as error:
            logger.warning("the others average without this peer's message: %s", error)

    async def _reduce(self, part: int) -> None:
        """Average what arrived for our part by the deadline, and push the mean to everybody."""
        starts_s, ends_s = self._phase_s(self._setup.shares[part].phase)
        await self._reach.until(
            lambda: self._shares.awaited(part) <= self._reach.dead,
            self._started + starts_s + (ends_s - starts_s) * PARTS_SHARE,
        )
        mean = await self._shares.reduce(part)
        self._reach.notify()
        if mean is None:
            return
        for peer in self._reach.others:
            if peer not in self._reach.dead:
                # a member with a slow link still needs it when the others have all and the round
                # is decided
                self._push(self._transport.push_mean, peer, mean, outlives=True)

    async def _collect(self, phase: int) -> bool:
        """Wait for a phase's means; False if one cannot be had or the attempt is void.

        Where others have committed already, their means are still under way.
        """
        due = self._started + self._phase_s(phase)[1]
        end = self._started + self._setup.exchange_s
        asked: Counter[int] = Counter()
        while missing := self._shares.missing(phase):
            orphans = missing & self._orphans()
            hopeless = any(asked[part] >= FETCH_ROUNDS for part in orphans)
            if hopeless or self.ballots.decision.verdict is Verdict.VOID:
                return False
            now = time.monotonic()
            if now >= end:
                self._waited_out = True
                return False
            late = missing if now >= due else set[int]()
            wanted = orphans | {part for part in late if not asked[part]}
            for part in sorted(wanted):
                asked[part] += 1
                await self._ask_for_mean(part)
            if not wanted:
                await self._reach.until(self._news(), end if late else due)
        return True

    def _orphans(self) -> set[int]:
        """The shares whose reducer is dead, or sent a mean that is none."""
        shares = enumerate(self._setup.shares)
        return self._shares.lied | {
            part for part, share in shares if share.reducer in self._reach.dead
        }

    def _news(self) -> Callable[[], bool]:
        """Whether anything has happened since now that a collecting member looks at."""

        def seen() -> tuple[int, int, int]:
            return len(self._shares.means), len(self._orphans()), len(self.ballots.voters())

        known = seen()
        return lambda: seen() != known

    # ---- the vote --------------------------------------------------------------------------------
    async def settle(self) -> AttemptResult:
        """After an undecided end: ask every member how it, and those it heard, voted."""
        limit_s = self._setup.silence_s
        ballot = self.ballots.ballot
        for peer in self._reach.others:
            question = peer, ballot.round, ballot.attempt
            for vote in await self._reach.call(limit_s, self._transport.ask_votes, *question) or ():
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
            self._reach.spawn(self._reach.call(setup.vote_s, self._transport.send_vote, peer, vote))
            for peer in self._reach.others
        ]
        deadline = time.monotonic() + setup.vote_s
        await self._reach.until(
            lambda: (
                self.ballots.decision.verdict is not Verdict.UNDECIDED
                or set(self._reach.members) <= self.ballots.voters() | self._reach.dead
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
            members=self._reach.members,
            seconds=time.monotonic() - self._started,
        )

    # ---- pieces ----------------------------------------------------------------------------------
    def _push(
        self, function: Callable[..., Awaitable[None]], *args: Any, outlives: bool = False
    ) -> None:
        """Send something beside all else, in the time that is left of the exchange."""
        call = self._reach.call(self._remaining_s(), function, *args)
        self._reach.spawn(call, outlives=outlives)

    async def _ask_for_mean(self, part: int) -> None:
        limit_s = min(self._setup.silence_s, max(0.1, self._remaining_s()))
        for peer in self._reach.others:
            if peer in self._reach.dead or part in self._shares.means:
                continue
            mean = await self._reach.call(limit_s, self._transport.fetch_mean, peer, part)
            if mean is not None and mean.part == part:
                with suppress(PayloadRefused, ShareRefused):
                    await self._shares.add_mean(mean)

    async def _fetch_record(self, digest: str, deadline: float) -> bytes | None:
        for peer in sorted(self.ballots.voters_for(digest) & set(self._reach.others)):
            limit_s = max(0.1, deadline - time.monotonic())
            data = await self._reach.call(limit_s, self._transport.fetch_record, peer, digest)
            if data is not None and digest_of(data) == digest:
                return data
        return None

    def _missed(self) -> set[str]:
        """Whom this member missed: the dead, the refused, and reducers whose mean never came.

        Where the attempt failed before its time was over, a mean that is not here yet is nobody's
        fault: a repeated attempt would leave out a sound reducer.
        """
        silent = self._shares.silent() if self._waited_out else set[str]()
        return (silent | self._reach.dead | self._shares.refused()) - {self._setup.me}

    def _phase_s(self, phase: int) -> tuple[float, float]:
        """The seconds from the attempt's start at which a phase should begin and end."""
        borders = (0.0, *self._setup.phase_ends_s())
        return borders[phase], borders[phase + 1]

    def _remaining_s(self) -> float:
        return max(0.1, self._started + self._setup.exchange_s - time.monotonic())
