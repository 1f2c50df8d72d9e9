"""One attempt of one round's exchange, as one member of the group lives it.

An exchange has one phase or two (compression/stage_codec.py). In each, a member *pushes* its parts,
encoded, to the reducers of its row, these push their row's mean to each other, column by column,
and every share's mean is encoded once and the same bytes reach all (grid.py), so that all members
end with the same record. A member's vector of the second phase is made of the means of the first.
hivemind's own all-reduce hangs on a member that freezes and reports success when a part is missing;
here every call has its deadline, neighbours watch each other by heartbeat, and the round is
committed only by a majority of signed votes on the digest of the record (vote_count.py).

A phase has the time that most members need to compute, and its share of the exchange's. It bounds
how long reducers wait for parts and for other rows, so that slow members are left out, and when all
are asked for a mean that has not come: at its end, of the last phase before that for those that are
not on their way. What others hold and nobody brings is asked for sooner (held_means.py). A member
that got its means of the first phase too late to be counted in the second can still reduce, and
vote.

A member hears of deaths from those that it watches, and from the votes of those that gave up: two
that missed the same peer are believed, one alone may be cut off itself. A member sends its vote to
its row, and its row's votes to those opposite it in other rows; one that still lacks some asks all
others in turn, again and again.

This file knows no network: it talks through `GroupCalls`, and is told what arrives by `on_part`,
`on_row`, `on_mean` and `on_votes`. It runs in one event loop; the codec runs in a one-thread pool
beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from dilocox.compression.group_quantization import NotEncodable, PayloadRefused
from dilocox.compression.stage_codec import StageEncoder
from dilocox.peer.rounds.ballots import Ballots
from dilocox.peer.rounds.group import AttemptResult, AttemptSetup, Mean, ShareRefused
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.held_means import HeldMeans
from dilocox.peer.rounds.live_group import LiveGroup
from dilocox.peer.rounds.record import digest_of
from dilocox.peer.rounds.shares import Shares, assemble_record, encode
from dilocox.peer.rounds.signed_means import WORD_BYTES, MeanSeal
from dilocox.peer.rounds.vote_count import Verdict

logger = logging.getLogger(__name__)

# Of a phase's time a reducer waits so long for parts, and, where there are several rows, so long
# for those and for the other rows; the rest is for the means.
PARTS_SHARE = 0.6
PARTS_SHARE_OF_ROWS, ROWS_SHARE = 0.4, 0.65
MEANS_SHARE = 0.8  # of the last phase's, after which a mean that nobody sends is asked for
FETCH_ROUNDS = 2  # how often everybody is asked for a mean whose reducer is gone
ASKED_AT_ONCE = 16  # members, other ones each time, how an undecided vote ended
VOTES_PAUSE_S = 0.25  # a row's votes go to the other rows together, if they come so soon


class Attempt:
    """One member's side of one attempt; `run` returns within the two deadlines of its setup."""

    def __init__(
        self,
        setup: AttemptSetup,
        *,
        encoder: StageEncoder,
        transport: GroupCalls,
        ballots: Ballots,
        pool: Executor,
    ):
        self._setup = setup
        self._encoder = encoder
        self._transport = transport
        self.ballots = ballots
        self._started = time.monotonic()
        self._limits = setup.deadlines
        # of each phase: when its parts begin to move, once they are computed, and it should end
        self._spans = [(self._started + a, self._started + b) for a, b in setup.phase_spans_s()]
        self._end = self._spans[-1][1]
        self._codec_s = 0.0
        self._group = LiveGroup(setup, transport, pool)
        self._shares = Shares(
            setup, self._group.compute, MeanSeal(ballots.identity, ballots.ballot)
        )
        self._held = HeldMeans(setup, [end for _, end in self._spans])
        self._words: dict[str, bytes] = {}  # of all means, as others hold them, by member
        self.running = False
        self._told: set[str] = set()  # members of our row whose votes the other rows have from us
        self._waited_out = False  # the exchange's time is over and means are missing
        self._forgotten = False
        self.record: bytes | None = None  # as this member made it, for those that lack parts
        self.digest: str | None = None

    @property
    def over(self) -> bool:
        """Whether nobody asks for its means any more."""
        return time.monotonic() > self._end + 2 * self._limits.vote_s

    def forget(self) -> None:
        """Free means and record, which are as large as an update: the attempt is long over, and
        kept for its votes.
        """
        self._forgotten, self.record = True, None
        self._shares.means.clear()

    # ---- what others tell us ---------------------------------------------------------------------
    @property
    def members(self) -> tuple[str, ...]:
        return self._group.members

    def has_part(self, part: int, kind: str) -> bool:
        """Whether the vectors are split into more parts (`kind`: part), or shares (row, mean), and
        are taken still.
        """
        if self._forgotten:
            return False
        if kind == "part":
            return part in self._setup.columns
        return kind in ("row", "mean") and self._shares.known(part)

    def max_bytes(self, part: int, kind: str) -> int:
        """The most bytes that a payload of this part may have (`kind`: part, row, mean)."""
        return self._setup.max_bytes(part, kind)

    def check_sender(self, peer: str, part: int, kind: str) -> None:
        """Raise ShareRefused unless this peer may send this (`kind`: part, row, mean) to us."""
        match kind:
            case "part":
                self._shares.check_sender(peer, part)
            case "row":
                self._shares.check_row(peer, part)
            case _:
                if self._setup.sender(part) != peer:
                    raise ShareRefused(f"the mean of part {part} does not come from {peer}")

    def bytes_came(self, peer: str, part: int, kind: str, count: int, size: int) -> None:
        """So many bytes of this (`kind`: part, row, mean) are here, of so many, from a peer that
        `check_sender` lets send it.
        """
        self._group.heard(peer)
        if kind == "mean":
            self._held.bytes_came(part, count, size)

    async def on_part(self, peer: str, column: int, payload: bytes) -> None:
        """A member's values of a column that we average; refused, it leaves the member out."""
        try:
            await self._shares.add_part(peer, column, payload)
        finally:
            self._group.notify()

    async def on_row(self, peer: str, mean: Mean) -> None:
        """A row's mean of a share that we average; refused, it leaves the row out."""
        try:
            await self._shares.add_row(peer, mean)
        finally:
            self._group.notify()

    async def on_mean(self, peer: str, mean: Mean) -> None:
        """An averaged share from the one that brings it."""
        if not self.has_part(mean.part, "mean"):
            raise ShareRefused(f"there is no part {mean.part}")
        self.check_sender(peer, mean.part, "mean")
        try:
            await self._take_mean(mean)
        except (PayloadRefused, ShareRefused):
            self._shares.lied[mean.part] = peer
            raise

    async def _take_mean(self, mean: Mean) -> None:
        try:
            if await self._shares.add_mean(mean):
                self._hand_on(mean)
        finally:
            self._group.notify()

    def on_votes(self, votes: Sequence[bytes]) -> None:
        """Signed votes; ValueError for the first that is not of this attempt: those after it are
        not looked at, a signature takes a while.
        """
        known, refused = self.ballots.voted(), None
        for vote in votes:
            try:
                self.ballots.receive(vote)
            except ValueError as error:
                refused = error
                break
        self._group.notify()
        # those of our row that only dial out do not hear each other
        dial_out = set(self._group.dial_out)
        for voter in (self.ballots.voted() - known) & dial_out:
            self._tell(dial_out - {voter}, {voter})
        if refused is not None:
            raise refused

    def on_words(self, peer: str, words: object) -> None:
        """Which means a member holds; ValueError if that is no member's, or not of this attempt."""
        size = WORD_BYTES * len(self._setup.shares)
        if peer not in self.members or not isinstance(words, bytes) or len(words) != size:
            raise ValueError(f"{peer} tells what are no words of the means of this attempt")
        if self._held.hear(peer, words):
            self._words.setdefault(peer, words)
        self._group.notify()

    def _tell(self, peers: Collection[str], voters: Collection[str]) -> None:
        votes = self.ballots.bytes_of(voters)
        for peer in peers:
            call = self._group.call(self._limits.vote_s, self._transport.send_votes, peer, votes)
            self._group.spawn(call, outlives=True)

    def mean(self, part: int) -> Mean | None:
        return self._shares.means.get(part)

    async def checked_mean(self, part: int) -> Mean | None:
        """The averaged part, for members that ask for it.

        One that is being checked is waited for: the caller may have nobody else to ask.
        """
        await self._group.until(lambda: not self._shares.coming(part), self._end)
        return self.mean(part)

    # ---- the exchange ----------------------------------------------------------------------------
    async def run(self) -> AttemptResult:
        """Exchange, vote, decide. Never raises for what another member does."""
        self.running = True
        try:
            self._group.watch_neighbours()
            for column in self._shares.columns:
                self._group.spawn(self._reduce(column))
            self._group.spawn(self._ask_holders())
            if self._group.opposite:
                self._group.spawn(self._tell_other_rows())
            record = await self.exchange_parts()
            return await self._decide(record)
        finally:
            self.running = False
            self._group.cancel()
            self._shares.give_up()

    async def exchange_parts(self) -> bytes | None:
        """The record; None if a mean cannot be had or the attempt is void."""
        last = len(self._setup.phases) - 1
        earlier: list[Tensor] = []
        for phase in range(last + 1):
            self._group.spawn(self._send_parts(phase, tuple(earlier)))
            if not await self._collect(phase):
                return None
            if phase < last:
                self._group.spawn(self._tell_words())
                earlier.append(await self._group.compute(self._shares.vector, phase))
        return await self._group.compute(assemble_record, self._setup, dict(self._shares.means))

    async def _send_parts(self, phase: int, earlier: tuple[Tensor, ...]) -> None:
        setup = self._setup
        try:
            began = time.monotonic()
            vector = await self._group.compute(self._encoder.vector, phase, earlier)
            self._codec_s += time.monotonic() - began
            self._shares.own[phase] = vector
            for column in setup.columns:
                span = setup.span(column)
                if setup.phase_of(column) != phase or span.start == span.stop:
                    continue
                codec = setup.phases[phase].codec
                payload = await self._group.compute(encode, codec, vector[span])
                collector = setup.collector(column)
                if collector == setup.me:
                    with suppress(ShareRefused):  # the phase's time is over for us too
                        await self.on_part(setup.me, column, payload)
                else:
                    self._push(self._give_part, collector, column, payload)
        except NotEncodable as error:
            logger.warning("the others average this round without this peer's update: %s", error)

    async def _give_part(self, peer: str, column: int, payload: bytes) -> None:
        await self._transport.push_part(peer, column, payload)
        self._shares.taken.add(column)

    async def _reduce(self, column: int) -> None:
        """Average a column over our row, and our share of it over all rows."""
        setup, shares = self._setup, self._shares
        phase = setup.phase_of(column)
        starts, ends = self._spans[phase]
        share_of_time = PARTS_SHARE_OF_ROWS if len(setup.grid.rows) > 1 else PARTS_SHARE
        due = starts + (ends - starts) * share_of_time
        await self._group.until(lambda: shares.awaited(column) <= self._gone, due)
        row = await shares.reduce(column)
        self._group.notify()
        for part in setup.shares_of(column):
            share = setup.shares[part]
            if share.numel and share.reducer != setup.me:
                mean = await shares.row_mean(part, row)
                self._push(self._transport.push_row, share.reducer, mean)
        due = starts + (ends - starts) * ROWS_SHARE
        for part in setup.shares_of(column):
            if setup.shares[part].reducer == setup.me and setup.shares[part].numel:
                await self._group.until(
                    lambda part=part: shares.awaited_rows(part) <= self._gone, due
                )
                mean = await shares.combine(part)
                self._group.notify()
                if mean is not None:
                    self._hand_on(mean)

    def _hand_on(self, mean: Mean) -> None:
        """Push a mean to those that get it from us: our column, if we made it, and our row."""
        setup, made = self._setup, self._setup.shares[mean.part].reducer == self._setup.me
        if setup.collector(setup.column_of(mean.part)) != setup.me:
            return
        for peer in {*self._group.row, *(self._group.column if made else ())} - self._unreached:
            # who has a slow link needs it also when the others have all and the round is decided
            self._push(self._transport.push_mean, peer, mean, outlives=True)

    async def _collect(self, phase: int) -> bool:
        """Wait for a phase's means; False if one cannot be had or the attempt is void.

        Where others have committed already, their means are still under way.
        """
        (starts, due), end = self._spans[phase], self._end
        if ends_all := due == end:
            due = starts + (end - starts) * MEANS_SHARE
        asked, asked_late, again_at = Counter[int](), set[int](), 0.0
        while missing := self._shares.missing(phase):
            lost = missing & self._lost()
            asked = Counter({part: asked[part] for part in lost})  # whose reducer is heard again: 0
            hopeless = any(asked[part] >= FETCH_ROUNDS for part in lost)
            if hopeless or self.ballots.decision.verdict is Verdict.VOID:
                return False
            now = time.monotonic()
            if now >= end:
                self._waited_out = True
                return False
            late = missing if now >= due else set[int]()
            moving = {part for part in late if ends_all and self._held.moves(part)}
            wanted = late - moving - asked_late
            # not at once again: what its reducer gave others may still be on its way to them
            elsewhere = lost | (missing & self._cut_off())
            if now >= again_at and elsewhere:
                again_at = now + self._limits.silence_s / 2
                wanted |= elsewhere
            for part in sorted(wanted):
                asked[part] += part in lost
                await self._ask_for_mean(part)
            asked_late |= wanted & late
            if not wanted:
                until = min(end, now + self._limits.silence_s) if late else due
                await self._group.change(min(until, again_at) if elsewhere else until)
        return True

    @property
    def _gone(self) -> set[str]:
        """The members that are dead as far as one can know."""
        return self._group.dead | self.ballots.missed_by_several() - {self._setup.me}

    @property
    def _unreached(self) -> set[str]:
        """Those of them that nothing is sent to: who is only silent may have a thin line."""
        return self._gone - (self._group.dead - self._group.left)

    def _lost(self) -> set[int]:
        """The shares whose reducer is gone, or sent a mean that is none."""
        gone, lied = self._gone, self._shares.lied
        return {
            part
            for part, share in enumerate(self._setup.shares)
            if share.reducer in gone or lied.get(part) == share.reducer
        }

    def _cut_off(self) -> set[int]:
        """The shares whose mean would come to us through one that is gone, or lied."""
        gone, lied = self._gone, self._shares.lied
        return {
            part
            for part in range(len(self._setup.shares))
            if part in lied or self._setup.sender(part) in gone
        }

    # ---- the vote --------------------------------------------------------------------------------
    async def settle(self) -> AttemptResult:
        """After an undecided end: ask the members how they, and those they heard, voted."""
        asked = random.sample(self._nearest, min(len(self._nearest), ASKED_AT_ONCE))
        await asyncio.gather(*(self._ask_for_votes(peer) for peer in asked))
        return await self._result(time.monotonic() + self._limits.silence_s)

    async def _decide(self, record: bytes | None) -> AttemptResult:
        self.record = record
        # both this and a vote on its way to the disk may take longer than others wait for a word
        compute = self._group.compute
        self.digest = None if record is None else await compute(digest_of, record)
        if record is not None:
            await self._compare_means()
        unlike = self._shares.unlike() - {self._setup.me}
        if unlike:
            logger.warning(
                "this peer votes against the average of %s: it lacks this peer's values",
                ", ".join(sorted(unlike)),
            )
        if two_faced := self._shares.two_faced:
            logger.warning(
                "%s sent different averages to different peers", ", ".join(sorted(two_faced))
            )
        agreed = record is not None and not unlike and not two_faced
        missed = () if agreed else tuple(sorted(self._missed()))
        vote = await compute(self.ballots.sign, self.digest if agreed else None, missed)
        self.ballots.receive(vote)
        self._group.notify()
        group, send, vote_s = self._group, self._transport.send_votes, self._limits.vote_s
        sending = [group.spawn(group.call(vote_s, send, peer, [vote])) for peer in group.row]
        # a member that gives up early hears the others once they, too, have given up or are done
        deadline = self._end + vote_s
        asking = group.spawn(self._ask_for_decision())
        await group.until(self._all_heard, deadline)
        asking.cancel()
        result = await self._result(deadline)
        self._tell_now()
        if sending:  # a vote that is under way decides the round for others
            await asyncio.wait(sending, timeout=max(0.0, deadline - time.monotonic()))
        return result

    async def _compare_means(self) -> None:
        """Wait until more than half of the voters near us hold our means, and of the rows opposite,
        or a reducer is found that gave somebody other ones.

        One that is gone, aborted or voted otherwise does not count, unless it is being compared
        with. A member that waits in vain until the exchange ends votes for its means.
        """
        words = await self._tell_words()
        lines = [set(self._group.row), set(self._group.opposite)]
        near = [line & self._setup.voters for line in lines]
        compared = dict[str, asyncio.Task[None]]()
        while not self._shares.two_faced and time.monotonic() < self._end:
            alike = {peer for peer, theirs in self._words.items() if theirs == words}
            alike |= self.ballots.voters_for(self.digest or "")
            for peer in self._words.keys() - alike - compared.keys():
                compared[peer] = self._group.spawn(self._compare_with(peer, words))
            under_way = {peer for peer, task in compared.items() if not task.done()}
            given_up = (self._gone | (self.ballots.voted() - alike)) - under_way
            enough = [2 * (len(line & alike) + 1) > len(line - given_up) + 1 for line in near]
            if all(enough) or self.ballots.decision.verdict is not Verdict.UNDECIDED:
                return
            await self._group.change(self._end)

    async def _tell_words(self) -> bytes:
        """Tell those near us which means we hold."""
        words = await self._group.compute(self._shares.words)
        for peer in {*self._group.row, *self._group.opposite} - self._unreached:
            self._push(self._transport.send_words, peer, words, outlives=True)
        return words

    async def _compare_with(self, peer: str, words: bytes) -> None:
        fetch = partial(self._mean_of, peer)
        await self._shares.compare_words(words, self._words[peer], fetch)
        self._group.notify()

    async def _mean_of(self, peer: str, part: int) -> Mean | None:
        """The mean of a share as this member has it."""
        wanted = peer, part, partial(self._group.heard, peer)
        fetch, limit_s = self._transport.fetch_mean, self._remaining_s()
        return await self._group.call_while_heard(limit_s, fetch, *wanted)

    def _all_heard(self) -> bool:
        """Whether the round is decided, or no further vote can come."""
        decided = self.ballots.decision.verdict is not Verdict.UNDECIDED
        return decided or self._setup.voters <= self.ballots.voted() | self._group.dead

    async def _ask_for_decision(self) -> None:
        """Ask all again and again: the vote that decides may reach one after it was asked."""
        others = random.sample(self._nearest, len(self._nearest))
        for turn, peer in enumerate(itertools.cycle(others), len(others)):
            await asyncio.sleep(self._limits.silence_s / 4 * min(4, turn // len(others)))
            self._group.spawn(self._ask_for_votes(peer))

    async def _ask_for_votes(self, peer: str) -> None:
        ballot, ask = self.ballots.ballot, self._transport.ask_votes
        question = peer, ballot.round, ballot.attempt
        votes = await self._group.call(self._limits.silence_s, ask, *question)
        for vote in votes or ():
            with suppress(ValueError):
                self.ballots.receive(vote)
        self._group.notify()

    async def _tell_other_rows(self) -> None:
        """Pass our row's votes on, together as far as they come together."""
        row, heard = set(self._setup.grid.row(self._setup.me)), self.ballots.voted
        end = self._end + 2 * self._limits.vote_s
        while await self._group.until(lambda: bool(self._untold), end):
            await self._group.until(
                lambda: row <= heard() | self._gone, time.monotonic() + VOTES_PAUSE_S
            )
            self._tell_now()

    @property
    def _untold(self) -> set[str]:
        """The members of our row whose votes the other rows have not from us."""
        return self.ballots.voted() & set(self._setup.grid.row(self._setup.me)) - self._told

    def _tell_now(self) -> None:
        voters = self._untold
        self._told |= voters
        if voters:
            self._tell(self._group.opposite, voters)

    async def _result(self, deadline: float) -> AttemptResult:
        """Read the verdict; fetch the committed record from its voters where it is not here."""
        verdict, chosen = self.ballots.decision.verdict, self.ballots.decision.digest
        committed = verdict is Verdict.COMMITTED
        # before anything is waited for, since a member that votes twice then counts no more
        certificate = None if chosen is None else self.ballots.certificate()
        if chosen is not None and chosen != self.digest:
            self.record = await self._fetch_record(chosen, deadline)
        return AttemptResult(
            verdict=verdict,
            record=self.record if chosen is not None else None,
            digest=chosen or "",
            certificate=certificate,
            abort=self.ballots.abort(),
            blamed=self.ballots.blamed() if verdict is Verdict.VOID else (),
            missed=tuple(sorted(self._held.passed_by if committed else self._told_missing())),
            members=self._group.members,
            seconds=time.monotonic() - self._started - self._codec_s,
            codec_s=self._codec_s,
            limit_s=self._end - self._started,
        )

    # ---- pieces ----------------------------------------------------------------------------------
    @property
    def _nearest(self) -> list[str]:
        """The members that we can call: those of our row, then those opposite, then the others."""
        near = [*self._group.row, *self._group.opposite, *self._group.others]
        return list(dict.fromkeys(near))

    def _push(
        self, function: Callable[..., Awaitable[None]], *args: Any, outlives: bool = False
    ) -> None:
        """Send something beside all else, in the time that is left of the exchange."""
        call = self._group.call(self._remaining_s(), function, *args)
        self._group.spawn(call, outlives=outlives)

    async def _ask_in_turn(
        self,
        peers: Iterable[str],
        fetch: Callable[[str], Awaitable[None]],
        here: Callable[[], bool],
        deadline: float,
    ) -> None:
        """Fetch something from these members until it is here, from the next one beside those that
        are slow to give it.

        The pauses double: a member that gives bytes by drops delays nobody for long, and what comes
        through a thin link is not downloaded many times at once.
        """
        group, pause_s = self._group, self._limits.silence_s / 2
        asks: list[asyncio.Task[None]] = []
        for peer in peers:
            asks.append(ask := group.spawn(fetch(peer)))
            until = min(deadline, time.monotonic() + pause_s)
            await group.until(lambda ask=ask: here() or ask.done(), until)
            if here() or time.monotonic() >= deadline:
                break
            pause_s *= 1 if ask.done() else 2
        await group.until(lambda: here() or all(ask.done() for ask in asks), deadline)
        for ask in asks:
            ask.cancel()

    async def _ask_for_mean(self, part: int) -> None:
        setup, means = self._setup, self._shares.means
        column = setup.column_of(part)
        reducers = [setup.reducer_in(column, row) for row in range(len(setup.grid.rows))]
        able = dict.fromkeys([setup.shares[part].reducer, *reducers, *self._group.row])
        others = set(self._group.others)
        # a member that dies meanwhile is not asked any more
        peers = (peer for peer in able if peer in others and peer not in self._gone)
        fetch = partial(self._fetch_mean, part)
        await self._ask_in_turn(peers, fetch, lambda: part in means, self._end)

    async def _fetch_mean(self, part: int, peer: str) -> None:
        # a large share takes long through a thin link; a peer that gives nothing is not waited for
        mean = await self._mean_of(peer, part)
        if mean is not None and mean.part == part:
            with suppress(PayloadRefused, ShareRefused):
                await self._take_mean(mean)
        self._group.notify()

    async def _ask_holders(self) -> None:
        """Ask for what others hold and nobody brings us, one mean after the other."""
        phases, means = range(len(self._setup.phases)), self._shares.means
        while time.monotonic() < self._end:
            missing = set[int]().union(*map(self._shares.missing, phases))
            kept, again_at = self._held.kept_from_us(missing)
            part = next((each for each in kept if not self._shares.coming(each)), None)
            if part is None:
                await self._group.change(min(again_at, self._end))
                continue
            holders, due = self._held.holders(part), self._spans[self._setup.shares[part].phase][1]
            there = [peer for peer in holders if peer not in self._gone]
            logger.debug("asking %d members for part %d, which they hold", len(there), part)
            fetch = partial(self._fetch_held, part)
            await self._ask_in_turn(there, fetch, lambda part=part: part in means, due)
            if part not in means:
                self._held.in_vain(part, holders)

    async def _fetch_held(self, part: int, peer: str) -> None:
        lacked = part not in self._shares.means
        await self._fetch_mean(part, peer)
        if lacked and part in self._shares.means:
            self._held.given_by(part, peer)

    async def _fetch_record(self, digest: str, deadline: float) -> bytes | None:
        voters, found = self.ballots.voters_for(digest), list[bytes]()
        deadline = max(deadline, time.monotonic() + 0.1)

        async def fetch(peer: str) -> None:
            limit_s = deadline - time.monotonic()
            data = await self._group.call(limit_s, self._transport.fetch_record, peer, digest)
            if data is not None and await self._group.compute(digest_of, data) == digest:
                found.append(data)
            self._group.notify()

        gone = self._gone
        nearest = [peer for peer in self._nearest if peer in voters]
        peers = sorted(nearest, key=lambda peer: peer in gone)
        await self._ask_in_turn(peers, fetch, lambda: bool(found), deadline)
        return found[0] if found else None

    def _told_missing(self) -> set[str]:
        """The members that this one's abort names, and those to blame that there is no decision."""
        undecided = self.ballots.decision.verdict is Verdict.UNDECIDED
        silent = self._setup.voters - self.ballots.voted() if undecided else set[str]()
        return {*self.ballots.missed(), *silent} - {self._setup.me}

    def _missed(self) -> set[str]:
        """The members that this one missed: dead, refused, and reducers whose mean never came.

        Where the attempt failed before its time was over, a mean that is not here yet is nobody's
        fault: a repeated attempt would leave out a sound reducer.
        """
        silent = self._shares.silent() if self._waited_out else set[str]()
        blamed = self._shares.refused() | self._shares.unlike()
        return (silent | self._group.dead | blamed) - {self._setup.me}

    def _remaining_s(self) -> float:
        return max(0.1, self._end - time.monotonic())
