"""The two roles that a peer may have in the training loop (loop.py). Apart from the loop, which is
the same for both.

`Leading` is that of a head: data, learning rate, inner steps with its replica, validation losses.
`Serving` is that of a peer of any stage but the first: it serves the head that recruited it.
`train` runs either of them beside the `Learner`.

A role's `turn` does the next piece of work, of a few seconds at most, or waits a moment for some;
`between_steps` says whether the weights may be changed now, `ended` whether there is nothing more
to do here; `release` leaves the replica in good order.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from dilocox.dht.errors import CannotFollow, EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.peer.averaging.averager import AveragerStuck
from dilocox.peer.averaging.coordinator import ChildDied, Coordinator
from dilocox.peer.training.data import Corpus, batches_of, evaluated_at_once
from dilocox.peer.training.inner_optimizer import learning_rate
from dilocox.peer.training.loop import POLL_S, Learner, Move, Revised
from dilocox.peer.training.report import LoopMeter
from dilocox.pipeline.candidates import unfilled
from dilocox.pipeline.head import LAST_STEP_S, Head, rest_of_step_s
from dilocox.pipeline.member import Follower, Member
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.reservation import Reservation

logger = logging.getLogger(__name__)

FORM_PAUSE_S = 0.5  # between two tries to form a replica, plus as much again by chance
LAST_LOSS_PAUSE_S = 0.5
NO_TEXT_S, LATE_TEXT_S = 10.0, 120.0
NO_TEXT = "the text of its part of the data is not here yet"
PAUSED = "the operator has paused the run"
# How long a leaving peer waits for the end of its inner step, at most: a machine that shuts down
# gives a user's services two minutes, and the snapshot comes after it.
HANDOVER_LIMIT_S = 60.0
REST_LIMIT_S = 1800.0  # the same, where it leaves for what can wait
# As long at most the last validation waits for all stages' last records: members without work give
# their head up after five minutes, and a stage whose last round was void needs one more, which
# begins when no head is there any more.
LAST_LOSS_LIMIT_S = 240.0


class Leading:
    """What a peer of stage 0 does between two looks at records and sends."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        learner: Learner,
        head: Head,
        reservation: Reservation,
        corpus: Corpus,
        held_out: Tensor,
        coordinator: Coordinator,
        meter: LoopMeter,
        me: str,
        stop: threading.Event,
    ):
        self._me = me
        self._manifest = manifest
        self._learner = learner
        self._head = head
        self._reservation = reservation
        self._corpus = corpus
        batch = manifest.batch
        shape = batch.microbatch_size, batch.sequence_length, hidden_size(manifest.model)
        self._batches = batches_of(held_out, evaluated_at_once(shape))
        self._windows = held_out.shape
        self._coordinator = coordinator
        self._meter = meter
        self._stop = stop
        self._held: tuple[int, int] | None = None  # the part that is read, where it was begun
        self._opening: tuple[int, int] | None = None  # the one that is opened
        self._tell_at: float | None = None  # that there is no text; infinite: it is told
        self._opened_at = math.inf  # monotonic; told once
        self._first_epoch = 0
        self._saved = learner.data_state()
        learner.data_state = self._data_state
        self._batch: list[Tensor] = []  # of the inner step that is not taken yet
        self._before_batch: dict[str, Any] = {}  # the data position, until that step is taken
        self._tried_at = 0.0
        self._told = ""
        self._trained = False
        self._evaluation_s, self._evaluated_at = 0.0, float("-inf")  # the last one's cost and end
        # a round whose anchor is to be evaluated by this replica
        self._to_evaluate: int | None = -1 if learner.round < 0 else None

    @property
    def ended(self) -> bool:
        return self._learner.finished

    @property
    def between_steps(self) -> bool:
        return True  # it comes back when an inner step is complete

    def turn(self) -> None:
        paused, has_text = self._coordinator.paused, self._follow_lease()
        if has_text and self._head.members and not paused:
            has_text = self._gathered()  # else the step that is counted on would not be made
        stages = len(self._head.members)
        if paused or self._coordinator.stops(stages=stages, has_text=has_text):
            self._show_replica(PAUSED if paused else "")
            self._learner.stand_still()
            return
        self._tell_text(has_text)
        if not has_text:
            self._learner.stand_still()
            self._move_if_asked()
            return
        if not self._head.members and not self._form():
            self._learner.take_events(wait_s=POLL_S)
            self._learner.snapshot_if_due()
            self._learner.publish()
            self._move_if_asked()
            return
        if not self._gathered():  # of a replica that has just been formed
            self._learner.stand_still()
            return
        self._inner_step()
        if self._head.members and not self._stop.is_set():
            self._validate()
        self._show_replica()

    def release(self, *, ended: bool) -> None:
        """Let the replica go; at the run's end when its last anchor has been evaluated."""
        if ended:
            # others commit their last records later, by minutes where an exchange takes as long
            limit_s = min(self._coordinator.outcome_limit_s, LAST_LOSS_LIMIT_S)
            end = time.monotonic() + limit_s
            while self._unvalidated and self._head.members and time.monotonic() < end:
                if self._stop.is_set():
                    break
                if self._head.anchors_now_at(self._learner.round) and self._learner.hold():
                    self._evaluate()
                self._learner.take_events(wait_s=LAST_LOSS_PAUSE_S)
        self._head.dissolve()
        self._show_replica()

    def let_go(self) -> None:
        """The replica, at once."""
        self._head.dissolve()

    def _tell_text(self, has_text: bool) -> None:
        """Say that there is none, where that lasts, and when it is there again."""
        now = time.monotonic()
        if has_text:
            if self._tell_at == math.inf:
                logger.info("the text is here")
                self._show_replica()
            self._tell_at = None
        elif self._tell_at is None:
            self._tell_at = now + NO_TEXT_S
        elif now >= self._tell_at:
            self._tell_at = math.inf
            logger.info("no inner step: %s", NO_TEXT)
            self._show_replica(NO_TEXT)

    def _move_if_asked(self) -> None:
        move = self._coordinator.move_to
        if move is not None and self._learner.may_move:
            raise Move(move)

    # ---- the replica -----------------------------------------------------------------------------
    def _form(self) -> bool:
        now = time.monotonic()
        if now < self._tried_at:
            return False
        self._tried_at = now + FORM_PAUSE_S * (1 + random.random())
        with self._meter.waiting("replica"):
            blocked = self._head.form()
        if blocked != self._told:
            self._told = blocked
            if blocked:
                logger.warning("waiting for a complete replica: %s", blocked)
        self._show_replica(blocked)
        return not blocked

    def _show_replica(self, blocked: str = "") -> None:
        head, learner = self._head, self._learner
        members = head.members
        learner.status = replace(
            learner.status,
            head=self._me if members else "",
            members=members,
            epoch=head.epoch,
            codec=head.codec,
            last_fault=head.last_fault,
            undecided=head.undecided and bool(members),
            oldest_anchor=head.oldest_anchor if members else None,
            blocked=blocked,
            data_part=-1 if self._held is None else self._held[0],
            data_position=0 if self._held is None else self._corpus.position,
        )
        self._reservation.open({"members": list(members), "epoch": head.epoch})
        learner.publish()

    def _gathered(self) -> bool:
        """Whether the microbatches of the next inner step are here; takes those that are. A source
        that stalls keeps this peer from nothing else.
        """
        while not self._is_whole and self._corpus.ready:
            if not self._batch:
                self._before_batch = self._corpus.state_dict()
            self._batch.append(next(self._corpus))
        return self._is_whole

    @property
    def _is_whole(self) -> bool:
        return len(self._batch) == self._manifest.batch.microbatches

    def _inner_step(self) -> None:
        batch = self._manifest.batch
        tokens = self._learner.tokens_of_run + batch.tokens_per_step
        rate = learning_rate(self._manifest.inner, self._manifest.end_tokens, tokens)
        stepped = self._head.step(self._batch, rate)
        if stepped is not None:
            self._batch, self._before_batch, self._trained = [], {}, True
            self._learner.stepped(stepped, self._head.step_s)

    # ---- validation ------------------------------------------------------------------------------
    @property
    def _unvalidated(self) -> bool:
        """Whether this replica has an anchor to evaluate. Replicas take turns."""
        record, self._learner.newest = self._learner.newest, None
        if record is not None:
            turn = record.members[record.round % len(record.members)].peer
            self._to_evaluate = record.round if turn == self._me else None
        if self._to_evaluate != self._learner.round:
            self._to_evaluate = None  # other records came since
        return self._to_evaluate is not None

    @property
    def _affordable(self) -> bool:
        """Whether an evaluation like the last one is a small share of the time since then; the
        first one is, but for training that has not begun.
        """
        since_s = time.monotonic() - self._evaluated_at
        return (
            self._trained and self._evaluation_s <= self._manifest.data.validation_share * since_s
        )

    def _validate(self) -> None:
        """The validation loss of the anchor, once all stages' anchors are of its round and the time
        is there: of short rounds many anchors are not evaluated.
        """
        due = self._unvalidated and self._affordable and self._learner.hold()
        if due and self._head.anchors_at(self._learner.round):
            self._evaluate()

    def _evaluate(self) -> None:
        began = time.monotonic()
        total = self._head.evaluate(self._batches)
        self._evaluated_at = time.monotonic()
        self._evaluation_s = self._evaluated_at - began
        if total is not None:
            windows, length = self._windows
            self._meter.validated(self._learner.round, total / (windows * (length - 1)))
            self._to_evaluate = None

    # ---- data ------------------------------------------------------------------------------------
    def _data_state(self) -> dict[str, Any]:
        if self._held is None:
            return self._saved
        return self._before_batch or self._corpus.state_dict()

    def _follow_lease(self) -> bool:
        """Read the part of the data that this peer holds a lease on, as soon as it is here; whether
        an inner step can be made of what is read.
        """
        if self._batch:
            # its microbatches are counted in the position of their part
            return self._is_whole or self._corpus.ready
        part, position = lease = self._coordinator.data_part
        if lease == self._held:
            if self._corpus.epoch > self._first_epoch:
                self._first_epoch = self._corpus.epoch  # told once an epoch
                self._coordinator.finish_part()
            return self._corpus.ready
        if lease != self._opening:
            self._opening, self._opened_at = lease, time.monotonic()
            state = self._saved if self._held is None else {}
            if not (state and self._corpus.load_state_dict(state, part, wait=False)):
                self._corpus.open_part(part, position, wait=False)
        if self._corpus.arrived() and self._corpus.part == part:
            self._held, self._first_epoch = lease, self._corpus.epoch
        elif time.monotonic() > self._opened_at + LATE_TEXT_S:
            self._opened_at = math.inf
            words = "" if self._held is None else f"; reading part {self._held[0]} meanwhile"
            logger.warning("the text of data part %d does not come yet%s", part, words)
        return self._corpus.ready


