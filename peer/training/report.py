"""The figures of a peer's training, from the loop to the log: losses, tokens, waiting, bytes.

`LoopMeter` counts them; `Reporter` shows them: log lines, a progress line, and two files.

    events.jsonl   one JSON object a line, appended: training, sent, round, validated, void,
                   resynced, started_over, gave, and of the replica: replica, fault, healed, lost,
                   dissolved
    status.json    the newest progress, replaced about once a second

The log is for people; scripts (the demo among them) read the files. Loss is in nats a token.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import TypeAdapter

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, write_atomically
from dilocox.dht.names import shown_peer
from dilocox.dht.records import stage_figures
from dilocox.peer.averaging.loop_status import LoopStatus, OwnContribution
from dilocox.peer.memory_and_disk import size
from dilocox.peer.os_process import CLEAR_LINE, counted, strict_json
from dilocox.peer.rounds.record import rank_span
from dilocox.peer.state_folder import EVENTS_FILE, STATUS_FILE
from dilocox.peer.training.merge import Outcome
from dilocox.pipeline.messages import Stepped

if TYPE_CHECKING:
    from dilocox.peer.averaging.events import Committed

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
LONGEST_LINE = 1 << 16  # bytes
CONTRIBUTION_EVERY = 100  # rounds with tokens of this peer
TAKEN_ROUNDS, TAKEN_S = 100, 600.0  # a peer that only follows logs a line after so many, so long
UNCOUNTED = {"undone": " (without yours, which go with a later one)", "repeated": " (again)"}


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One committed round, as this peer saw it."""

    round: int
    inner_steps: int
    tokens: int  # this peer's own in this record
    record_tokens: int
    chain_tokens: int
    train_loss: float | None
    val_loss: float | None
    val_round: int
    tokens_per_s: float
    waiting_share: float
    sent_bytes: int  # with the records and states that others fetched
    averaging_bytes: int  # for the average alone
    fp16_bytes: int  # what a ring all-reduce of fp16 values would have sent
    exchange_s: float | None
    matchmaking_s: float | None = None  # until the group stood
    members: int
    ranks: tuple[int, int, int] | None = None  # smallest, median, largest of factored tensors
    payload_bytes: int = 0  # of the record's means, which is one direction of an exchange
    compression_error: float | None = None  # |m - c| / |m|; None where m is not in the record
    residual_norm: float | None = None  # after the merge
    outcome: str  # of merge.Outcome: what the record meant for this peer
    digest: str
    anchor_sha256: str


