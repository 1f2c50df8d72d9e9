"""Follows the chain of a stage: applies its records in order, catches up, changes to a better
chain.

A peer that is behind takes the records that it lacks, or a state where that is fewer bytes.
Driven by the coordinator's thread. At most one thing is under way at a time, and nothing is while
an exchange runs: an outer step, a walk along another peer's log, the download of a state, or an
event that the training loop has not taken yet.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from dilocox.dht.errors import reason_of
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import CallRefused, PeerBusy, TooSlow
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import Applied, AveragerStuck, StageAverager
from dilocox.peer.averaging.events import Committed, Event, EventQueue, Resynced
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.chain.chain_client import (
    STATE_LIMIT_S,
    STATES_ASKED,
    AnchorDiffers,
    AnchorLost,
    AnchorWrong,
    ChainEnd,
    NoState,
    Reached,
    StateFile,
    TakenState,
    WantedState,
)
from dilocox.peer.chain.fork_choice import ClaimBook, Trust, holders
from dilocox.peer.chain.header_client import CountedRounds
from dilocox.peer.chain.record_check import STATE_BYTES
from dilocox.peer.os_process import counted
from dilocox.peer.rounds.record import RecordRefused, RoundRecord

logger = logging.getLogger(__name__)

WALK_LIMIT_S = STATE_LIMIT_S  # the averager ends two walks by itself before
PAUSE_AFTER_FAILURE_S = 1.0
MAX_SLOW = 5  # then it is our own line that is slow
PROVING_RECORDS = 2  # of a state: one names its anchor, the next what its momentum made of it
COUNTED_S = 1.0
MANY_ROUNDS = 100  # to catch up with so many takes a while


Claims = Mapping[str, ClaimRecord]


@dataclass(frozen=True, kw_only=True)
class _StateNeeded:
    """A state that this peer must take; records do not do.

    after_round: of no use are states of this round or an older one. fork_round: this peer's records
    after it are void. saves_bytes: records would do as well. or_initial: the initial weights will
    do, where nobody has a state yet.
    """

    after_round: int = -1
    fork_round: int | None = None
    saves_bytes: bool = False
    or_initial: bool = False


class ChainFollower:
    """Keeps this peer on the chain.

    Attributes:
        applied: the round of the record that the training loop has merged last.
        head, last_record: of the chain, the newest record without its means; None before the first.
        states_taken: from other peers. since_state: records applied after the last one.
        tokens_at_start: behind the chain up to the record that was merged when this peer started.
    """

    def __init__(
        self,
        local: LocalPeer,
        averager: StageAverager,
        events: EventQueue,
        *,
        applied: int,
        anchor_sha256: str,
        unsettled: Callable[[], Collection[int]] = tuple,
    ):
        """unsettled: rounds whose records may name this peer, as far as it knows."""
        self._local = local
        self._averager = averager
        self._log = log = local.open_log()
        self._events = events
        self._clock = local.clock
        self._unsettled = unsettled
        self._told: CountedRounds | None = None  # by the last walk
        self.applied = applied
        self.anchor_sha256 = anchor_sha256
        self._refresh()
        merged = log.header(applied) if applied >= 0 else None
        self.tokens_at_start = 0 if merged is None else merged.chain_tokens
        # by round: of its exchange, and until its group stood
        self._times: dict[int, tuple[float, float | None]] = {}
        self._work: Future[Any] | None = None
        self._on_done: Callable[[Any], None] = lambda _: None
        self._deadline = 0.0
        self._untaken: tuple[Event, Callable[[], None]] | None = None
        self._with_lease: Callable[[], None] | None = None  # what is to be done then
        self._not_before = 0.0
        self._state_needed: _StateNeeded | None = None
        self._state_bytes = STATE_BYTES * local.layout.numel
        self._no_state_before = 0.0  # monotonic: until then no state would save bytes
        self._record_lifetime_s = local.manifest.deadlines.record_lifetime_s
        self._wanted: ClaimRecord | None = None  # what was looked for last
        bootstraps = frozenset(local.dht.bootstraps)
        self._bootstraps = bootstraps | {local.witness}
        self._trust = Trust(
            me=local.me,
            witness=local.witness,
            stand_ins=bootstraps,
            record_lifetime_s=self._record_lifetime_s,
            now=local.clock.monotonic,
        )
        self._book = ClaimBook(self._trust)
        # of all claims, and until when: those that count on this record of ours
        self._counted: tuple[Claims, str, float, Claims] = {}, "", 0.0, {}
        self._follows = False  # since it took part in a record, or began
        self._asked = ""  # the peer that was asked for the last records or state
        self._donor, self.since_state = "", 0  # the peer that gave the last state
        # to this record, of a chain that is not ours yet, and until when that is believed
        self._contributors = "", frozenset[str](), 0.0
        self._slow: set[str] = set()  # donors that others may be faster than
        self.states_taken = 0

    @property
    def busy(self) -> bool:
        """Whether something is under way that must end before an exchange may start."""
        return self._work is not None or self.delivering

    @property
    def delivering(self) -> bool:
        """Whether a record or a state is on its way into the training loop, which may decide the
        send whose message the averager still reads."""
        waiting = self._untaken is not None or self._with_lease is not None
        return waiting or self.applied != self.head.round

    def behind(self, view: SwarmView) -> bool:
        """Whether somebody to be believed claims a record that this peer lacks, or may have the
        state it needs.
        """
        counting = self._counting(view)
        if self._state_needed is not None and self._donors(counting, self._state_needed):
            return True
        return self._best(counting) is not None

    def strays(self, view: SwarmView) -> dict[str, bool]:
        """The peers that claim more than our newest record, where none that is believed does, and
        the operator's archive stands where we do; and whether each may be believed later.
        """
        counting = self._counting(view).claims
        if not self._trust.witnessed(self.head.digest):
            return {}
        claimed = view.claims.items()
        ahead = {peer for peer, each in claimed if each.chain_tokens > self.head.chain_tokens}
        return {peer: self._trust.knows(peer) for peer in ahead - counting.keys()}

    def stands_on(self, digest: str, rules: int) -> bool:
        """Whether the record of this digest is in this chain, or one under these rules, which can
        only follow from it."""
        last = self.last_record
        return (last is not None and last.rules >= rules) or self._log.find(digest) is not None

    def committed(self, round_number: int, exchange_s: float, matchmaking_s: float | None) -> None:
        """The averager appended a record that this peer took part in."""
        self._times[round_number] = exchange_s, matchmaking_s
        self._follows = False
        self._refresh()

    def tick(self, view: SwarmView, *, exchanging: bool, sent_round: int | None = None) -> None:
        """Go on with what is under way, or begin the next thing that is due.

        sent_round: the one whose message lies in the shared buffer, while that send is undecided.
        """
        if self._untaken is not None:
            event, then = self._untaken
            if not event.taken.is_set():
                return
            self._untaken = None
            then()
        if self._work is not None:
            self._advance(self._work)
            return
        if self._with_lease is not None:
            if self._events.lease.take():
                begin, self._with_lease = self._with_lease, None
                begin()
            return
        if exchanging or self._clock.monotonic() < self._not_before:
            return
        view = self._counting(view)
        if self._state_needed is not None:
            self._begin_state(view, self._state_needed)
        elif self.applied != self.head.round:
            self._begin_apply(sent_round)
        else:
            self._begin_catch_up(view)

    # ---- beginning -------------------------------------------------------------------------------
    def _begin_apply(self, sent_round: int | None) -> None:
        following = next((number for number in self._log.rounds() if number > self.applied), None)
        if following is None:
            self._refresh()
            if self.head.round < self.applied:
                logger.error(
                    "alarm: the record behind these weights is missing; downloading others' weights"
                )
                self._state_needed = _StateNeeded(or_initial=True)
            return
        record = self._log.header(following)
        if record is None:
            return
        named = record.member(self._local.me) is not None
        with_own = named and sent_round == record.round
        self._with_lease = lambda: self._begin(
            self._averager.apply(record.round, with_own=with_own),
            lambda applied: self._applied(applied, record, with_own),
        )

    def _begin_catch_up(self, view: SwarmView) -> None:
        stated = self._wanted = self._best(view)
        if stated is None:
            return
        missing_bytes = self._missing_records(stated) * stated.record_bytes
        may_help = self._clock.monotonic() >= self._no_state_before
        limit_bytes = self._state_bytes if may_help else None
        unsettled = self._unsettled()
        # what became of those is in the headers, which come before any record
        if limit_bytes is not None and missing_bytes > limit_bytes and not unsettled:
            self._state_needed = _StateNeeded(after_round=self.applied, saves_bytes=True)
            self._begin_state(view, self._state_needed)
            return
        # any of those that claim it: one that is out of our reach must not keep us from the others
        holding = holders(view, stated.digest)
        peer = self._chosen(view, holding)
        asked = [peer, *self._trust.second(view.within_reach(holding), peer)]
        lacks = stated.round - self.head.round
        # what a spare lacks with each look, or of one round, the line that it was taken says
        told = lacks >= MANY_ROUNDS or (lacks > 1 and not self._follows)
        level, shown = logging.INFO if told else logging.DEBUG, view.shown(peer)
        self._follows = True
        logger.log(level, "catching up: %s behind; asking %s", counted(lacks, "round"), shown)
        self._begin(
            self._averager.catch_up(
                asked, stated.digest, limit_bytes=limit_bytes, back_to=min(unsettled, default=None)
            ),
            lambda reached: self._reached(reached, stated.digest),
            WALK_LIMIT_S,
        )

    def _missing_records(self, stated: ClaimRecord) -> int:
        """About how many lead from the newest one here to the one that is claimed: rounds that were
        void, or that a rollback took back, have none. Which is right, their headers say.
        """
        rounds, last = stated.round - self.head.round, self.last_record
        if last is None:
            return rounds
        tokens = stated.chain_tokens - self.head.chain_tokens
        return min(rounds, max(1, math.ceil(tokens / max(1, last.tokens))))

    def _begin_state(self, view: SwarmView, needed: _StateNeeded) -> None:
        donors, end = self._donors(view, needed), self._chain_end(view)
        if not donors:
            return
        if end is not None and not self._trust.has_chain:
            digest, contributors, until = self._contributors
            if digest != end.digest or self._clock.monotonic() > until:
                self._begin(
                    self._averager.contributors(end), lambda found: self._heard(end.digest, found)
                )
                return
            known = [peer for peer in donors if peer in contributors or self._trust.knows(peer)]
            donors = known or donors
        teller = end.teller if needed.or_initial and end is not None else ""
        from_start = bool(teller) and teller in self._bootstraps
        honest = self._book.donors(donors)
        if from_start and teller in donors and teller not in honest:
            honest.append(teller)  # nobody else gives the beginning
        untried = [donor for donor in honest if donor not in self._slow]
        hurry = bool(untried) and len(honest) > 1 and len(self._slow) < MAX_SLOW
        peer = self._chosen(view, untried if hurry else honest)
        logger.info("catching up: taking the newest weights from %s", view.shown(peer))
        others = [each for each in view.within_reach(honest) if each != peer]
        asked = [peer, *random.sample(others, min(len(others), STATES_ASKED - 1))]
        wanted = WantedState(
            after_round=needed.after_round,
            end=end,
            or_initial=from_start and self._book.all_in_vain(others),
            hurry=hurry,
        )
        future = self._averager.fetch_state(asked, wanted)
        self._begin(future, lambda found: self._got_state(found, needed))

    @property
    def _at_first_record(self) -> bool:
        """Whether the record to be applied is the chain's first one: then its anchor must be that
        of the initial weights, and those that this machine made are not."""
        if self.applied >= 0:
            return False
        first = self._log.header(min(self._log.rounds(), default=-1))
        return first is not None and self._log.find(first.previous) == -1

    def _chosen(self, view: SwarmView, peers: Sequence[str]) -> str:
        self._asked = self._book.chosen(view.within_reach(peers))
        return self._asked

    def _donors(self, view: SwarmView, needed: _StateNeeded) -> list[str]:
        """Peers that may have a state; after a fork those on our own chain are of no use."""
        forked = needed.fork_round is not None
        return [
            peer
            for peer, claim in view.claims.items()
            if peer != view.me and claim.round >= 0 and self._book.believed(claim)
            if not forked or self._log.find(claim.digest) is None
        ]

    def _chain_end(self, view: SwarmView) -> ChainEnd | None:
        """What a state must lead to that does not stand on a record of our own log."""
        witness, claim = self._local.witness, self._best(view)
        if not witness:
            return None
        if claim is None:  # nobody is ahead
            return ChainEnd(digest=self.head.digest, round=self.head.round, teller=witness)
        teller = self._trust.teller(holders(view, claim.digest))
        return ChainEnd(digest=claim.digest, round=claim.round, teller=teller)

    def _counting(self, view: SwarmView) -> SwarmView:
        """A crowd of keys may claim thousands: of one look it is reckoned once a second."""
        of, head, until, counting = self._counted
        now = self._clock.monotonic()
        if of is not view.claims or head != self.head.digest or now > until:
            counting = self._trust.counting(view, self._log, self.head).claims
            self._counted = view.claims, self.head.digest, now + COUNTED_S, counting
        return replace(view, claims=counting)

    def _best(self, view: SwarmView) -> ClaimRecord | None:
        other_chain = self._trust.other_chain(self._log, self.head)
        return self._book.best(view, self.head, other_chain)

    def _begin(
        self, future: Future[Any], on_done: Callable[[Any], None], limit_s: float = STATE_LIMIT_S
    ) -> None:
        self._work, self._on_done = future, on_done
        self._deadline = self._clock.monotonic() + limit_s

    # ---- ending ----------------------------------------------------------------------------------
    def _advance(self, work: Future[Any]) -> None:
        if not work.done():
            if self._clock.monotonic() > self._deadline:  # it may not write into the buffers later
                raise AveragerStuck("the averaging process does not end a download")
            return
        self._work = None
        try:
            result = work.result(timeout=1.0)
        except AnchorDiffers as error:
            logger.error("alarm: %s; taking a state from another peer", error)
            other_weights = isinstance(error, AnchorWrong) and self._at_first_record
            self._state_needed = _StateNeeded(or_initial=not other_weights)
            unproven = isinstance(error, AnchorWrong) and self.since_state < PROVING_RECORDS
            if unproven and self._donor:
                self._not_before = self._clock.monotonic() + self._book.lied(self._donor)
            if not isinstance(error, AnchorLost):
                self._events.lease.give_back()  # to be saved and validated meanwhile
        except NoState as error:
            logger.info("nobody has a newer state yet: %s", error)
            self._book.asked_in_vain(self._asked, error)
            if self._state_needed is not None and self._state_needed.saves_bytes:
                self._state_needed = None
                self._no_state_before = self._clock.monotonic() + self._record_lifetime_s
            self._not_before = self._clock.monotonic() + PAUSE_AFTER_FAILURE_S
        except TooSlow as error:
            logger.info("looking for a faster peer: %s", error)
            self._slow.add(self._asked)
            self._book.asked_in_vain(self._asked, error)
        except (ConnectionError, RecordRefused, CallRefused, asyncio.TimeoutError) as error:
            if isinstance(error, PeerBusy):
                logger.info("%s", error)
            else:
                reason = reason_of(error)
                logger.warning("catching up failed; trying again: %s", reason)
            self._book.asked_in_vain(self._asked, error)
            pause_s = 0.0
            # a state may be gigabytes over a line that breaks: that says nothing of the claim
            if self._state_needed is not None and isinstance(error, RecordRefused | CallRefused):
                pause_s = self._book.lied(self._asked)
            # a wrong state speaks against its donor, wrong ones from all against the claim
            if self._state_needed is None or pause_s:
                self._doubt(error)
            self._not_before = self._clock.monotonic() + max(pause_s, PAUSE_AFTER_FAILURE_S)
        else:
            self._on_done(result)

    def _applied(self, applied: Applied, record: RoundRecord, remainder: bool) -> None:
        self.since_state += 1
        exchange_s, matchmaking_s = self._times.pop(record.round, (None, None))
        event = Committed(
            record=record,
            digest=applied.digest,
            anchor_sha256=applied.anchor_sha256,
            remainder=remainder,
            exchange_s=exchange_s,
            matchmaking_s=matchmaking_s,
            payload_bytes=applied.payload_bytes,
        )
        self._hand_over(event, lambda: self._switched(record.round, applied.anchor_sha256))

    def _reached(self, reached: Reached, wanted: str) -> None:
        """wanted: digest of the record that was walked back from."""
        self._told = reached.told
        self._book.gave(self._asked)
        if reached.fork_round is None:
            if reached.too_far or reached.costly:
                self._state_needed = _StateNeeded(
                    after_round=self.applied, saves_bytes=reached.costly
                )
            self._refresh()
            return
        if self._trust.wins(wanted, reached, self._log, self.head):
            logger.error("alarm: %s", self._book.switching(wanted, reached))
            self._state_needed = _StateNeeded(fork_round=reached.fork_round, or_initial=True)
        else:
            if self._trust.witnessed(wanted):
                logger.error(
                    "alarm: the operator's archive is on another chain since round %d, which it "
                    "vouched for itself; staying on this one",
                    reached.fork_round,
                )
            self._book.ignore(wanted)  # it lost against ours
        self._not_before = self._clock.monotonic() + PAUSE_AFTER_FAILURE_S

    def _heard(self, digest: str, contributors: frozenset[str]) -> None:
        pause_s = math.inf if contributors else self._record_lifetime_s / 2  # it may answer then
        self._contributors = digest, contributors, self._clock.monotonic() + pause_s

    def _got_state(self, found: StateFile, needed: _StateNeeded) -> None:
        self._book.gave(self._asked)
        self._with_lease = lambda: self._begin(
            self._averager.take_state(found), lambda state: self._took_state(state, needed)
        )

    def _took_state(self, state: TakenState, needed: _StateNeeded) -> None:
        told = None if self._told is None else self._told.up_to(state.digest)
        event = Resynced(state=state, fork_round=needed.fork_round, told=told)
        self._state_needed, self.since_state = None, 0
        self._donor = self._asked if state.round >= 0 else ""
        self.states_taken += 1
        self._slow.clear()
        self._hand_over(event, lambda: self._switched(state.round, state.anchor_sha256))

    def _doubt(self, error: Exception) -> None:
        """What was looked for could not be had."""
        claim, before = self._wanted, self.head.round
        self._refresh()
        came = self.head.round > before
        if claim is not None and self._book.failed(claim.digest, error, came=came):
            logger.warning("no peer serves the record of round %d; ignoring its claim", claim.round)
            self._state_needed = None  # the next best claim may need none

    def _hand_over(self, event: Event, then: Callable[[], None]) -> None:
        self._untaken = (event, then)
        self._events.put(event)

    def _switched(self, round_number: int, anchor_sha256: str) -> None:
        self.applied = round_number
        self.anchor_sha256 = anchor_sha256
        self._refresh()

    def _refresh(self) -> None:
        self.head = self._log.head()
        self.last_record = self._log.header(self.head.round) if self.head.round >= 0 else None
