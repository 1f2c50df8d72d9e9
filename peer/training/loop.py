"""The training loop of a peer: inner steps with its replica, and what comes between them.

Runs in the main thread (`train` in roles.py). A peer of stage 0 forms a replica and leads it; a
peer of another stage serves the head that recruited it. A peer in no replica follows the records
and waits: heads for free peers, others for a head. Records and sends are `Learner`'s.

`Learner` is what a peer's stage learns between two inner steps: records come in, sends go out. All
that talks to others happens elsewhere (peer/averaging/coordinator.py) and reaches it as events,
which it takes between two inner steps: at once (`apply: arrival`), at the end of a round
(`round_end`), or, under `merge: none`, in the wait for the round's own one. It is the same for
heads, other members and spares; how inner steps are made is their role's (roles.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.averager import AveragerStuck, StageBuffers
from dilocox.peer.averaging.coordinator import ChildDied, Coordinator
from dilocox.peer.averaging.events import Committed, Event, Failed, Resynced, Voided
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.chain.store import log_limits
from dilocox.peer.rounds.record import RoundRecord, SendFacts, stage_codec
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.peer.training.merge import Merge, Outcome, RecordFacts, Remainder
from dilocox.peer.training.report import LoopMeter
from dilocox.peer.training.snapshot_taking import Snapshots
from dilocox.peer.training.unsent_progress import exchanged, norm
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.stage import StageModule

logger = logging.getLogger(__name__)

LEAVE_LIMIT_S = 6.0  # how long a leaving peer waits for the exchange in flight
LEAVE_BYTES_PER_S = 50e6  # an outer step goes over anchor and momentum faster, where a peer leaves
LEAVE_AT_MOST_S = 120.0  # a service has six minutes: one for its step, and the snapshot
HAND_ON_LIMIT_S = 15.0  # and for somebody to take its last record
SAVE_SOON_AT, SAVE_AT = 0.5, 0.75  # of what the log keeps, applied since the last snapshot
BUFFERS_LIMIT_S = 300.0  # how long an outer step, or a state from the disk, may take
CATCH_UP_LIMIT_S = 60.0  # how long a round's end waits for records that are being applied
FADES = 0.8  # of the longest such wait, with every round's end that waits for less
POLL_S = 0.1


class Revised(Exception):
    """The operator gave the run new rules: this peer starts again from its snapshot under them."""


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """What this peer trains: its stage, the optimizer, and the merge over their flat weights."""

    layout: FlatLayout
    stage: StageModule
    optimizer: InnerOptimizer
    merge: Merge
    buffers: StageBuffers


class Learner:
    """One peer's stage between inner steps.

    Attributes:
        data_state: what a snapshot keeps of the data; set by a head.
        newest: the record merged last since it was asked for; the owner takes it away.
        status: where the loop stands; its role says what it is in which replica.
    """

    def __init__(
        self,
        *,
        me: str,
        manifest: Manifest,
        model: LocalModel,
        coordinator: Coordinator,
        snapshots: Snapshots,
        meter: LoopMeter,
        stop: threading.Event,
    ):
        self._me = me
        self._manifest = manifest
        self._model = model
        self._merge = model.merge
        self._coordinator = coordinator
        self._snapshots = snapshots
        self._meter = meter
        self._stop = stop
        # Kept here and not in the coordinator's thread: between a merge and its noticing it, the
        # learning rate would fall back by a whole record.
        self._chain_tokens = coordinator.tokens_at_start
        # Trained on since the send whose round the newest record is of: what the others have done
        # since they sent theirs is reckoned by it.
        self._tokens_since = 0
        self._states_taken = 0
        self._lease = coordinator.events.lease
        self._lease.on_taken = snapshots.interrupt
        self._sent: dict[int, float] = {}  # the norm of the newest message, by round
        self._unsaved: dict[int, int] = {}  # bytes of the records applied since the last snapshot
        self._stopped_since: float | None = None
        self._started_over = False  # and took no inner step since
        self._caught_up_s = 0.0
        self._codec = stage_codec(manifest, model.layout)
        self._at_arrival = manifest.outer.apply == "arrival" or manifest.outer.merge == "none"
        self._was_at = -1  # the round of the anchor before this peer went back to an older one
        self.data_state: Callable[[], dict[str, Any]] = lambda: snapshots.data
        self.status = LoopStatus()
        self.newest: RoundRecord | None = None

    # ---- the anchor, for evaluations (pipeline/member.py) ----------------------------------------
    @property
    def round(self) -> int:
        """The round of the last record in the anchor."""
        return self._merge.round

    @property
    def undecided(self) -> bool:
        """Whether a send of this peer is in no record yet, and not void."""
        return self._coordinator.undecided

    def hold(self) -> bool:
        """Keep the anchor here until the end of the next pause between two inner steps; False where
        the next record moves it just now.
        """
        return self._lease.withdraw()

    @contextmanager
    def in_place(self) -> Generator[None]:
        """For a while the stage has the weights of the anchor, which is held."""
        if not self.hold():
            raise RuntimeError("the anchor is not here: hold it first")
        with self._snapshots.still(), exchanged(self._merge.progress.live, self._merge.anchor):
            yield

    # ---- phases ----------------------------------------------------------------------------------
    def join(self) -> None:
        """Take what the others have before the first inner step."""
        self._meter.state = "joining"
        with self._meter.waiting("join"):
            while not self._coordinator.joined.is_set() and not self._stop.is_set():
                self.take_events(wait_s=POLL_S)
                self.snapshot_if_due()
                self.publish()
                if self._coordinator.revised and not self._merge.in_flight:
                    raise self._coordinator.cannot_follow or Revised()
        self._meter.start()

    def between_steps(self) -> None:
        """Take what has come, and the send if it is due.

        Where no send is in flight it raises `Revised` if this peer is to start again, and
        `CannotFollow` if that would not help.
        """
        self._lease.withdraw()
        try:
            self._between_steps()
            if self._meter.contribution_due:
                self._meter.tell_contribution()
        finally:
            self._offer()

    def _between_steps(self) -> None:
        # of a coordinator that has ended the last event says why, and no round would end; nor does
        # one in a run that is paused, whose new rules must not wait for its going on, or that ends
        no_end = self._coordinator.ending or (
            self._coordinator.paused and self._coordinator.revised
        )
        if self._takes_at_once or no_end or not self._coordinator.is_alive():
            self.take_events()
        due = self._coordinator.send_due()
        if self._coordinator.revised:
            if due is not None and not self._takes_at_once:
                self._catch_up()
            if not self._merge.in_flight:
                raise self._coordinator.cannot_follow or Revised()
        if due is not None:
            self._end_round(*due)

    def stepped(self, stepped: Stepped, seconds: float) -> None:
        """Count an inner step that was made on the live weights."""
        tokens = self._manifest.batch.tokens_per_step
        self._meter.stepped(stepped, tokens, seconds)
        if not stepped.skipped:
            self._merge.trained(tokens)
            self._tokens_since += tokens
            self._started_over = False
        elif not math.isfinite(norm(self._merge.progress.live)):
            self._start_over()  # no inner step would be taken any more
        self.snapshot_if_due()
        self.publish()

    @property
    def tokens_of_run(self) -> int:
        """The run's tokens as this peer knows them: the chain's, its own that no record holds, and
        as many as the other replicas should have trained on since the chain's newest record.
        """
        in_flight = sum(send.tokens for send in self._merge.in_flight.values())
        others = int(self._coordinator.others_pace * self._tokens_since)
        return self._chain_tokens + in_flight + self._merge.tokens + others

    @property
    def finished(self) -> bool:
        """Whether the run ends, this peer makes no more inner steps, and all that it learnt is in a
        record, or will not be in one any more."""
        if not self._coordinator.stopped:
            self._stopped_since = None
            return False
        now = time.monotonic()
        if self._stopped_since is None:
            self._stopped_since = now
        overdue = now > self._stopped_since + self._coordinator.end_limit_s
        return overdue or not self.unsent

    def stand_still(self) -> None:
        """No inner step is made: a moment passes, and records are taken if it is their time."""
        if self._takes_at_once or self._coordinator.ending:
            self.take_events(wait_s=POLL_S)
        else:
            self._stop.wait(POLL_S)
        self.snapshot_if_due()
        self.publish()

    @property
    def unsent(self) -> bool:
        """Whether this peer learnt something that no record holds yet."""
        return self._merge.tokens > 0 or bool(self._merge.in_flight)

    @property
    def may_move(self) -> bool:
        """Whether this peer may leave its stage for `move_to`: with nothing unsent, or where that
        stage has nobody with no send under way.
        """
        stays = self._merge.in_flight if self._coordinator.moves_with_progress else self.unsent
        return not stays

    def leave(self, *, ended: bool, limit_s: float = LEAVE_LIMIT_S) -> None:
        """Finish or abandon the exchange in flight, and keep everything on disk.

        At the end of the run it is finished, and the bootstraps are given the time to keep the last
        record: no later round would hold it. The last peer of a stage gives them a moment, too, if
        nobody else has it, or the stage would stand still without it.
        """
        self._meter.state = "leaving"
        self._coordinator.leave()
        failed: Exception | None = None
        try:
            if ended:
                self._wait_for_outcome(self._coordinator.outcome_limit_s, self._stop)
            self._wait_for_outcome(limit_s, threading.Event())
        except Exception as error:  # noqa: BLE001 - raised, once all is kept
            failed = error
        full: EnvironmentFault | None = None
        try:
            self._wait_for_buffers(limit_s + self._outer_step_s)
            self._save()
        except AveragerStuck as error:
            logger.warning("what was learnt since the last snapshot is lost: %s", error)
        except EnvironmentFault as error:  # others are to have the last record all the same
            full = error
        if failed is not None:
            raise failed
        self.publish(force=True)
        if ended or self._stop.is_set():  # else it starts again at once
            self._meter.tell_contribution()
        deadlines, stop = self._manifest.deadlines, self._stop
        if ended:
            self._wait_for_archive(max(deadlines.record_lifetime_s, deadlines.exchange_s), stop)
        elif stop.is_set() and self._coordinator.holds_alone:
            logger.info("handing the last record to the operator's archive")
            hand_on_s = min(2 * deadlines.heartbeat_s, HAND_ON_LIMIT_S)
            self._wait_for_archive(hand_on_s, threading.Event())
        if full is not None:
            raise full

    def keep(self) -> None:
        """Keep what this peer has learnt, if its state is whole: what it does in the training loop
        has failed, for a reason that lies elsewhere, and it ends.
        """
        if not self._meter.inner_steps:
            return
        try:
            self._wait_for_buffers(self._outer_step_s)
            self._save()
        except Exception as error:  # noqa: BLE001 - why it ends is raised
            logger.warning("what was learnt since the last snapshot is lost: %s", error)

    def _end_round(self, round_number: int, scheduled_at: float) -> None:
        """The send of this round; then, under `merge: none`, its record."""
        with self._meter.waiting("send"):
            if not self._takes_at_once:
                self._catch_up()
            if self._merge.can_send and round_number > self._merge.round:
                self._send(round_number, scheduled_at)
            else:
                self._coordinator.skip(round_number)
            self._meter.next_round()
            self.publish()
            if self._manifest.outer.merge == "none":
                with self._meter.waiting("record"):
                    self._wait_for_outcome(self._coordinator.outcome_limit_s, self._stop)

    def _send(self, round_number: int, scheduled_at: float) -> None:
        """Send all that is unsent. The group waits for its first byte, so of all that a restart
        needs only a line of the journal is written before it.
        """
        self._snapshots.interrupt()
        send = self._merge.send(round_number)
        length = norm(send.message)
        self._sent = {round_number: length}
        if not math.isfinite(length):
            self._merge.void(round_number, certain=True)
            self._start_over()
            self._coordinator.skip(round_number)
            return
        self._snapshots.sending(self._merge, round_number, send)
        self._coordinator.submit(
            round_number,
            SendFacts(tokens=send.tokens, step_s=self._step_s, stall_s=self._meter.stall_s),
            scheduled_at=scheduled_at,
            states_taken=self._states_taken,
        )
        self._meter.sent(round_number, send.tokens)

    def _start_over(self) -> None:
        """This peer's weights are not finite, and never would be again: go on from the anchor, with
        moments that are new, too. Until its next inner step nobody is to wait for it.
        """
        self._wait_for_buffers()
        self._snapshots.interrupt()
        self._meter.started_over(self._merge.tokens)
        self._merge.discard_unsent()
        self._model.optimizer.reset()
        self._started_over = True
        self._coordinator.announce()
        self._snapshots.soon()  # the one on the disk may not be finite either

    # ---- events ----------------------------------------------------------------------------------
    def take_events(self, wait_s: float = 0.0) -> None:
        """Merge what has come, waiting so long for the first."""
        if wait_s > 0:
            self._lease.offer()
        while True:
            event = self._coordinator.events.get(wait_s)
            self._lease.withdraw()
            if event is None:
                return
            with self._meter.waiting("merge"):
                self._take(event)
            event.taken.set()
            wait_s = 0.0

    @property
    def _takes_at_once(self) -> bool:
        """Whether records are taken as they come: where they wait for a round's end, those that
        this peer had, or whose like it had, do not."""
        return self._at_arrival or self._merge.round < self._was_at

    def _offer(self) -> None:
        """For the time of an inner step; but where records wait for a round's end, and would keep
        them until then, only there (`take_events`), or where the last round may have ended."""
        if self._takes_at_once or self._coordinator.ending:
            self._lease.offer()

    def _wait_for_buffers(self, limit_s: float = BUFFERS_LIMIT_S) -> None:
        """Take events until the anchor is here; AveragerStuck if it does not come back."""
        end = time.monotonic() + limit_s
        while not self._lease.withdraw():
            self.take_events(wait_s=POLL_S)
            if self._lease.leased and (time.monotonic() > end or not self._coordinator.is_alive()):
                raise AveragerStuck("the averaging process does not give the anchor back")

    def _wait_for_outcome(self, limit_s: float, stop: threading.Event) -> None:
        end = time.monotonic() + limit_s
        while self._merge.in_flight and time.monotonic() < end and not stop.is_set():
            self.take_events(wait_s=POLL_S)
            self.publish()

    def _wait_for_archive(self, limit_s: float, stop: threading.Event) -> None:
        self._coordinator.announce()  # its last record
        end = time.monotonic() + limit_s
        while not self._coordinator.archived and time.monotonic() < end:
            if stop.is_set() or not self._coordinator.is_alive():
                return
            try:
                self.take_events(wait_s=POLL_S)
            except ChildDied:
                return  # all that is to be kept is on disk

    def _catch_up(self) -> None:
        began = time.monotonic()
        self.take_events()
        limit_s = max(CATCH_UP_LIMIT_S, self._outer_step_s)
        while self._coordinator.applying and time.monotonic() < began + limit_s:
            self.take_events(wait_s=POLL_S)
        self._caught_up_s = max(time.monotonic() - began, FADES * self._caught_up_s)

    def _take(self, event: Event) -> None:
        self._snapshots.interrupt()
        match event:
            case Committed():
                self._commit(event)
            case Voided():
                if event.round in self._merge.in_flight:
                    self._merge.void(event.round, certain=event.certain)
                    self._meter.reporter.void(event.round, event.reason)
            case Resynced():
                self._resync(event)
            case Failed():
                raise event.error
            case _:
                raise TypeError(f"unknown event {event}")

    def _commit(self, event: Committed) -> None:
        record = event.record
        facts = RecordFacts(
            round=record.round,
            digest=event.digest,
            previous=record.previous,
            contributor=bool(record.counted(self._me)),
        )
        self._lease.give_back()
        # without a send for it this peer had trained on nothing, or is a round behind
        self._tokens_since = self._merge.tokens if record.round in self._merge.in_flight else 0
        buffers, own, error = self._model.buffers, None, None
        if facts.contributor and record.round in self._merge.in_flight:
            if event.remainder:
                own = Remainder(buffers.message, record.left_out(self._me, self._codec))
                error = self._error_of(record.round, own)
            else:  # the driver had given it up: what the record took of it is not known
                self._merge.void(record.round)
        stated = record.member(self._me)
        tokens = 0
        sent_tokens = self._merge.tokens_of(record.round)
        if sent_tokens is not None and stated is not None:  # of much it counts less: tokens_cap
            tokens = min(sent_tokens, stated.tokens)
        outcome = self._merge.commit(facts, buffers.anchor, buffers.momentum, own)
        self._chain_tokens = record.chain_tokens
        self.newest = record
        self._meter.committed(
            event,
            outcome,
            tokens,
            compression_error=error if outcome is Outcome.COUNTED else None,
            residual_norm=self._merge.residual.norm,
            more=record.round < self._coordinator.newest_round,
        )
        self._unsaved[record.round] = event.payload_bytes
        if record.round < self._coordinator.newest_round:
            return  # it catches up: one snapshot after the last of them, not after every third
        self._was_at = -1
        # a peer that only follows has a log that is pruned all the same
        unsaved = [size for number, size in self._unsaved.items() if number > self._snapshots.round]
        count, kept_bytes = log_limits(self._manifest.rounds, event.payload_bytes)
        used = max(len(unsaved) / count, sum(unsaved) / max(1, kept_bytes))
        if used >= SAVE_AT and not self._snapshots.refused:
            try:
                self._save()
            except EnvironmentFault as error:  # the log is pruned then: a kill costs a state
                self._snapshots.refuse(error)
        elif used >= SAVE_SOON_AT and not self._snapshots.refused:
            self._snapshots.soon()

    def _resync(self, event: Resynced) -> None:
        state, merge = event.state, self._merge
        self._states_taken += 1
        self._lease.give_back()
        self._was_at = merge.round
        since = merge.round if event.fork_round is None else event.fork_round
        # What the headers do not tell may have been counted, and is not sent again.
        passed = {number for number in merge.unsettled if since < number <= state.round}
        told, named, records = event.told, set[int](), state.round - since
        if told is not None:  # each header is one; of a round before them it is not known
            headers = {number for number in told.rounds.values() if since < number <= state.round}
            records = len(headers) + max(0, told.after - since)
            passed = {number for number in passed if number <= told.after}
            named = {number for number in told.named if number > since}
        merge.resync(
            state.round,
            state.digest,
            self._model.buffers.anchor,
            self._model.buffers.momentum,
            since=since,
            named=named,
            untold=passed,
            records=max(1, records),
        )
        self._chain_tokens, self._tokens_since = state.chain_tokens, 0
        self._meter.reporter.event("resynced", round=state.round)
        self._save()  # the log begins at this state now, and an older snapshot cannot follow it

    def _error_of(self, round_number: int, own: Remainder) -> float | None:
        """What the codec lost of a message, as a share; None where it was sent before a restart, or
        was empty."""
        sent = self._sent.get(round_number, 0.0)
        return norm(own.values) / sent if sent > 0 else None

    # ---- pieces ----------------------------------------------------------------------------------
    @property
    def _step_s(self) -> float:
        """Seconds of an inner step of this peer's replica, smoothed; 0 before the first one."""
        speed = self._meter.tokens_per_s
        return self._manifest.batch.tokens_per_step / speed if speed > 0 else 0.0

    @property
    def _outer_step_s(self) -> float:
        """How long one may take whose end is waited for."""
        return min(8 * self._model.layout.numel / LEAVE_BYTES_PER_S, LEAVE_AT_MOST_S)

    def _save(self) -> None:
        """Write a snapshot, while training stands still."""
        self._wait_for_buffers()
        with self._meter.waiting("snapshot"):
            self._snapshots.write(self._merge, self._model.optimizer, self.data_state())
        self._unsaved.clear()

    def snapshot_if_due(self) -> None:
        """Begin a snapshot in the background, or note that one is complete."""
        if not self._lease.withdraw():
            return
        with self._meter.waiting("snapshot"):
            done = self._snapshots.advance(self._merge, self._model.optimizer, self.data_state)
        self._offer()
        if done:
            self._unsaved = {n: s for n, s in self._unsaved.items() if n > self._snapshots.round}

    def publish(self, *, force: bool = False) -> None:
        """Say where this peer is, to the swarm and on disk."""
        coordinator, merge = self._coordinator, self._merge
        if coordinator.heard_val_loss is not None:
            self._meter.heard(*coordinator.heard_val_loss)
        # what is in flight counts too: a peer that only waits for its record must be reckoned with
        in_flight = sum(send.tokens for send in merge.in_flight.values())
        self.status = self._meter.read(
            self.status,
            started_over=self._started_over,
            caught_up_s=self._caught_up_s,
            round=coordinator.round,
            inner_steps=coordinator.inner_steps,
            applied_round=merge.round,
            in_flight=next(iter(merge.in_flight), None),
            unsent_tokens=max(0, merge.tokens) + in_flight,
            lost_tokens=merge.lost_tokens,
        )
        before, coordinator.status = coordinator.status, self.status
        if (before.head, before.members) != (self.status.head, self.status.members):
            coordinator.announce()
        self._meter.reporter.status(self.status, force=force)


class Move(Exception):
    """This spare is to host another stage."""

    def __init__(self, stage: int):
        super().__init__(stage)
        self.stage = stage
