"""Takes one send from the training loop to its end: committed, or undone. Apart from
coordinator.py, which has many cares: this is one send's life.

A state machine, driven by the coordinator's thread:

    waiting    until shortly before its group's time, and until this peer is on the newest record
               (or, alone, may commit alone)
    running    the averager looks for the group and exchanges; where others have a newer record, and
               so a group of another plan, it gives that up: the send is waiting again
    retrying   attempt 0 was void; attempt 1 has its own time
    open       undecided: members are asked, and void is presumed after a record lifetime
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.matchmaking import MatchmakingException

from dilocox.dht.errors import DilocoxError
from dilocox.dht.manifest_sections import NO_GROUP_S
from dilocox.dht.names import shown_peer
from dilocox.dht.records import MAX_DECLARATION_LIFETIME_S
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import AveragerStuck, StageAverager
from dilocox.peer.averaging.events import EventQueue, Voided
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.averaging.matchmaking import LATE_GROUP_S
from dilocox.peer.rounds.group import (
    AttemptResult,
    ExchangeOrder,
    GroupRefused,
    Plan,
    TooFew,
    tokens_cap,
)
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import SendFacts, stage_codec
from dilocox.peer.rounds.standing import (
    VOTING_RECORDS,
    credits,
    of_last_rounds,
    sitting_out,
    voters,
)
from dilocox.peer.rounds.vote_count import AloneWatch, Verdict

logger = logging.getLogger(__name__)

LOOKED_AHEAD = 3  # searches of the DHT that a group may take to find itself, beside its least time
LONGEST_LEAD_S = 30.0
# No node keeps the word of a peer that looks for a group longer ahead of the group's time: where an
# exchange may take hours, a second attempt begins with that, and not at once.
MOST_AHEAD_S = MAX_DECLARATION_LIFETIME_S - 60.0
FIRST_GROUPS = 2  # that wait for all that say that they train, where all are new
STUCK_VOIDS = 3  # in a row, without a new record meanwhile
STRAY_LIFETIMES = 4  # of records, for which it waits for peers that went on where nobody follows
TAKEN_S = 900.0  # and longer, where the operator's archive may be about to take what they have
GROUP_OVER = "the group's time is over"
BOTH_VOID = "both attempts were void"
UNHEARD = "no peer has a record of it: it counts as void"
SLACK_S = 15.0  # beyond all deadlines of an attempt: the averaging process hangs
FROZEN_S = 3.0  # ticks come every tenth of a second: after such a gap this machine slept


@dataclass
class _Job:
    round: int
    scheduled_at: float  # run time
    facts: SendFacts
    attempt: int = 0
    abort: bytes = b""
    blamed: tuple[str, ...] = ()
    # after which record its first attempt was, and the peers that this one had missed since
    unreliable: tuple[str, frozenset[str]] = "", frozenset()
    future: Future[AttemptResult] | Future[AttemptResult | None] | None = None
    limit: float = 0.0  # monotonic time: of the state the job is in
    undecided: bool = False
    states_taken: int = 0  # by the training loop, when it took this send
    resumed: bool = False  # from before a restart: its attempt is not known to the averager
    asked_at: float = 0.0
    nobody_came: bool = False  # to its group
    looks_until: float = 0.0  # monotonic time: for its group
    given_up: Future[Any] | None = None  # whose group it looks for no longer
    plan: Plan | None = None  # of its first attempt, after the newest record
    encoding: Future[float] | None = None


class ExchangeDriver:
    """At most one send is under way; `sent_round` names it.

    Attributes:
        alone: whether this peer may commit without others. voids: sends that came to nothing.
    """

    def __init__(
        self,
        local: LocalPeer,
        averager: StageAverager,
        events: EventQueue,
        chain: ChainFollower,
    ):
        deadlines = local.manifest.deadlines
        self._local = local
        self._averager = averager
        self._events = events
        self._chain = chain
        self._clock = local.clock
        self._deadlines = deadlines
        self.plan = RoundPlan(local.manifest, stage_codec(local.manifest, local.layout))
        self._job: _Job | None = None
        self._last_exchange_s = 0.0
        self.encoding_s = 0.0  # that the newest send took to encode before its group met
        self._ticked_at = self._clock.monotonic()
        self.alone = AloneWatch(
            record_lifetime_s=deadlines.record_lifetime_s, heartbeat_s=deadlines.heartbeat_s
        )
        self.voids = 0
        self._in_vain = "", 0  # the newest record, and how many sends were void since
        self._strays: dict[str, tuple[float, bool]] = {}  # since when (monotonic), whether known
        self._not_waited_for = frozenset[str]()  # of them
        # that record, and peers missed since, or not heard to vote, where nothing was committed
        self._unreliable: tuple[str, frozenset[str]] = "", frozenset()
        # the record, and the peers that gave others a mean of its exchange and this peer none
        self._passed_by: tuple[str, frozenset[str]] = "", frozenset()
        self._waited_in_vain = 0  # sends in a row, whose group others did not come to

    @property
    def sent_round(self) -> int | None:
        return None if self._job is None else self._job.round

    @property
    def undecided(self) -> bool:
        """Whether a send is under way."""
        return self._job is not None

    @property
    def stuck(self) -> bool:
        """Whether the sends of this peer come to nothing on the record that it has."""
        digest, count = self._in_vain
        return digest == self._chain.head.digest and count >= STUCK_VOIDS

    @property
    def lacks_record(self) -> bool:
        """Whether it is about to look for a group, or does, and has no record of the round before
        and gets none: others may have one, and so a group of another plan."""
        job = self._job
        if job is None or job.undecided or self._chain.head.round >= job.round - 1:
            return False
        late_s = self._clock.time() - job.scheduled_at
        looks = -LONGEST_LEAD_S < late_s < self._deadlines.group_s
        return looks and not self._chain.busy

    def rivals(self, view: SwarmView) -> frozenset[str]:
        """The others of the stage without which this peer does not commit alone.

        Anybody can say that it trains. So new peers do not count where this peer is not new; and
        where all are new, none does once they failed to come again and again.
        """
        known = self._credits(self._counted(view))
        if self._waited_in_vain >= FIRST_GROUPS and max(known.values()) < VOTING_RECORDS:
            return frozenset()
        return voters(known) - {self._local.me}

    def _counted(self, view: SwarmView) -> tuple[str, ...]:
        """The peers that this one must reckon with."""
        return tuple(peer for peer in view.counted() if peer not in self._not_waited_for)

    def _look_for_strays(self, view: SwarmView) -> None:
        """A peer that went on from our record with one that nobody else takes comes to no group any
        more: it comes back when the operator's archive has another one. So the wait for it ends.
        """
        found, now = self._chain.strays(view) if self.stuck else {}, self._clock.monotonic()
        self._strays = {
            peer: (self._strays[peer][0] if peer in self._strays else now, known)
            for peer, known in found.items()
        }
        least_s = STRAY_LIFETIMES * self._deadlines.record_lifetime_s
        self._not_waited_for = frozenset(
            peer
            for peer, (since, known) in self._strays.items()
            if now - since > least_s + (TAKEN_S if known else 0.0)
        )

    def _credits(self, peers: Iterable[str]) -> dict[str, int]:
        """In how many records each of them was, as the newest one says."""
        last = self._chain.last_record
        return credits(peers, last.standings, last.round + 1) if last else dict.fromkeys(peers, 0)

    @property
    def exchanging(self) -> bool:
        """Whether the averager is at work, so that nothing else may use the buffers."""
        return self._job is not None and self._job.future is not None

    def submit(
        self, round_number: int, facts: SendFacts, *, scheduled_at: float, states_taken: int
    ) -> None:
        """A send was taken and is on disk; its message lies in the shared buffer.

        `states_taken`: how many states of others the training loop had taken before it.
        """
        self._job = _Job(
            round=round_number, scheduled_at=scheduled_at, facts=facts, states_taken=states_taken
        )

    def resume(self, round_number: int, tokens: int) -> None:
        """A send from before a restart: its group is gone, so it can only be asked about."""
        facts = SendFacts(tokens=tokens)
        self._job = _Job(
            round=round_number, scheduled_at=self._clock.time(), facts=facts, resumed=True
        )
        self._leave_open(self._job)

    def closed_by_chain(self, round_number: int) -> None:
        """A record of this round or a later one was applied: the chain has decided the send."""
        if self._job is not None and self._job.round <= round_number:
            self._job = None

    def tick(
        self, view: SwarmView, *, meets_at: Callable[[int], float | None], search_s: float
    ) -> None:
        """Go on with the send that is under way.

        meets_at: the time of a round's group as it is known now. search_s: what a search of the DHT
        takes.

        Raises:
            AveragerStuck: the averaging process hangs.
        """
        self._look_for_strays(view)
        job, gap_s = self._job, self._clock.monotonic() - self._ticked_at
        self._ticked_at += gap_s
        if job is None:
            return
        if job.states_taken != self._chain.states_taken and job.future is None:
            self._job = None  # another state was taken since, and the loop undoes what it had sent
            return
        if gap_s > FROZEN_S:  # the averaging process slept too, and may answer yet
            job.limit += gap_s
        if job.future is not None:
            looks = self._clock.monotonic() < job.looks_until
            if looks and job.given_up is not job.future and self._chain.behind(view):
                job.given_up = job.future
                self._averager.give_up_group()
            self._advance(job, job.future)
        elif job.undecided:
            if not self._chain.delivering:
                self._ask(job, view)
        else:
            if job.attempt == 0 and (earlier := meets_at(job.round)) is not None:
                job.scheduled_at = min(job.scheduled_at, earlier)
            due = self._chain.head.round < job.round  # else its record is here
            if due and not (self._chain.busy or self._chain.behind(view)):
                self._plan(job)
            lead_s = self._deadlines.matchmaking_s + LOOKED_AHEAD * search_s
            lead_s = min(lead_s, LONGEST_LEAD_S)
            if job.attempt:  # its time is when all must know that the first was void; most know now
                lead_s = MOST_AHEAD_S
            starts_at = job.scheduled_at - lead_s
            if not self._chain.busy and self._clock.time() >= starts_at:
                self._try_to_start(job, view)

    def _plan(self, job: _Job) -> Plan:
        """What its group will agree on; what does not need the group is encoded from then on."""
        head, last = self._chain.head, self._chain.last_record
        if job.plan is None or job.plan.previous != head.digest:
            job.plan = Plan(
                run=self._local.run,
                rules=self._local.manifest.rules,
                stage=self._local.stage,
                round=job.round,
                attempt=0,
                ranks=self.plan.ranks_after(last),
                layout=self._local.layout.digest,
                previous=head.digest,
            )
            job.encoding = self._averager.encode(job.plan, last)
        elif job.encoding and job.encoding.done() and not job.encoding.exception():
            self.encoding_s = job.encoding.result()
        return job.plan

    # ---- starting --------------------------------------------------------------------------------
    def _try_to_start(self, job: _Job, view: SwarmView) -> None:
        late = self._clock.time() - job.scheduled_at
        if self._chain.head.round >= job.round:
            return  # the record of this round is here and will be applied
        if self._chain.behind(view):
            if late > 0:
                self._void(job, "behind the others at the scheduled time")
            return
        counted = self._counted(view)
        alone = len(counted) == 1 or (job.nobody_came and not self.rivals(view))
        if alone and not self.alone.may_commit(self._clock.monotonic()):
            if late > 2 * self._deadlines.record_lifetime_s:
                self._void(
                    job,
                    "no bootstrap answers, so this peer cannot know whether others train its stage",
                )
            return
        # others may be as late: while they look for each other, this one can be among them
        if not alone and late > self._deadlines.group_s:
            self._void(job, GROUP_OVER)
            return
        dial_out = {peer for peer, record in view.stage.items() if record.client_mode}
        self._start(job, counted, dial_out, alone=alone)

    def _start(
        self, job: _Job, counted: tuple[str, ...], dial_out: set[str], *, alone: bool
    ) -> None:
        local, deadlines, last = self._local, self._deadlines, self._chain.last_record
        contributors = () if last is None else tuple(m.peer for m in last.members)
        recent = () if last is None else of_last_rounds(last.standings, last.round)
        # a peer that had just come need not be there: it may have come for that alone
        recent_voters = tuple(sorted(voters(self._credits(recent))))
        if alone or (last is None and self._waited_in_vain >= FIRST_GROUPS):
            # anybody can say that it trains, and stay away: then a peer that comes begins the run,
            # and of two that begin it the operator's archive takes one
            counted = (local.me,)
        known = self._credits(counted)
        plan = replace(self._plan(job), attempt=job.attempt)
        if not job.attempt:
            job.unreliable = self._unreliable
        on, names = job.unreliable
        unreliable = names if on == plan.previous else frozenset[str]()
        of_record, passed_by = self._passed_by
        named = unreliable | (passed_by if of_record == plan.previous else frozenset[str]())
        often = self._credits(named)
        proven = {peer for peer in voters(known) if known[peer]} - dial_out
        sitting = sitting_out(() if last is None else last.standings, job.round)
        doubtful = proven & (unreliable | sitting)
        # of two halves that a cut parted neither is to follow its own side alone
        leaders = proven - doubtful if 2 * len(doubtful) < len(proven) else proven
        expected = set(counted) - set(job.blamed)
        due_s = job.scheduled_at - self._clock.time()
        matchmaking_s = max(due_s + NO_GROUP_S, deadlines.group_s)
        order = ExchangeOrder(
            plan=plan,
            scheduled_at=job.scheduled_at,
            matchmaking_limit_s=matchmaking_s,
            tokens=job.facts.tokens,
            **(job.facts.times | {"exchange_s": self._last_exchange_s}),
            tokens_cap=tokens_cap(local.manifest),
            counted=counted,
            # While somebody is new, not all know of all: then the group waits for its time.
            expected=len(expected) if expected <= set(contributors) else None,
            # any other one could gather all, and never begin
            leaders=tuple(sorted(leaders)),
            recent_voters=recent_voters,
            anchor_before=self._chain.anchor_sha256,
            last=last,
            alone=alone,
            abort=job.abort,
            blamed=job.blamed,
            # a ticket has room for some: not for a crowd before one that has a vote
            unreliable=tuple(sorted(named, key=lambda peer: (-often[peer], peer))),
        )
        logger.debug(
            "round %d, attempt %d: looking for the group of %s, due in %.1f s",
            job.round,
            job.attempt,
            ", ".join(map(shown_peer, counted)),
            job.scheduled_at - self._clock.time(),
        )
        try:
            job.future = self._averager.exchange(order)
        except (TimeoutError, FutureTimeout) as error:
            raise AveragerStuck(f"round {job.round}: the averaging process is stuck") from error
        limit_s = matchmaking_s + LATE_GROUP_S + SLACK_S + deadlines.attempts_s
        job.limit = self._clock.monotonic() + limit_s
        job.looks_until = self._clock.monotonic() + matchmaking_s

    # ---- ending ----------------------------------------------------------------------------------
    def _advance(
        self, job: _Job, future: Future[AttemptResult] | Future[AttemptResult | None]
    ) -> None:
        if not future.done():
            # a question has a deadline of its own, and may be asked just before the limit
            asks_s = 3 * self._deadlines.silence_s + SLACK_S if job.undecided else 0.0
            if self._clock.monotonic() > job.limit + asks_s:
                raise AveragerStuck(f"round {job.round}: the averaging process does not answer")
            return
        job.future = None
        try:
            result = future.result(timeout=1.0)
        except DilocoxError:
            raise
        except (GroupRefused, AllreduceException, MatchmakingException) as error:
            logger.debug("round %d: no group: %s", job.round, error)
            if future is job.given_up:
                logger.debug("round %d: others have a newer record; taking that first", job.round)
                return
            if isinstance(error, GroupRefused):
                self._waited_in_vain += isinstance(error, TooFew)
                self._void(job, f"no group: {error}")
                return
            self._waited_in_vain += not job.nobody_came
            if self.alone.may_commit(self._clock.monotonic()) and not job.nobody_came:
                job.nobody_came = True  # a new peer may have joined another time
                return
            self._void(job, "no group: this peer and the others did not find each other in time")
            return
        except (Exception, asyncio.CancelledError):  # hivemind hands on the latter as a result
            logger.warning("round %d: the exchange broke off; asking the others", job.round)
            logger.debug("how it broke off", exc_info=True)
            result = None
        else:
            if result is None and not job.resumed:  # the averager knows of no such attempt
                self._void(job, "no exchange took place")
                return
        if (
            result is None
            or result.verdict is Verdict.UNDECIDED
            # the record comes through the chain, if at all
            or (result.verdict is Verdict.COMMITTED and not result.logged)
        ):
            if not job.undecided:
                self._miss(job, () if result is None else result.missed)
                self._leave_open(job)
        elif result.verdict is Verdict.COMMITTED:
            self._waited_in_vain = 0
            self._passed_by = result.digest, frozenset(result.missed)
            self._last_exchange_s = result.seconds + result.codec_s
            self._chain.committed(job.round, result.seconds, result.matchmaking_s)
        else:
            self._miss(job, result.missed)
            if job.attempt == 0:
                self._retry(job, result)
            else:
                self._void(job, BOTH_VOID)

    def _miss(self, job: _Job, peers: Iterable[str]) -> None:
        (on, names), digest = self._unreliable, "" if job.plan is None else job.plan.previous
        self._unreliable = digest, (names if on == digest else frozenset()).union(peers)

    def _retry(self, job: _Job, result: AttemptResult) -> None:
        job.attempt, job.abort, job.blamed, job.undecided = 1, result.abort, result.blamed, False
        job.scheduled_at += result.limit_s + self._deadlines.vote_s
        logger.info("round %d: the first attempt was void; trying once more", job.round)

    def _leave_open(self, job: _Job) -> None:
        job.undecided = True
        job.limit = self._clock.monotonic() + self._deadlines.record_lifetime_s
        logger.info("round %d: this peer heard no decision; asking the others for it", job.round)

    def _ask(self, job: _Job, view: SwarmView) -> None:
        """The record of a large stage comes for many minutes: while it does, nothing is void."""
        now, chain = self._clock.monotonic(), self._chain
        if now > job.limit and not (chain.busy or chain.behind(view)):
            self._void(job, UNHEARD, certain=False)
        elif now - job.asked_at > self._deadlines.heartbeat_s / 2:
            job.asked_at = now
            job.future = self._averager.settle(job.round, job.attempt)

    def _void(self, job: _Job, reason: str, *, certain: bool = True) -> None:
        self.voids += 1
        # left out, or without a group, it has not seen since which peer is at fault
        if reason not in (BOTH_VOID, UNHEARD):
            self._unreliable = "", frozenset()
        if reason != GROUP_OVER:  # to which a single head that rings too early can bring it
            (on, count), digest = self._in_vain, self._chain.head.digest
            self._in_vain = digest, count + 1 if on == digest else 1
        self._job = None
        self._events.put(Voided(round=job.round, reason=reason, certain=certain))