class Reporter:
    """Writes the log and the two files of one peer.

    `on_event` and `on_status` hear all of it in the thread that trains, every status included: they
    must be quick and raise nothing. `shown` says how people see a peer of this id.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._events = folder / EVENTS_FILE
        _cut_half_line(self._events)
        self._terminal = sys.stderr.isatty()
        self._status_at = 0.0
        self._refused = set[Path]()  # of the two files, which the disk did not let it write last
        self._taken: list[RoundReport] = []  # not told of yet
        self._taken_at: float | None = None  # when such were told last; None: since it trained
        self.shown: Callable[[str], str] = shown_peer
        self.on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, facts: None
        self.on_status: Callable[[LoopStatus], None] = lambda status: None

    def event(self, kind: str, **facts: Any) -> None:
        """Append one event for scripts; on a full disk it is lost."""
        self.on_event(kind, facts)
        line = strict_json({"event": kind, "time": round(time.time(), 3)} | facts)
        with self._spared(self._events):
            if self._events in self._refused:
                _cut_half_line(self._events)
            with self._events.open("a") as file:
                file.write(line + "\n")

    def tell(self, kind: str, **facts: object) -> None:
        """One event of the replica that this peer is in, and a line in the log."""
        self.event(kind, **facts)
        clean = facts.get("reason") == "left"  # which is no fault
        logger.info("%s: %s", "left" if clean else kind, event_in_words(kind, facts, self.shown))

    def status(self, status: LoopStatus, *, force: bool = False) -> None:
        """Show the progress, about once a second."""
        self.on_status(status)
        if not force and time.monotonic() - self._status_at < STATUS_PERIOD_S:
            return
        self._status_at = time.monotonic()
        text = strict_json(asdict(status))
        path = self._folder / STATUS_FILE
        with self._spared(path):
            write_atomically(path, text.encode(), durable=False)
        if self._terminal:
            sys.stderr.write(CLEAR_LINE + progress_line(status))
            sys.stderr.flush()

    @contextmanager
    def _spared(self, path: Path) -> Generator[None]:
        """What the disk refuses to this file costs the file, and not the peer: it is told once, and
        again when it works.
        """
        try:
            yield
        except (OSError, EnvironmentFault) as error:
            if path not in self._refused:
                self._refused.add(path)
                fault = disk_fault(path, error) if isinstance(error, OSError) else error
                logger.warning("%s; training goes on, and this file lacks what comes now", fault)
        else:
            if path in self._refused:
                self._refused.remove(path)
                logger.info("%s is written again", path)

    def contribution_before(self) -> OwnContribution:
        """What this peer had given when it ended; nothing where no file says so."""
        try:
            text = (self._folder / STATUS_FILE).read_bytes()
            return TypeAdapter(LoopStatus).validate_json(text).gave
        except (OSError, ValueError):
            return OwnContribution()

    def committed(self, report: RoundReport, *, more: bool = False) -> None:
        """more: another record follows at once. Rounds that are only taken become one line: the
        first ones at once, later ones now and then, all of them before this peer's own."""
        self.event("round", **asdict(report))
        logger.debug(
            "round %d: %d inner steps, digest %s, anchor %s",
            *(report.round, report.inner_steps, report.digest[:12], report.anchor_sha256[:12]),
        )
        taken = report.outcome in ("followed", "reset")
        if taken:
            self._taken.append(report)
        now, since = time.monotonic(), self._taken_at
        late = since is None or len(self._taken) >= TAKEN_ROUNDS or now - since >= TAKEN_S
        if self._taken and not (taken and (more or not late)):
            logger.info("%s", taken_line(self._taken))
            self._taken.clear()
            self._taken_at = now
        if not taken:
            self._taken_at = None
            logger.info("%s", round_line(report))

    def void(self, round_number: int, reason: str) -> None:
        self.event("void", round=round_number, reason=reason)
        logger.info(
            "round %d void: %s; nothing is lost: its tokens go with the next round",
            round_number,
            reason,
        )

    def started_over(self, tokens: int) -> None:
        self.event("started_over", tokens=tokens)
        logger.warning(
            "the weights here were not finite (NaN): this peer goes on from the anchor with a new "
            "inner optimizer, and what it learnt from %d tokens is lost; if it recurs on one "
            "machine, test its memory; if on many, the run's inner.learning_rate is too high",
            tokens,
        )


def _cut_half_line(path: Path) -> None:
    """Of a line that a full disk cut: else the next one would be part of it."""
    try:
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
            file.seek(start)
            if (end := file.read().rfind(b"\n")) >= 0 or not start:
                file.truncate(start + end + 1)
    except OSError as error:
        raise disk_fault(path, error) from error


def progress_line(status: LoopStatus) -> str:
    """What a terminal shows below the log; without a speed in no replica, where nothing moves."""
    speed = f"{status.tokens_per_s:,.0f}" if status.head else "-"
    shares = (
        f"  {name.removesuffix('_share')} {getattr(status, name):.0%}" for name in stage_figures()
    )
    return (
        f"round {status.round}  step {status.inner_step}/{status.inner_steps}  "
        f"loss {shown_loss(status.train_loss)}  {speed} tokens/s  "
        f"waiting {status.waiting_share:.1%}{''.join(shares)}"
    )


def round_line(report: RoundReport) -> str:
    """A committed round of this peer's work in one line."""
    sent = f"sent {size(report.averaging_bytes)}, averaged by {report.members} peers"
    return (
        f"round {report.round} committed: {report.tokens:,} tokens of {report.record_tokens:,}, "
        f"train loss {shown_loss(report.train_loss)}, "
        f"validation {shown_validation(report.val_loss, report.val_round)}, "
        f"{report.tokens_per_s:,.0f} tokens/s, waiting {report.waiting_share:.1%}, "
        f"{sent if report.members > 1 else 'alone, no average'}"
        f"{UNCOUNTED.get(report.outcome, '')}"
    )


def taken_line(reports: Sequence[RoundReport]) -> str:
    """Rounds in one line of which this peer only took what is in their records."""
    first, last = reports[0], reports[-1]
    took = f"took rounds {first.round} to {last.round}: "
    if first is last:
        took = f"took round {last.round}: "
    # of a state that is gone some of the tokens are its own
    whose = " of others" if all(each.outcome == "followed" for each in reports) else ""
    return (
        f"{took}{sum(each.record_tokens for each in reports):,} tokens{whose}, "
        f"validation {shown_validation(last.val_loss, last.val_round)}"
    )