SPARE_S = 30.0  # in no replica, where no stage lacks a peer: then it is said what for


class Serving:
    """What such a peer does between two looks at records and sends."""

    def __init__(
        self,
        *,
        learner: Learner,
        follower: Follower,
        member: Member,
        reservation: Reservation,
        coordinator: Coordinator,
        leave_limit_s: Callable[[], float] = lambda: HANDOVER_LIMIT_S,
    ):
        self._learner = learner
        self._follower = follower
        self._member = member
        self._reservation = reservation
        self._coordinator = coordinator
        self._leave_limit_s = leave_limit_s
        self._stepped_at = time.monotonic()
        self._step_s = 0.0  # of the last inner step
        self._head: str = ""
        self._trains = False  # an inner step was taken with that head
        self._spare_at: float | None = self._stepped_at + SPARE_S  # then; None once that is said

    @property
    def between_steps(self) -> bool:
        return self._follower.between_steps

    @property
    def ended(self) -> bool:
        """Whether this peer is in no replica, and has nothing more to do in a run that ends."""
        return self._learner.finished and not self._follower.head

    def turn(self) -> None:
        window = self._member.window_limit()
        self._reservation.open({"round": self._learner.round, "window": window})
        self._take(self._follower.turn(POLL_S))
        move = self._coordinator.move_to
        if move is not None and self._learner.may_move and self._reservation.state == "free":
            self._reservation.shut("it moves to another stage")
            raise Move(move)

    def release(self, *, ended: bool) -> None:
        """Wait for the head to replace this peer at the end of an inner step, for a while: without
        it all members would make that step again.
        """
        self._reservation.shut("it leaves")
        self._member.leaving = True
        end = math.inf
        while self._follower.head:
            now = time.monotonic()
            left_s = rest_of_step_s(self._step_s, now - self._stepped_at, self._leave_limit_s())
            end = min(end, now + left_s)
            if now >= end:
                break
            stepped = self._follower.turn(POLL_S)
            self._take(stepped)
            if stepped is not None:  # the head may have had this peer's sum before it was to leave
                end = min(end, now + LAST_STEP_S)
        self._follower.leave()
        self._show_replica()

    def let_go(self) -> None:
        """The replica, at once, and come to no other one."""
        self._reservation.shut("it ends")
        self._follower.leave()

    def _take(self, stepped: Stepped | None) -> None:
        if stepped is not None:
            now = time.monotonic()
            self._trains = True
            self._step_s, self._stepped_at = now - self._stepped_at, now
            self._learner.stepped(stepped, self._step_s)
        else:  # weights and moments rest until the step is told
            self._learner.snapshot_if_due()
        self._show_replica()

    def _show_replica(self) -> None:
        head = self._follower.head
        if head != self._head:
            self._head, self._trains, self._stepped_at = head, False, time.monotonic()
        blocked = "" if head else self._blocked()
        if blocked != self._learner.status.blocked:
            if blocked:
                logger.warning("the run is blocked: %s", blocked)
            else:
                logger.info("the run is no longer blocked")
        self._tell_spare(waits=not (head or blocked))
        # until its first step anybody may have said that it leads this peer, and others may need it
        head = head if self._trains else ""
        self._learner.status = replace(self._learner.status, head=head, blocked=blocked)
        self._learner.publish()

    def _tell_spare(self, *, waits: bool) -> None:
        now = time.monotonic()
        if not waits:
            self._spare_at = now + SPARE_S
        elif self._spare_at is not None and now >= self._spare_at:
            self._spare_at = None
            logger.info(
                "no head needs this peer now: as a spare it follows the rounds, and takes over "
                "when a peer of its stage leaves"
            )

    def _blocked(self) -> str:
        """Why no replica can be formed; as before where the look at the swarm is not one of now:
        without a record of this peer, which is here, it does not show others either.
        """
        view = self._coordinator.view
        if not any(here[view.me].can_train for here in view.stages.values() if view.me in here):
            return self._learner.status.blocked
        return "; ".join(unfilled(view.stages, self._member.num_stages))


def train(learner: Learner, role: Leading | Serving, stop: threading.Event) -> None:
    """Join, then train until the run's end, `stop`, or a failure (which is raised).

    Raises:
        Move: this peer should start anew as a peer of another stage; everything is on disk.
        Revised: this peer should start anew as a peer of the same stage; all is on disk.
        CannotFollow: the run goes on without this peer.
    """
    move: Move | Revised | CannotFollow | None = None
    try:
        learner.join()
        while not (stop.is_set() or role.ended):
            if role.between_steps:
                learner.between_steps()
            role.turn()
    except (Move, Revised, CannotFollow) as asked:
        move = asked
    except (AveragerStuck, ChildDied, EnvironmentFault):
        with suppress(Exception):  # what is raised says why
            role.let_go()  # the others need not wait meanwhile
        learner.keep()
        raise
    ended = not stop.is_set() and move is None
    try:
        role.release(ended=ended)
    except (AveragerStuck, ChildDied, EnvironmentFault):
        learner.keep()
        raise
    learner.leave(ended=ended)
    if move is not None:
        raise move
