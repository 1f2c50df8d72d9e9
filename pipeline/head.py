"""The head of a replica: forms it, drives its inner steps, and heals it.

What: `form` makes a replica of free peers, `step` takes one inner step with it, `evaluate` computes
the validation loss through it, `dissolve` lets it go.
Why: one peer must decide, and the stage-0 peer has the data. It decides in the thread that
computes, between or within inner steps, so nothing runs beside it that could disagree.
How: what is lost shows as a fault within an inner step. Then every member is asked, a silent one
twice; those that do not answer, or are no longer in this replica, are replaced by free peers of
their stage, all members get the next epoch, and the step is replayed (or, if its GO was given, the
next one begins).
Where no spare is to be had the replica is dissolved: nobody loses what it learnt.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from dilocox.pipeline.candidates import Records
from dilocox.pipeline.frames import encoded_bytes
from dilocox.pipeline.link import Arrived
from dilocox.pipeline.member import EXACT, Member
from dilocox.pipeline.messages import Evaluated, Fault, Go, MemberEvent, Ready, Stepped, Totals
from dilocox.pipeline.recruiting import Recruiter, Replica
from dilocox.pipeline.reservation import LONGEST_OPENING_S, Assignment
from dilocox.pipeline.tuning import Tuning

logger = logging.getLogger(__name__)

POLL_S = 0.2
READY_LIMIT_S = 10.0  # a member takes up an epoch when the piece that it computes is done
HEAL_LIMIT_S = 30.0
LAST_STEP_S = 5.0  # what the step in flight may still take in any case when this peer is to stop
STALL_LIMIT_S = 120.0  # an inner step in which nothing moves for so long, or for ten steps' time
STALLS = 2  # in one inner step, then its members are let go
SLOW_LINK = 0.5e6  # bytes a second: no loss is waited for as over a slower line
EVALUATED_BYTES = 1 << 29  # on their way through a replica at once, or one batch
SKIPPED = 40  # inner steps in a row, then the same: more than a loss scale of float16 is halved
MOVES = frozenset({"gradient", "sum"})  # what an inner step comes nearer its end by


def rest_of_step_s(lasted_s: float, since_s: float, limit_s: float) -> float:
    """How long who is to stop waits for the end of an inner step that began `since_s` ago, where
    the last one lasted so long (0: none did): no longer than the limit, and only a moment for one
    that would not end within it.
    """
    left_s = max(0.0, lasted_s - since_s)
    if left_s >= limit_s:
        return LAST_STEP_S
    return min(limit_s, max(LAST_STEP_S, left_s + lasted_s / 4))


class Lost(Exception):
    """The inner step cannot go on in this epoch."""

    def __init__(self, fault: Fault):
        super().__init__(fault)
        self.fault = fault


class Stalled(Lost):
    """Nothing moves in it, though nobody says that anything is broken."""


class Head:
    """The head's part; all methods belong to the computing thread.

    client_mode: whether this peer can only dial out. member: its own stage. records(): the
    swarm's peers, as of the last look. clip(squared norm, loss): the clip factor, not a number if
    the step must be skipped. tell(kind, **facts): hears what people and scripts want to know:
    replica, fault, healed, dissolved. stopping(): ends every wait, but one for the end of an inner
    step, for which there is `leave_limit_s()` then.

    Attributes:
        last_fault: in few words, empty before the first.
        step_s: how long the last inner step took, without what was dropped and healed before it.
        undecided: whether another member's send was, at the last inner step.
        oldest_anchor: the round of the oldest one that the others had then; None without others.
    """

    def __init__(
        self,
        *,
        me: str,
        client_mode: bool,
        tuning: Tuning,
        member: Member,
        records: Callable[[], Records],
        clip: Callable[[float, float], float],
        tell: Callable[..., None],
        stopping: Callable[[], bool],
        leave_limit_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.last_fault = ""
        self.step_s = 0.0
        self._skipped = 0  # inner steps in a row
        self.undecided = False
        self.oldest_anchor: int | None = None
        self._me = me
        self._num_stages = member.num_stages
        self._client_mode = client_mode
        self._tuning = tuning
        self._member = member
        self._recruiter = Recruiter(
            me=me,
            num_stages=member.num_stages,
            network=member.network,
            records=records,
            clock=clock,
            stopping=stopping,
        )
        self._clip = clip
        self._tell = tell
        self._stopping = stopping
        self._leave_limit_s = leave_limit_s
        self._clock = clock
        self._replica: Replica | None = None
        self._step = 0
        self._evaluated = 0
        self._anchor_rounds: set[int] = set()
        self._slowest_s = 0.0  # of the stages, for a microbatch of the last inner step
        self._slowest_link = 0.0  # bytes a second down the chain, as measured then
        self._failed: set[int] = set()  # the stages that failed last, as the replica did not stand

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids by stage; empty while there is no replica."""
        return () if self._replica is None else self._replica.chain

    @property
    def epoch(self) -> int:
        """Of the replica, or its last one."""
        return self._recruiter.epoch

    @property
    def codec(self) -> str:
        """The codecs of its links, in few words."""
        return "" if self._replica is None else ",".join(sorted(set(self._replica.codecs)))

    def anchors_at(self, round_number: int) -> bool:
        """Whether the anchors of all stages were of this round at the last inner step."""
        return self._replica is not None and self._anchor_rounds <= {round_number}

    def anchors_now_at(self, round_number: int) -> bool:
        """Whether all members that answer say that their anchors are of this round. An evaluation
        finds those that do not answer, and replaces them.
        """
        peers = () if self._replica is None else self._replica.others.values()
        answers = self._recruiter.ask_all(peers, "ping")
        rounds = {answer.frame.facts.get("round") for answer in answers.values() if answer}
        return rounds <= {round_number}

    # ---- forming ---------------------------------------------------------------------------------
    def form(self) -> str:
        """Try once to make a replica; why it failed, empty if it stands."""
        self._anchor_rounds, self.undecided, self.oldest_anchor = set(), False, None
        self._slowest_s = self._slowest_link = 0.0
        self._replica = Replica(
            members={0: self._me},
            clients={0: self._client_mode},
            codecs=self._tuning.first_codecs(self._num_stages),
            window=self._tuning.first_window(self._num_stages),
            limits={0: self._member.window_limit()},
        )
        reason = self._make_whole(set(range(1, self._num_stages)))
        if reason:
            others = self._replica.others
            self._recruiter.blame(others[stage] for stage in self._failed if stage in others)
            self.dissolve()
            return reason
        self._tell("replica", epoch=self.epoch, members=list(self.members))
        return ""

    def dissolve(self) -> None:
        """Let all members go."""
        replica, self._replica = self._replica, None
        if replica is None:
            return
        if self._member.assignment is not None:
            self._member.dissolve()  # the quick way down the chain
        self._recruiter.ask_all(replica.others.values(), "release")
        self._member.end()

    def _make_whole(self, vacant: set[int]) -> str:
        """Fill these stages and begin an epoch, again and again; why it failed, or empty."""
        end = self._clock() + HEAL_LIMIT_S + 2 * self._opening_s
        replica = self._held()
        replaced: list[str] = []
        self._failed = set()
        reason = "its members do not come together"
        while self._clock() < end and not self._stopping():
            for stage in vacant:
                replaced += [replica.members.pop(stage)] if stage in replica.members else []
            reason = self._recruiter.recruit(replica, vacant, until=end) if vacant else ""
            if reason:
                break
            failed = self._begin_epoch(replica)
            if failed is None:
                break
            self._failed = vacant = failed
            reason = "its members do not come together"
        # a peer that is replaced but lives would think itself a member until it notices
        self._recruiter.release(peer for peer in replaced if peer not in replica.members.values())
        return reason

    @property
    def _opening_s(self) -> float:
        """What links may take to stand, as members may be in the middle of a forward or backward;
        those of a new replica are not.
        """
        slowest_s = min(self._slowest_s, self.step_s)  # others state theirs, as below
        return min(2 * slowest_s, LONGEST_OPENING_S)

    def _begin_epoch(self, replica: Replica) -> set[int] | None:
        """Assign the members and wait until the chain stands; the stages that failed.

        None: it stands. An empty set: nobody is missing, and yet it does not stand.
        """
        self._recruiter.epoch += 1
        replica.window = min(replica.window, replica.limit)
        assignment = Assignment(
            replica=self._me,
            epoch=self.epoch,
            head=self._me,
            members=replica.chain,
            clients=tuple(replica.clients[stage] for stage in range(self._num_stages)),
            codecs=replica.codecs,
            step=self._step,
            done=replica.done,
            opening_s=self._opening_s,
        )
        self._member.take_up(assignment)
        if self._num_stages == 1:
            return None
        others = replica.others
        answers = self._recruiter.ask_all(others.values(), "assign", assignment.to_facts())
        agreed = {peer for peer, answer in answers.items() if answer and answer.frame.kind == "yes"}
        failed = {stage for stage, peer in others.items() if peer not in agreed}
        self._recruiter.avoid([others[stage] for stage in failed])
        return failed or self._wait_until_ready(replica)

    def _wait_until_ready(self, replica: Replica) -> set[int] | None:
        end = self._clock() + READY_LIMIT_S + self._opening_s
        while self._clock() < end and not self._stopping():
            event = self._next_event()
            if isinstance(event, Ready):
                return None
            if isinstance(event, Fault):
                return self._recruiter.missing(replica, event)
        unheard = Fault(stage=1, seen_by=0, reason="missing")
        return self._recruiter.missing(replica, unheard, heard=False)

    # ---- inner steps -----------------------------------------------------------------------------
    def step(self, batch: Sequence[Tensor], learning_rate: float) -> Stepped | None:
        """One inner step on these microbatches, windows int64 [b, t + 1] each; heals on the way.

        None if the replica had to be dissolved, or `stopping`: then the step was not taken.
        """
        stalls = 0
        while self._replica is not None and not self._stopping():
            if self._skipped >= SKIPPED and self._num_stages > 1:
                self._skipped = 0
                self._member.worker.optimizer.restore_loss_scale()
                self._give_up("every inner step is skipped, for its sums are not finite")
                break
            try:
                return self._step_once(batch, learning_rate)
            except Stalled as stalled:
                missing = self._recruiter.missing(self._held(), None)
                stalls += not missing
                if stalls < STALLS:
                    self._heal(stalled.fault, missing)
                else:
                    self._note_fault(stalled.fault.stage, stalled.fault.reason)
                    self._give_up("an inner step stands still, though all its members answer")
            except Lost as lost:
                self._heal(lost.fault, self._recruiter.missing(self._held(), lost.fault))
        return None

    def _step_once(self, batch: Sequence[Tensor], learning_rate: float) -> Stepped | None:
        member, replica = self._member, self._held()
        fed, moved_at = 0, self._clock()
        limit_s = self._stall_limit_s(len(batch))
        began, give_up = self._clock(), math.inf
        while (totals := member.totals) is None:
            while fed < len(batch) and member.worker.in_flight < replica.window:
                member.feed(fed, None, batch[fed])
                fed += 1
            worked = member.work()
            moved = self._drain(0.0 if worked else POLL_S)
            if worked or moved:
                moved_at = self._clock()
            now = self._clock()
            if self._stopping():
                left_s = rest_of_step_s(self.step_s, now - began, self._leave_limit_s())
                give_up = min(give_up, now + left_s)
            if now > give_up:
                return None
            if self._clock() - moved_at > limit_s:
                raise Stalled(Fault(stage=1, seen_by=0, reason="silent", after_s=limit_s))
        self.step_s = self._clock() - began
        return self._go(replica, totals, learning_rate)

    def _stall_limit_s(self, microbatches: int) -> float:
        """By the slowest stage; in a replica's first inner step none has told how long it takes,
        layers may be compiled, and one stage after another begins.
        """
        if self._held().done is None:
            return STALL_LIMIT_S * max(1.0, self._num_stages / 2)
        slowest_s = max(self._slowest_s, self._member.worker.compute_s)
        # others state theirs; but the last step took no longer than it did
        return max(STALL_LIMIT_S, 10 * min(microbatches * slowest_s, self.step_s))

    def _go(self, replica: Replica, totals: Totals, learning_rate: float) -> Stepped:
        reports = totals.reports
        replica.limits = {stage: report.window for stage, report in enumerate(reports)}
        replica.codecs, replica.window = self._tuning.next(reports, replica.codecs, replica.limit)
        self._anchor_rounds = {report.anchor_round for report in reports}
        self._slowest_s = max(report.compute_s for report in reports)
        speeds = [report.upper_bytes_per_s for report in reports if report.upper_bytes_per_s > 0]
        self._slowest_link = min(speeds, default=0.0)
        self.undecided = any(report.undecided for report in reports[1:])
        self.oldest_anchor = min((report.anchor_round for report in reports[1:]), default=None)
        factor = self._clip(totals.squared_norm, totals.loss)
        codecs = replica.codecs
        go = Go(factor=factor, learning_rate=learning_rate, loss=totals.loss, codecs=codecs)
        stepped = self._member.go(go)
        self._skipped = self._skipped + 1 if stepped.skipped else 0
        replica.done = (stepped.step, factor, learning_rate)
        self._recruiter.forgive(replica.others.values())
        self._step = stepped.step + 1
        leaving = {stage for stage, report in enumerate(reports) if report.leaving and stage > 0}
        if leaving:
            self._heal(Fault(stage=min(leaving), seen_by=0, reason="left"), leaving, leave=True)
        return stepped

    def _drain(self, wait_s: float) -> bool:
        """Take in all that has come, waiting for the first; whether the inner step has moved."""
        inbox, moved = self._member.network.inbox, False
        while (message := inbox.get(wait_s)) is not None:
            wait_s = 0.0
            event = self._member.handle(message)
            if isinstance(event, Fault):
                raise Lost(event)
            moved |= isinstance(message, Arrived) and message.frame.kind in MOVES
        return moved

    def _next_event(self, wait_s: float = POLL_S) -> MemberEvent | None:
        message = self._member.network.inbox.get(wait_s)
        return None if message is None else self._member.handle(message)

    # ---- healing ---------------------------------------------------------------------------------
    def _note_fault(self, stage: int, reason: str) -> None:
        """With the epoch that it ends, which tells it from another one of the same kind."""
        self.last_fault = f"stage {stage} {reason}, epoch {self.epoch}"

    def _give_up(self, reason: str) -> None:
        """All answer, and yet nothing is learnt: whichever is at fault, look for other members."""
        self._recruiter.blame(self._held().others.values())
        self._tell("dissolved", reason=reason)
        self.dissolve()

    def _heal(self, fault: Fault, vacant: set[int], *, leave: bool = False) -> None:
        """Replace the members of these stages, which are missing, or (`leave`) have said that they
        are leaving; else dissolve the replica.
        """
        began, replica = self._clock(), self._held()
        lost = [replica.members[stage] for stage in vacant]
        if leave:  # to its own head it would say yes
            self._recruiter.avoid(lost)
        stage, after_s = min(vacant, default=fault.stage), fault.after_s
        self._note_fault(stage, fault.reason)
        peer = replica.members[stage]
        self._tell("fault", stage=stage, peer=peer, reason=fault.reason, after_s=after_s)
        reason = self._make_whole(vacant)
        if leave:
            self._recruiter.ask_all(lost, "release")
        if reason:
            self._tell("dissolved", reason=reason)
            self.dissolve()
            return
        splice_s = self._clock() - began
        self._tell(
            "healed",
            stage=stage,
            epoch=self.epoch,
            members=list(self.members),
            splice_s=splice_s,
            seconds=splice_s + after_s,
        )

    # ---- evaluation ------------------------------------------------------------------------------
    def evaluate(self, batches: Sequence[Tensor]) -> float | None:
        """The cross-entropy in nats, summed over batches of held-out windows int64 [n, t + 1].

        On the anchors of all stages; None if they are not of one round, a member was lost, or for
        long no loss came: the first one passes all links, and a batch is exact, so it is large.
        One is sent when the slowest line is done with the one before, not to lie in somebody's
        memory.
        """
        first = self._evaluated  # numbers go on, so that late answers are told from new ones
        self._evaluated += len(batches)
        losses: dict[int, float] = {}
        sent, moved_at = 0, self._clock()
        b, (_, t, d) = len(batches[0]), self._tuning.shape
        frame_bytes = encoded_bytes(EXACT, (b, t, d))
        line_s = frame_bytes / self._slowest_link if self._slowest_link > 0 else 0.0
        hops = self._num_stages - 1
        limit_s = STALL_LIMIT_S * max(1.0, self._num_stages / 2)
        limit_s += 2 * hops * frame_bytes / max(self._slowest_link, SLOW_LINK)
        most, due = min(hops + 1, max(1, EVALUATED_BYTES // frame_bytes)), moved_at
        try:
            with self._member.in_place():
                while len(losses) < len(batches):
                    wait_s = POLL_S
                    if sent < len(batches) and sent - len(losses) < most:
                        wait_s = min(POLL_S, due - self._clock()) if sent > len(losses) else 0.0
                    if wait_s > 0:
                        event = self._next_event(wait_s)
                    else:
                        due = self._clock() + line_s
                        event = self._member.evaluate(first + sent, batches[sent])
                        sent += 1
                    if isinstance(event, Fault):
                        raise Lost(event)
                    if isinstance(event, Evaluated) and event.batch >= first:
                        if event.loss is None:
                            return None
                        losses[event.batch], moved_at = event.loss, self._clock()
                    if self._stopping():
                        return None
                    if event is None and self._clock() - moved_at > limit_s:
                        logger.warning("no validation loss: none of a batch in %.0f s", limit_s)
                        return None
        except Lost as lost:
            self._heal(lost.fault, self._recruiter.missing(self._held(), lost.fault))
            return None
        return sum(losses[number] for number in sorted(losses))

    def _held(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("there is no replica")
        return self._replica