def shown_validation(loss: float | None, round_number: int) -> str:
    """A validation loss with the round of its anchor; before round 0 that is the start."""
    if loss is None:
        return shown_loss(loss)
    return f"{shown_loss(loss)} ({'start' if round_number < 0 else f'round {round_number}'})"


def shown_loss(loss: float | None) -> str:
    """A loss as people see it; a dash where there is none yet."""
    return "-" if loss is None else f"{loss:.4f}"


def contribution_sentence(gave: OwnContribution, val_loss: float | None, sample: str) -> str:
    """What a peer gave, how the validation loss went meanwhile, and what the model writes now."""
    day, rounds = datetime.fromtimestamp(gave.since, timezone.utc), gave.rounds
    words = (
        f"since {day:%Y-%m-%d} this peer has trained on {gave.tokens:,} tokens in "
        f"{counted(rounds, 'committed round')}, {gave.tokens / max(1, gave.of_tokens):.1%} of what "
        "its stage learnt from in that time"
    )
    if (first := gave.val_loss) is not None and val_loss not in (None, first):
        went = "fell" if val_loss < first else "went"
        words += f"; the validation loss {went} from {first:.4f} to {val_loss:.4f}"
    return words + (f"; the model now continues {sample}" if sample else "")


def event_in_words(
    kind: str, facts: Mapping[str, Any], shown: Callable[[str], str] = shown_peer
) -> str:
    """An event of a replica as people see it; peers by their last six letters and names."""
    members = [shown(str(peer)) for peer in facts.get("members", ())]
    why = "has left" if facts.get("reason") == "left" else f"is gone ({facts.get('reason')})"
    lost = f"the peer of stage {facts.get('stage')} {why}"
    match kind:
        case "replica" if len(members) == 1:
            return "this peer trains, and needs no other for that"
        case "replica":
            return f"{' and '.join(members)} train together, a stage each"
        case "fault":
            return f"{lost}, {shown(str(facts['peer']))}; looking for another one"
        case "lost":
            return f"{lost}; the head of the replica looks for another one"
        case "healed":
            return f"{' and '.join(members)} go on, {facts['seconds']:.1f} s after the fault"
        case _:
            return str(facts["reason"])


SMOOTHING = 0.8  # of the loss and the speed that the progress line shows

OwnWaiting = Literal["join", "merge", "send", "snapshot", "record", "replica"]
Waiting = Literal[OwnWaiting, "neighbours", "spare"]
"""What a peer waits for while it does not compute.

    join        the records or the state that it lacks at its start
    merge       a record or a state to be merged
    send        a message to be taken and noted on disk
    snapshot    a snapshot to be begun in the background, or all of one to be written
    record      the round's own record, under `merge: none`
    replica     a replica to be formed, as its head
    neighbours  activations and gradients, in a replica; data and the like count here too
    spare       a replica that wants it
"""
OWN_WAITING: tuple[OwnWaiting, ...] = get_args(OwnWaiting)
WAITING: tuple[Waiting, ...] = (*OWN_WAITING, "neighbours", "spare")
FOR_AVERAGES: tuple[Waiting, ...] = (
    "merge",
    "send",
    "snapshot",
    "record",
)  # what `waiting_share` is of
PER_ROUND: tuple[Waiting, ...] = ("merge", "send")  # as long in a short round as in a long one


