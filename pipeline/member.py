"""One peer's part in a replica: its stage's worker between the neighbours above and below.

Tensors and small facts come from the neighbours as frames, go through the worker, and leave as
frames. It is the same for every stage: a head has nobody above, the last stage nobody below. What
only a head decides is in head.py.

An inner step ends so: sums go up the chain, GO comes down, and a stage steps once per number. Until
then a new epoch drops the step, and it is replayed.

`Follower` is a member that is no head: it does what comes over its links, and knows when it is on
its own. A head that dies or freezes tells nobody. So a member that loses a neighbour asks the head
whether it still leads this replica, again and again; when the head does not answer, or says no, the
member leaves the replica, keeps what it learnt, and is free for another head. A head that does
answer is given a while to heal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Protocol

from pydantic import Field
from torch import Tensor

from dilocox.pipeline.activation_codec import split_forward, split_gradient, tensor_frame
from dilocox.pipeline.frames import Facts, Frame, FrameRefused, Shape
from dilocox.pipeline.link import Arrived, Broken, LinkFacts, LinkKey, Message, Opened
from dilocox.pipeline.messages import (
    Dissolved,
    Evaluated,
    Fault,
    Go,
    MemberEvent,
    Ready,
    StageReport,
    Stepped,
    Totals,
)
from dilocox.pipeline.network import Network
from dilocox.pipeline.reservation import MAX_WINDOW, Assignment, Reservation
from dilocox.pipeline.stage_worker import StageWorker

EXACT = "fp32"  # the codec of what is evaluated: rare, and to be compared between runs
MAX_LOSS_SCALE = 2.0**40
LATE_EVALUATIONS = 4  # times the stages


class ForwardFacts(Facts):
    """loss_scale: the head's, where it is not 1.0: what the last stage multiplies its loss by."""

    loss_scale: Annotated[float, Field(ge=1 / MAX_LOSS_SCALE, le=MAX_LOSS_SCALE)] | None = None


class Anchors(Protocol):
    """The anchor, on which the validation loss is computed: the learner's, whose room, `peer`, is
    not to be imported here.

    round: of the last record in it. hold: keep it until the next inner step; False where it changes
    just now. in_place: for a while the stage has the weights of the anchor, which is held.
    """

    @property
    def round(self) -> int: ...
    @property
    def undecided(self) -> bool: ...
    def hold(self) -> bool: ...
    def in_place(self) -> AbstractContextManager[None]: ...


