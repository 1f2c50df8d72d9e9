"""The training loop of a peer: inner steps that never wait, sends at round ends, merges between.

Runs in the main thread. Everything that talks to others happens elsewhere (coordinator.py) and
reaches this loop as events, which it takes between two inner steps: at once (`apply: arrival`), at
the end of a round (`round_end`), or, under `merge: none`, in the wait for the round's own record.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging import StageBuffers
from dilocox.peer.coordinator import Coordinator
from dilocox.peer.data import Corpus
from dilocox.peer.events import Committed, Event, Failed, Resynced, Voided
from dilocox.peer.groups import codecs_of
from dilocox.peer.inner import InnerOptimizer, learning_rate, train_step
from dilocox.peer.merge import Merge, OwnContribution, RecordFacts
from dilocox.peer.place import LoopProgress
from dilocox.peer.record import own_contribution
from dilocox.peer.snapshots import Snapshots
from dilocox.peer.tally import Tally
from dilocox.peer.validation import validation_loss, weights_replaced
from dilocox.pipeline.stage import StageModule

logger = logging.getLogger(__name__)

LEAVE_LIMIT_S = 6.0  # how long a leaving peer waits for the exchange in flight
CATCH_UP_LIMIT_S = 60.0  # how long a round's end waits for records that are being applied
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """What this peer trains: its stage, the optimizer, and the merge over their flat weights."""

    layout: FlatLayout
    stage: StageModule
    optimizer: InnerOptimizer
    merge: Merge
    buffers: StageBuffers


class Trainer:
    """One peer's training; `run` returns when the run has ended or `stop` is set."""

    def __init__(
        self,
        *,
        me: str,
        manifest: Manifest,
        model: LocalModel,
        corpus: Corpus,
        held_out: Tensor,
        coordinator: Coordinator,
        snapshots: Snapshots,
        tally: Tally,
        stop: threading.Event,
    ):
        self._me = me
        self._manifest = manifest
        self._model = model
        self._merge = model.merge
        self._corpus = corpus
        self._held_out = held_out
        self._coordinator = coordinator
        self._snapshots = snapshots
        self._tally = tally
        self._stop = stop
        # Kept here and not in the coordinator's thread: between a merge and its noticing it, the
        # learning rate would fall back by a whole record.
        self._chain_tokens = coordinator.tokens_at_start
        self._part: int | None = None
        self._first_epoch = 0
        self._states_taken = 0
        self._data_state = snapshots.data_state() if snapshots.found else {}
        self._codecs = codecs_of(manifest)
        self._takes_at_once = manifest.outer.apply == "arrival" or manifest.outer.merge == "none"

    def run(self) -> None:
        """Join, then train until the run's end, a stop, or a failure (which is raised)."""
        self._join()
        while not self._stop.is_set() and not self._ended():
            # of a coordinator that has ended the last event says why, and no round would end
            if self._takes_at_once or not self._coordinator.is_alive():
                self._take_events()
            self._inner_step()
            due = self._coordinator.send_due()
            if due is not None:
                self._end_round(*due)
        self._leave()

    # ---- phases ----------------------------------------------------------------------------------
    def _join(self) -> None:
        """Take what the others have before the first inner step."""
        self._tally.state = "joining"
        while not self._coordinator.joined.is_set() and not self._stop.is_set():
            self._take_events(wait_s=POLL_S)
            self._publish()
        self._follow_lease()
        if self._merge.round < 0 and not self._stop.is_set():
            self._validate(-1)
        self._tally.start()

    def _inner_step(self) -> None:
        batch = self._manifest.batch
        tokens_of_run = self._merge_tokens() + batch.tokens_per_step
        rate = learning_rate(self._manifest.inner, self._manifest.end_tokens, tokens_of_run)
        microbatches = list(islice(self._corpus, batch.microbatches))
        began = time.monotonic()
        result = train_step(self._model.stage, self._model.optimizer, microbatches, rate)
        self._tally.stepped(result, time.monotonic() - began)
        if not result.skipped:
            self._merge.trained(result.tokens)
        self._publish()

    def _end_round(self, round_number: int, scheduled_at: float) -> None:
        """The send of this round; then, under `merge: none`, its record."""
        with self._tally.waiting():
            if not self._takes_at_once:
                self._catch_up()
            if self._merge.can_send and round_number > self._merge.round:
                send = self._merge.send(round_number)
                self._model.buffers.message.copy_(send.message)
                self._tally.sent(round_number)
                self._snapshot()
                self._coordinator.submit(
                    round_number,
                    scheduled_at=scheduled_at,
                    tokens=send.tokens,
                    states_taken=self._states_taken,
                )
            else:
                self._coordinator.skip(round_number)
            self._tally.next_round()
            self._follow_lease()
            self._publish()
            if self._manifest.outer.merge == "none":
                self._wait_for_outcome(self._coordinator.outcome_limit_s, self._stop)

    def _leave(self) -> None:
        """Finish or abandon the exchange in flight, and keep everything on disk."""
        self._tally.state = "leaving"
        self._coordinator.leave()
        self._wait_for_outcome(LEAVE_LIMIT_S, threading.Event())
        self._snapshot()
        self._publish(force=True)

    # ---- events ----------------------------------------------------------------------------------
    def _take_events(self, wait_s: float = 0.0) -> None:
        while (event := self._coordinator.events.get(wait_s)) is not None:
            with self._tally.waiting():
                self._take(event)
            event.taken.set()
            if isinstance(event, Committed):
                if self._is_evaluator(event):
                    self._validate(event.record.round)
                self._tally.report_round()
            wait_s = 0.0

    def _wait_for_outcome(self, limit_s: float, stop: threading.Event) -> None:
        end = time.monotonic() + limit_s
        while self._merge.fly and time.monotonic() < end and not stop.is_set():
            self._take_events(wait_s=POLL_S)
            self._publish()

    def _catch_up(self) -> None:
        end = time.monotonic() + CATCH_UP_LIMIT_S
        self._take_events()
        while self._coordinator.applying and time.monotonic() < end:
            self._take_events(wait_s=POLL_S)

    def _take(self, event: Event) -> None:
        match event:
            case Committed():
                self._commit(event)
            case Voided():
                if event.round in self._merge.fly:
                    self._merge.void(event.round, certain=event.certain)
                    self._tally.void(event.round, event.reason)
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
            contributor=any(self._me in part.contributors for part in record.parts),
        )
        anchor, momentum = self._other_buffers()
        own: OwnContribution | None = None
        held = self._merge.held(record.round)
        if facts.contributor and held is not None:
            values = self._model.buffers.own
            if not event.own_ready:
                codec = self._codecs[record.bits]
                values = own_contribution(record, self._me, held.message, codec)
            own = OwnContribution(values, record.left_out(self._me))
        tokens = held.tokens if held is not None else 0
        outcome = self._merge.commit(facts, anchor, momentum, own)
        self._chain_tokens = record.chain_tokens
        self._tally.committed(event, outcome, tokens)

    def _is_evaluator(self, event: Committed) -> bool:
        """One member of each record computes the validation loss for all, in turn."""
        members = event.record.members
        return members[event.record.round % len(members)].peer == self._me

    def _resync(self, event: Resynced) -> None:
        state, merge = event.state, self._merge
        self._states_taken += 1
        anchor, momentum = self._other_buffers()
        since = merge.round if event.fork_round is None else event.fork_round
        # A send of a round that the new state passed may be in a record that was never seen: what
        # may have been counted is not sent again.
        held = merge.fly.keys() | merge.undone.keys()
        named = {number: None for number in held if since < number <= state.round}
        merge.resync(
            state.round,
            state.digest,
            anchor,
            momentum,
            since=since,
            named=named,
            records=max(1, state.round - since),
        )
        self._chain_tokens = state.chain_tokens
        self._tally.resynced(state.round)
        self._snapshot()  # the log begins at this state now, and an older snapshot cannot follow it

    def _other_buffers(self) -> tuple[Tensor, Tensor]:
        buffers = self._model.buffers
        current = 0 if self._merge.anchor.data_ptr() == buffers.anchors[0].data_ptr() else 1
        return buffers.anchors[1 - current], buffers.momenta[1 - current]

    # ---- pieces ----------------------------------------------------------------------------------
    def _validate(self, round_number: int) -> None:
        """The anchor's loss on the held-out windows."""
        model = self._model
        windows = self._held_out.to(model.optimizer.device)
        with weights_replaced(self._merge.progress.live, self._merge.anchor):
            loss = validation_loss(model.stage, windows)
        self._tally.validated(round_number, loss)

    def _snapshot(self) -> None:
        data = self._corpus.state_dict() if self._part is not None else self._data_state
        self._snapshots.write(self._merge, self._model.optimizer, data)

    def _follow_lease(self) -> None:
        """Read the part of the data that this peer holds a lease on."""
        part, position = self._coordinator.data_part
        if part == self._part:
            if self._corpus.epoch > self._first_epoch:
                self._first_epoch = self._corpus.epoch  # told once an epoch
                self._coordinator.finish_part()
            return
        state, self._data_state = self._data_state, {}
        if state.get("part") != part or not self._corpus.load_state_dict(state):
            self._corpus.open_part(part, position)
        self._part, self._first_epoch = part, self._corpus.epoch

    def _merge_tokens(self) -> int:
        """The run's tokens as this peer knows them: the chain's, and its own since."""
        in_flight = sum(send.tokens for send in self._merge.fly.values())
        return self._chain_tokens + in_flight + self._merge.tokens

    def _ended(self) -> bool:
        return self._chain_tokens >= self._manifest.end_tokens

    def _publish(self, *, force: bool = False) -> None:
        tally = self._tally
        heard = self._coordinator.heard_val_loss
        if heard is not None:
            tally.heard(*heard)
        val_loss = tally.val_loss
        self._coordinator.progress = LoopProgress(
            inner_step=tally.inner_step,
            unsent_tokens=max(0, self._merge.tokens),
            step_s=tally.longest_step_s,
            tokens_per_s=tally.tokens_per_s,
            train_loss=tally.train_loss,
            val_loss=val_loss if val_loss is not None and math.isfinite(val_loss) else None,
            val_round=tally.val_round,
            position=0 if self._part is None else self._corpus.position,
        )
        tally.publish(
            round_number=self._coordinator.round,
            inner_steps=self._coordinator.inner_steps,
            merge=self._merge,
            force=force,
        )