class LoopMeter:
    """What this peer did, since it started and since its last round line."""

    def __init__(self, *, reporter: Reporter, sent: Callable[[], Mapping[str, int]], numel: int):
        """`sent()`: payload bytes so far by kind (dht/rpc.py); `numel`: values of the stage's flat
        vector.

        Set by the owner: `computing_s`, all seconds that the stage has spent computing; `sample`,
        what the model writes now, where this peer has all of it.
        """
        self.reporter = reporter
        self._sent = sent
        self._numel = numel
        self._began = self._line_began = time.monotonic()
        self._waited_before_s = self._line_waited_s = 0.0  # for averages, when these began
        self._spare_before_s = 0.0  # when `_began`
        self._waiting_since = self._began
        self._waiting_for: Waiting | None = None
        self._accounted_at, self._accounted_s = self._began, 0.0
        self._line_sent: Mapping[str, int] = {}
        self._losses: list[float] = []
        # by round sent: inner steps and mean loss
        self._steps_of: dict[int, tuple[int, float | None]] = {}
        self._in_replica_since: float | None = None
        self.computing_s: Callable[[], float] = lambda: 0.0
        self.sample: Callable[[], str] = str
        self.gave = reporter.contribution_before()
        self.contribution_due = False  # to be told
        self.state = "joining"
        self.inner_step = 0  # of this round
        self.inner_steps = self.skipped_steps = 0  # taken, and not, since this peer started
        # seconds since this peer started, by what was waited for
        self.waiting_s: dict[Waiting, float] = dict.fromkeys(WAITING, 0.0)
        self.longest_step_s = 0.0
        self.stall_s = 0.0  # that training stood still for the last whole round, however long
        self._stalled_before_s = 0.0
        self.tokens = 0
        self.tokens_per_s = 0.0
        self.train_loss: float | None = None
        self.val_loss: float | None = None
        self.val_round = -1
        self.compression_error: float | None = None
        self.round_waiting_share = 0.0  # for averages, of the time between its last two records

    # ---- the loop tells --------------------------------------------------------------------------
    def start(self) -> None:
        """Training begins; what came before is no waiting."""
        self.state = "training"
        if not self.gave.since:
            self.gave = replace(self.gave, since=time.time())
        self.reporter.event("training")
        self._count_rest(in_replica=False)
        self._began = self._line_began = time.monotonic()
        self._spare_before_s = self.waiting_s["spare"]
        self._waited_before_s = self._line_waited_s = self._waited_s(FOR_AVERAGES)
        self._stalled_before_s = self._waited_s(PER_ROUND)

    def stepped(self, stepped: Stepped, tokens: int, seconds: float) -> None:
        """An inner step on so many tokens was taken, or skipped."""
        self.inner_step += 1
        # until a round's first step has ended the last round's is told: it may be as long as a
        # round, and those who ring meanwhile wait for as long as it says
        before_s = self.longest_step_s if self.inner_step > 1 else 0.0
        self.longest_step_s = max(before_s, seconds)
        if stepped.skipped:
            self.skipped_steps += 1
            return
        self.inner_steps += 1
        self.tokens += tokens
        self.tokens_per_s = _smooth(self.tokens_per_s or None, tokens / max(seconds, 1e-9))
        if math.isfinite(stepped.loss):  # a member that missed the GO does not know it
            self._losses.append(stepped.loss)
            self.train_loss = _smooth(self.train_loss, stepped.loss)

    @contextmanager
    def waiting(self, reason: Waiting) -> Generator[None]:
        """Time in which the loop does not train: merging, sending, waiting for a record.

        May be nested (a record is merged within the wait for it); the time counts once, for the
        inner reason.
        """
        self._count_waiting()
        outer, self._waiting_for = self._waiting_for, reason
        try:
            yield
        finally:
            self._count_waiting()
            self._waiting_for = outer

    def sent(self, round_number: int, tokens: int) -> None:
        """The round was sent with so many tokens; its steps wait for their record."""
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._steps_of[round_number] = (self.inner_step, loss)
        self._losses.clear()
        self.reporter.event("sent", round=round_number, tokens=tokens)

    def next_round(self) -> None:
        """A new round begins."""
        self.inner_step = 0
        self._count_waiting()
        stalled_s = self._waited_s(PER_ROUND)
        self.stall_s, self._stalled_before_s = stalled_s - self._stalled_before_s, stalled_s

    def _waited_s(self, reasons: Sequence[Waiting]) -> float:
        return sum(self.waiting_s[reason] for reason in reasons)

    def _count_waiting(self) -> None:
        """Take in the wait that is not over yet."""
        now = time.monotonic()
        if self._waiting_for is not None:
            self.waiting_s[self._waiting_for] += now - self._waiting_since
        self._waiting_since = now

    def _count_rest(self, *, in_replica: bool) -> None:
        """Take in the time since the last call in which the stage neither computed nor waited for
        anything of its own: its neighbours, or a replica, let it wait."""
        self._count_waiting()
        now, computing_s = time.monotonic(), self.computing_s()
        accounted_s = computing_s + self._waited_s(OWN_WAITING)
        rest_s = (now - self._accounted_at) - (accounted_s - self._accounted_s)
        self.waiting_s["neighbours" if in_replica else "spare"] += max(0.0, rest_s)
        self._accounted_at, self._accounted_s = now, accounted_s

    def validated(self, round_number: int, loss: float) -> None:
        """The anchor that stands on this round's record was evaluated."""
        self._know(round_number, loss)
        self.reporter.event("validated", round=round_number, loss=loss)

    def heard(self, round_number: int, loss: float) -> None:
        """Another head evaluated a newer anchor."""
        if round_number > self.val_round:
            self._know(round_number, loss)

    def _know(self, round_number: int, loss: float) -> None:
        self.val_loss, self.val_round = loss, round_number
        if self.gave.val_loss is None:
            self.gave = replace(self.gave, val_loss=loss)

    def tell_contribution(self) -> None:
        """Say what this peer gave so far, if anything."""
        self.contribution_due = False
        if self.gave.tokens:
            now, sample = self.val_loss, self.sample()
            self.reporter.event("gave", **asdict(self.gave), now=now, sample=sample)
            logger.info("%s", contribution_sentence(self.gave, now, sample))

    def started_over(self, tokens: int) -> None:
        """Its weights were not finite: what it had learnt from so many tokens is lost."""
        self._losses.clear()
        self.reporter.started_over(tokens)

    def committed(
        self,
        event: Committed,
        outcome: Outcome,
        tokens: int,
        *,
        compression_error: float | None = None,
        residual_norm: float | None = None,
        more: bool = False,
    ) -> None:
        """A record was merged; `more`: the next one is here already.

        compression_error: |m - c| / |m| of this peer's message, None where it is not in the record.
        """
        record = event.record
        if compression_error is not None and math.isfinite(compression_error):
            self.compression_error = compression_error
        steps, loss = self._steps_of.pop(record.round, (0, None))
        self._count_waiting()
        now = time.monotonic()
        wall_s = max(now - self._line_began, 1e-9)
        waited_s = self._waited_s(FOR_AVERAGES)
        self.round_waiting_share = (waited_s - self._line_waited_s) / wall_s
        sent = self._sent()
        since = {kind: count - self._line_sent.get(kind, 0) for kind, count in sent.items()}
        members = len(record.members)
        report = RoundReport(
            round=record.round,
            inner_steps=steps,
            tokens=tokens if outcome is Outcome.COUNTED else 0,
            record_tokens=record.tokens,
            chain_tokens=record.chain_tokens,
            train_loss=loss,
            val_loss=self.val_loss,
            val_round=self.val_round,
            tokens_per_s=self.tokens_per_s,
            waiting_share=self.round_waiting_share,
            sent_bytes=sum(since.values()),
            averaging_bytes=since.get("averaging", 0),
            fp16_bytes=round(2 * 2 * self._numel * (members - 1) / members),
            exchange_s=event.exchange_s,
            matchmaking_s=event.matchmaking_s,
            members=members,
            ranks=rank_span(record.ranks),
            payload_bytes=event.payload_bytes,
            compression_error=compression_error,
            residual_norm=residual_norm,
            outcome=outcome.value,
            digest=event.digest,
            anchor_sha256=event.anchor_sha256,
        )
        self._line_began, self._line_waited_s = now, waited_s
        self._line_sent = sent
        self.reporter.committed(report, more=more)
        if self.gave.since and outcome is not Outcome.REPEATED:  # before, it only catches up
            own, of = report.tokens, self.gave.of_tokens + record.tokens
            tokens, rounds = self.gave.tokens + own, self.gave.rounds + (own > 0)
            self.gave = replace(self.gave, rounds=rounds, tokens=tokens, of_tokens=of)
            self.contribution_due |= own > 0 and rounds % CONTRIBUTION_EVERY == 0

    def read(self, known: LoopStatus, **facts: Any) -> LoopStatus:
        """The status of now: what was `known` of the replica, these facts, and all that is counted
        here.
        """
        now = time.monotonic()
        trained_for_s = max(now - self._began, 1e-9)
        self._count_rest(in_replica=bool(known.head))
        if self._in_replica_since is None and known.head:
            self._in_replica_since = now
        computing_s, since = self.computing_s(), self._in_replica_since
        waited_s = self._waited_s(FOR_AVERAGES) - self._waited_before_s
        return replace(
            known,
            state="spare" if self.state == "training" and not known.head else self.state,
            inner_step=self.inner_step,
            step_s=self.longest_step_s,
            tokens=self.tokens,
            tokens_per_s=self.tokens_per_s,
            train_loss=self.train_loss,
            val_loss=self.val_loss,
            val_round=self.val_round,
            waiting_share=waited_s / trained_for_s,
            round_waiting_share=self.round_waiting_share,
            computing_share=0.0 if since is None else computing_s / max(now - since, 1e-9),
            spare_share=(self.waiting_s["spare"] - self._spare_before_s) / trained_for_s,
            compression_error=self.compression_error,
            gave=self.gave,
            **facts,
        )


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new