class Member:
    """The computing thread's side of one peer in a replica.

    `shape`: [b, t, d] of the activations of a microbatch. `vocabulary`: of the token ids.
    `window_limit()`: microbatches in flight that this peer has memory for.

    Attributes:
        assignment: the epoch that this peer works in, None while it is in no replica.
        step: the inner step in progress, or next.
        leaving: set by the owner; the head hears of it at the end of the inner step.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        worker: StageWorker,
        network: Network,
        anchors: Anchors,
        shape: Shape,
        vocabulary: int,
        window_limit: Callable[[], int] = lambda: MAX_WINDOW,
        first_window: int = MAX_WINDOW,
    ):
        self.assignment: Assignment | None = None
        self.step = 0
        self.leaving = False
        self.stage = stage
        self.num_stages = num_stages
        self.worker = worker
        self.network = network
        self._anchors = anchors
        self._shape = shape
        self._vocabulary = vocabulary
        self.window_limit = window_limit
        self._first_window = first_window
        self._told_window = 0  # to the head
        self._codecs: tuple[str, ...] = ()
        self._upper: LinkKey | None = None
        self._lower: LinkKey | None = None
        self._open: set[LinkKey] = set()
        self._is_last = stage == num_stages - 1  # nobody is below
        self._most = MAX_WINDOW  # microbatches of this step that there is memory for
        self._evaluating = 0  # batches that were sent down, and are not told of yet
        self._in_place = False
        self._lower_ready = self._sum_told = False
        self._lower_totals: Totals | None = None

    # ---- the epoch -------------------------------------------------------------------------------
    def take_up(self, assignment: Assignment) -> Stepped | None:
        """Begin an epoch: drop the inner step in flight, open the links to the new neighbours.

        A member that has computed the step which is `done` and missed its GO steps now.
        """
        before, done, stepped = self.assignment, assignment.done, None
        if before is not None and before.replica == assignment.replica and done is not None:
            number_done, factor, learning_rate = done
            if number_done == self.step and self.worker.finished:
                stepped = self._step(factor, learning_rate, loss=math.nan)
        self.end()
        self.assignment, self.step = assignment, assignment.step
        self._codecs = assignment.codecs
        k = self.stage
        if k > 0:
            self._upper = LinkKey(assignment.replica, assignment.epoch, k - 1, "upper")
            # the upper one dials, unless only the lower one can
            self._connect(self._upper, assignment, k - 1, dials=assignment.clients[k])
        if not self._is_last:
            self._lower = LinkKey(assignment.replica, assignment.epoch, k, "lower")
            self._connect(self._lower, assignment, k + 1, dials=not assignment.clients[k + 1])
        return stepped

    def end(self) -> None:
        """Be in no replica any more; what was learnt stays in the weights."""
        self.assignment = self._upper = self._lower = None
        self.network.drop_links()
        self._open.clear()
        self._evaluating = 0
        self._lower_ready = self._sum_told = False
        self._lower_totals = None
        self.worker.restart()

    def _connect(self, key: LinkKey, assignment: Assignment, stage: int, *, dials: bool) -> None:
        hello = self._frame("hello", facts={"upper_stage": key.upper_stage}) if dials else None
        self.network.open_link(key, assignment.members[stage], hello, assignment.opening_s)

    # ---- what comes in ---------------------------------------------------------------------------
    def handle(self, message: Message) -> MemberEvent | None:
        """Take in what the network says; what it means for the owner, None if nothing."""
        if not isinstance(message, Arrived | Opened | Broken):
            return None
        if message.key not in (self._upper, self._lower):
            return None  # of an epoch that is over
        match message:
            case Opened():
                self._open.add(message.key)
                return self._ready()
            case Broken():
                return self._broken(message)
            case Arrived():
                try:
                    if message.key == self._upper:
                        return self._from_above(message.frame)
                    return self._from_below(message.frame)
                except FrameRefused as refused:
                    self.network.break_link(message.key, refused.kind)
                    return None  # the network will say that it is broken

    def _broken(self, message: Broken) -> Fault:
        above = message.key == self._upper
        fault = Fault(
            stage=self.stage + (-1 if above else 1),
            seen_by=self.stage,
            reason=message.kind,
            after_s=message.after_s,
        )
        if not above:
            self._send(self._upper, self._frame("fault", facts=fault.to_facts()))
        return fault

    def _ready(self) -> Ready | None:
        """Once the links stand and the chain below is ready, so is the chain from here on."""
        links = {key for key in (self._upper, self._lower) if key is not None}
        if not links <= self._open or not (self._is_last or self._lower_ready):
            return None
        self._send(self._upper, self._frame("ready"))
        return Ready()

    def _from_above(self, frame: Frame) -> MemberEvent | None:
        match frame.kind:
            case "forward":
                self._check_step(frame)
                scale = ForwardFacts.from_facts(frame.facts).loss_scale
                self.worker.optimizer.take_loss_scale(1.0 if scale is None else scale)
                if self.worker.in_flight >= max(self._first_window, self._told_window, self._most):
                    raise FrameRefused("flood", f"{self.worker.in_flight} microbatches in flight")
                self.feed(frame.microbatch, *split_forward(frame, self._vocabulary))
            case "go":
                self._check_step(frame)
                if not self.worker.finished:
                    raise FrameRefused("order", "GO before all gradients")
                return self.go(Go.from_facts(frame.facts, self.num_stages))
            case "evaluate":
                self._evaluate_frame(frame)
            case "dissolve":
                self.dissolve()
                return Dissolved()
            case _:
                raise FrameRefused("kind", f"{frame.kind} from above")
        return None

    def _from_below(self, frame: Frame) -> MemberEvent | None:
        match frame.kind:
            case "gradient":
                self._check_step(frame)
                self.worker.feed_gradient(frame.microbatch, split_gradient(frame))
            case "sum":
                self._check_step(frame)
                if self._lower_totals is not None:
                    raise FrameRefused("order", "a second sum")
                below = self.num_stages - 1 - self.stage
                self._lower_totals = Totals.from_facts(frame.facts, below)
                self._tell_sum()
            case "ready":
                self._lower_ready = True
                return self._ready()
            case "fault":
                fault = Fault.from_facts(frame.facts, self.num_stages)
                if not self.stage < fault.seen_by < fault.stage:
                    raise FrameRefused("header", "a fault of another part of the chain")
                self._send(self._upper, self._frame("fault", facts=fault.to_facts()))
                return fault
            case "evaluated":
                evaluated = Evaluated.from_facts({**frame.facts, "batch": frame.microbatch})
                self._evaluating -= 1
                return self._tell(evaluated)
            case _:
                raise FrameRefused("kind", f"{frame.kind} from below")
        return None

    def _check_step(self, frame: Frame) -> None:
        if frame.step != self.step:
            raise FrameRefused("step", f"step {frame.step} within step {self.step}")

    # ---- the inner step --------------------------------------------------------------------------
    def feed(self, microbatch: int, inputs: Tensor | None, windows: Tensor) -> None:
        """Take the input of a forward; see `StageWorker.feed`."""
        if self.worker.idle:  # a head may feed more than there is memory for now
            self._most = self.window_limit()
        self.worker.feed(microbatch, inputs, windows)

    def work(self) -> bool:
        """Run one forward or backward and send what it made; False if there is nothing to do."""
        produced = self.worker.run_one(self._most)
        if produced is None:
            return False
        if produced.kind == "forward":
            scale = self.worker.optimizer.loss_scale
            frame = self._frame(
                "forward",
                microbatch=produced.microbatch,
                shape=self._shape,
                facts={} if scale == 1.0 else {"loss_scale": scale},
            )
            codec = self._codecs[self.stage]
            self._send(self._lower, tensor_frame(frame, codec, produced.tensor, produced.windows))
        elif produced.kind == "gradient":
            frame = self._frame("gradient", microbatch=produced.microbatch, shape=self._shape)
            codec = self._codecs[self.stage - 1]
            self._send(self._upper, tensor_frame(frame, codec, produced.tensor))
        self._tell_sum()
        return True

    @property
    def totals(self) -> Totals | None:
        """The sums over this stage and all below, once they have computed the inner step."""
        if not self.worker.finished:
            return None
        below = self._lower_totals
        if below is None:
            if not self._is_last:
                return None
            below = Totals(squared_norm=0.0, loss=self.worker.loss)
        return below.plus(self.worker.squared_norm(), self._report())

    def go(self, go: Go) -> Stepped:
        """Tell all below to step, and step."""
        self._send(self._lower, self._frame("go", facts=go.to_facts()))
        self._codecs = go.codecs
        return self._step(go.factor, go.learning_rate, go.loss)

    def _step(self, factor: float, learning_rate: float, loss: float) -> Stepped:
        taken = self.worker.go(factor, learning_rate)
        stepped = Stepped(step=self.step, loss=loss, skipped=not taken)
        self.step += 1
        self._lower_totals, self._sum_told = None, False
        return stepped

    def _tell_sum(self) -> None:
        if self._upper is None or self._sum_told:
            return
        totals = self.totals
        if totals is not None:
            self._sum_told = True
            self._send(self._upper, self._frame("sum", facts=totals.to_facts()))

    def _report(self) -> StageReport:
        self._told_window = self.window_limit()
        upper, lower = (
            self.network.link_facts(key) if key else LinkFacts()
            for key in (self._upper, self._lower)
        )
        return StageReport(
            anchor_round=self._anchors.round,
            compute_s=self.worker.compute_s,
            upper_bytes_per_s=upper.received_bytes_per_s,
            lower_bytes_per_s=lower.received_bytes_per_s,
            lower_round_trip_s=lower.round_trip_s,
            window=self._told_window,
            undecided=self._anchors.undecided,
            leaving=self.leaving,
        )

    # ---- evaluation ------------------------------------------------------------------------------
    @contextmanager
    def in_place(self) -> Generator[None]:
        """For a while the stage has the weights of the anchor. Inside of it another one costs
        nothing: a head exchanges a billion of them once for all of its batches.
        """
        if self._in_place:
            yield
            return
        with self._anchors.in_place():
            self._in_place = True
            try:
                self.worker.refresh()
                yield
            finally:
                self._in_place = False

    def evaluate(
        self, batch: int, windows: Tensor, inputs: Tensor | None = None
    ) -> Evaluated | None:
        """Run held-out windows int64 [n, t + 1] through the chain on its anchors.

        inputs: as in `StageWorker.evaluate`. The last stage has the result at once; to the others
        it comes from below (`handle`).
        """
        with self.in_place():
            result = self.worker.evaluate(inputs, windows)
        if isinstance(result, Tensor):
            frame = self._frame("evaluate", microbatch=batch, facts={"round": self._anchors.round})
            self._send(self._lower, tensor_frame(frame, EXACT, result, windows))
            self._evaluating += 1
            return None
        return self._tell(Evaluated(batch=batch, loss=result))

    def _evaluate_frame(self, frame: Frame) -> None:
        # a head asks for as many at once as there are stages; those of one that it gave up are late
        if self._evaluating > LATE_EVALUATIONS * self.num_stages:
            raise FrameRefused("flood", f"{self._evaluating} evaluations at once")
        if self._anchors.hold() and frame.facts.get("round") == self._anchors.round:
            inputs, windows = split_forward(frame, self._vocabulary)
            self.evaluate(frame.microbatch, windows, inputs)
        else:
            self._tell(Evaluated(batch=frame.microbatch, loss=None))

    def _tell(self, evaluated: Evaluated) -> Evaluated:
        facts = {"loss": evaluated.loss}
        self._send(self._upper, self._frame("evaluated", microbatch=evaluated.batch, facts=facts))
        return evaluated

    # ---- frames ----------------------------------------------------------------------------------
    def dissolve(self) -> None:
        """Let all below go."""
        self._send(self._lower, self._frame("dissolve"))

    def _send(self, key: LinkKey | None, frame: Frame) -> None:
        if key is not None:
            self.network.send(key, frame)

    def _frame(
        self,
        kind: str,
        *,
        microbatch: int = 0,
        shape: tuple[int, ...] = (),
        facts: Mapping[str, object] | None = None,
    ) -> Frame:
        if self.assignment is None:
            raise RuntimeError(f"a {kind} frame outside of a replica")
        return Frame(
            kind=kind,
            replica=self.assignment.replica,
            epoch=self.assignment.epoch,
            step=self.step,
            microbatch=microbatch,
            shape=shape,
            facts=facts or {},
        )


PING_LIMIT_S = 3.0  # its line may be full of activations
ASK_S = 1.0  # between two questions to the head
MESSAGES_A_TURN = 256
PATIENCE = 3  # questions without an answer until a head counts as gone
STALL_LIMIT_S = 300.0  # without a piece of work in a replica whose links stand
RESCUE_LIMIT_S = 120.0  # what healing may take before a member gives its replica up


class Follower:
    """Turns what heads and neighbours say into inner steps of this stage.

    `tell(kind, **facts)` hears of faults and of the end of a replica. longest_wait_s: how long a
    head may wait for an average between two inner steps.
    """

    def __init__(
        self,
        *,
        member: Member,
        reservation: Reservation,
        tell: Callable[..., None],
        longest_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        # in a first inner step the stages begin, and may compile their layers, one after another
        self._stall_limit_s = longest_wait_s + STALL_LIMIT_S * max(1.0, member.num_stages / 4)
        self._member = member
        self._reservation = reservation
        self._tell = tell
        self._clock = clock
        self._lost_at: float | None = None
        self._asked_at = 0.0
        self._unanswered = 0
        self._moved_at = 0.0

    @property
    def head(self) -> str:
        """Peer id of the head of the replica, empty while this peer is in none."""
        assignment = self._member.assignment
        return "" if assignment is None else assignment.head

    @property
    def between_steps(self) -> bool:
        """Whether the weights may be changed now."""
        return self._member.worker.idle

    def turn(self, wait_s: float) -> Stepped | None:
        """Do the next piece of work, or wait for some; the inner step that it completed."""
        assignment = self._reservation.take_assignment()
        if assignment is not None:
            return self._take_up(assignment)
        if self._reservation.released and self.head:
            stepped = self._receive(0.0)  # its last words may have come before that
            if stepped is None and self.head:
                self.leave("its head let it go")
            return stepped
        worked = self._lost_at is None and self._member.work()
        if worked:
            self._moved_at = self._clock()
        elif self.head and self._clock() - self._moved_at > self._stall_limit_s:
            self.leave("nothing came from its head")
        return self._receive(0.0 if worked else wait_s)

    def leave(self, reason: str = "this peer leaves") -> None:
        """Leave the replica, if this peer is in one."""
        assignment = self._member.assignment
        if assignment is not None:
            self._lost_at = None
            self._member.end()
            self._reservation.leave(assignment.replica)
            self._tell("dissolved", reason=reason)

    def _take_up(self, assignment: Assignment) -> Stepped | None:
        self._lost_at, self._moved_at = None, self._clock()
        stepped = self._member.take_up(assignment)
        self._tell("replica", epoch=assignment.epoch, members=list(assignment.members))
        return stepped

    def _receive(self, wait_s: float) -> Stepped | None:
        """Take in what has come, up to the end of an inner step, or an evaluation's worth of
        batches: what comes without end keeps this peer from nothing else.
        """
        evaluated = 0
        for _ in range(MESSAGES_A_TURN):
            message = self._member.network.inbox.get(wait_s)
            if message is None:
                break
            wait_s = 0.0
            event = self._member.handle(message)
            match event:
                case Stepped():
                    return event
                case Fault():
                    self._lose(event)
                case Dissolved():
                    self.leave("its head dissolved it")
                case _:
                    pass
            if isinstance(message, Arrived) and message.frame.kind == "evaluate":
                evaluated += 1
                self._moved_at = self._clock()  # on a slow line all of them take minutes
            if evaluated >= self._member.num_stages:
                break
        self._ask_head()
        return None

    def _lose(self, fault: Fault) -> None:
        if self._lost_at is None:
            self._lost_at = self._clock()
            self._asked_at = 0.0
            ended = fault.stage == 0 and fault.reason == "closed"  # a process that ends closes it
            self._unanswered = PATIENCE - 1 if ended else 0
            self._tell("lost", stage=fault.stage, reason=fault.reason, after_s=fault.after_s)

    def _ask_head(self) -> None:
        """With a neighbour lost: is there still a head that will heal this replica?"""
        assignment, now = self._member.assignment, self._clock()
        if self._lost_at is None or assignment is None or now - self._asked_at < ASK_S:
            return
        if now - self._lost_at > RESCUE_LIMIT_S:
            self.leave("it was not healed in time")
            return
        ping = Frame(kind="ping", replica=assignment.replica, epoch=assignment.epoch)
        answers = self._member.network.request_all({assignment.head: ping}, PING_LIMIT_S)
        self._asked_at = self._clock()
        answer = answers[assignment.head]
        if answer is None:
            self._unanswered += 1
            if self._unanswered >= PATIENCE:
                self._member.dissolve()  # those below need not find out by themselves
                self.leave("its head is gone")
            return
        self._unanswered = 0
        if not _still_leads(answer.frame.facts, assignment, self._member.stage):
            self.leave("its head leads a replica without it, or none")


def _still_leads(facts: Mapping[str, object], assignment: Assignment, stage: int) -> bool:
    """Whether a head that shows these facts has not let its member of this stage go.

    It shows them between inner steps: a member that it took in since then is in a later epoch.
    """
    members, epoch = facts.get("members"), facts.get("epoch")
    overtaken = isinstance(epoch, int) and epoch < assignment.epoch
    listed = isinstance(members, list | tuple) and assignment.members[stage] in members
    return overtaken or listed
