"""What people and scripts see of a running peer: log lines, a progress line, and two files.

    events.jsonl   one JSON object a line, appended: training, sent, round, validated, void,
                   resynced, started_over, and of the replica: replica, fault, healed, lost,
                   dissolved
    status.json    the newest progress, replaced about once a second

The log is for people; scripts (the demo among them) read the files. Loss is in nats a token.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from dilocox.peer.files import disk_fault, write_atomically
from dilocox.peer.logs import CLEAR_LINE

STATES = ("joining", "spare", "training", "leaving", "resting")
STATUS_PERIOD_S = 1.0
PEER_ID_LETTERS = 40  # no other word is so long
UNCOUNTED = {"undone": " (without yours, which go with a later one)", "repeated": " (again)"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a peer is right now."""

    state: str  # of STATES
    head: str  # of the replica that it is in, empty where it is in none
    members: list[str]  # by stage, of the replica that it leads
    epoch: int  # of that replica
    codec: str  # of that replica's activations
    blocked: str  # why it forms no replica, or empty
    round: int
    inner_step: int
    inner_steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    val_round: int
    tokens_per_s: float
    waiting_share: float
    computing_share: float = 0.0  # of the time since it first was in a replica
    applied_round: int
    in_flight: int | None  # the round whose exchange is under way
    unsent_tokens: int = 0  # of this peer's own, those that no record holds as far as it knows
    lost_tokens: int = 0  # and those that none ever will


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


class Listener(Protocol):
    """Hears what a peer reports, in the thread that trains: it must be quick and raise nothing."""

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """An event, with the facts that events.jsonl gets."""
        ...

    def on_status(self, status: Status) -> None:
        """Where the peer is; after every inner step."""
        ...


class Reporter:
    """Writes the log and the two files of one peer. `listeners` hear all of it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._events = folder / "events.jsonl"
        self._terminal = sys.stderr.isatty()
        self._status_at = 0.0
        self.listeners: list[Listener] = []

    def event(self, kind: str, **facts: Any) -> None:
        """Append one event for scripts; EnvironmentFault if the disk is full."""
        for listener in self.listeners:
            listener.on_event(kind, facts)
        line = json.dumps({"event": kind, "time": round(time.time(), 3)} | facts)
        try:
            with self._events.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise disk_fault(self._events, error) from error

    def tell(self, kind: str, **facts: object) -> None:
        """One event of the replica that this peer is in, and a line in the log."""
        self.event(kind, **facts)
        logger.info("%s: %s", kind, shown_facts(facts))

    def status(self, status: Status, *, force: bool = False) -> None:
        """Show the progress, about once a second."""
        for listener in self.listeners:
            listener.on_status(status)
        if not force and time.monotonic() - self._status_at < STATUS_PERIOD_S:
            return
        self._status_at = time.monotonic()
        text = json.dumps(asdict(status))
        write_atomically(self._folder / "status.json", text.encode(), durable=False)
        if self._terminal:
            sys.stderr.write(CLEAR_LINE + progress_line(status))
            sys.stderr.flush()

    def committed(self, report: RoundReport) -> None:
        """One line a round."""
        self.event("round", **asdict(report))
        logger.info("%s", round_line(report))

    def void(self, round_number: int, reason: str) -> None:
        """A round that came to nothing for this peer."""
        self.event("void", round=round_number, reason=reason)
        logger.info("round %d void: %s; nothing is lost, it goes on", round_number, reason)

    def started_over(self, tokens: int) -> None:
        """The weights were not finite, so that they are the anchor's again."""
        self.event("started_over", tokens=tokens)
        logger.warning(
            "the weights here were not finite (NaN): this peer goes on from the anchor with a new "
            "inner optimizer, and what it learnt from %d tokens is lost; where that comes again "
            "on one machine, test its memory; on many, the run's inner.learning_rate is too high",
            tokens,
        )


def progress_line(status: Status) -> str:
    """What a terminal shows below the log; without a speed in no replica, where nothing moves."""
    speed = f"{status.tokens_per_s:,.0f}" if status.head else "-"
    return (
        f"round {status.round}  step {status.inner_step}/{status.inner_steps}  "
        f"loss {shown_loss(status.train_loss)}  {speed} tokens/s  "
        f"waiting {status.waiting_share:.1%}"
    )


def round_line(report: RoundReport) -> str:
    """A committed round in one line; short where this peer only took what is in its record."""
    loss = f"validation {shown_validation(report.val_loss, report.val_round)}"
    group = counted(report.members, "member")
    stands = f"digest {report.digest[:12]}, anchor {report.anchor_sha256[:12]}"
    if report.outcome == "followed":
        return (
            f"took round {report.round}: {report.record_tokens} tokens of others, {loss}, {group}, "
            f"{stands}"
        )
    if report.outcome == "reset":  # some of the tokens are its own, of a state that is gone
        return (
            f"took round {report.round}: {report.record_tokens} tokens, {loss}, {group}, {stands}"
        )
    sent = (
        f"sent {report.averaging_bytes / 1e3:.1f} kB (fp16 {report.fp16_bytes / 1e3:.1f} kB), "
        f"{group}"
    )
    return (
        f"round {report.round} committed: {report.inner_steps} inner steps, {report.tokens} tokens "
        f"of {report.record_tokens}, train loss {shown_loss(report.train_loss)}, {loss}, "
        f"{report.tokens_per_s:.0f} tokens/s, waiting {report.waiting_share:.1%}, "
        f"{sent if report.members > 1 else 'alone, no average'}, {stands}"
        f"{UNCOUNTED.get(report.outcome, '')}"
    )


def shown_validation(loss: float | None, round_number: int) -> str:
    """A validation loss with the round of its anchor; before round 0 that is the start."""
    if loss is None:
        return shown_loss(loss)
    return f"{shown_loss(loss)} ({'start' if round_number < 0 else f'round {round_number}'})"


def shown_loss(loss: float | None) -> str:
    """A loss as people see it; a dash where there is none yet."""
    return "-" if loss is None else f"{loss:.4f}"


def counted(number: int, what: str) -> str:
    """A number of things, whose name takes an s where they are not one."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shown_facts(facts: Mapping[str, object]) -> str:
    """Facts of an event as people see them; peer ids by their last six letters. A reason speaks for
    itself.
    """
    return ", ".join(
        _shown(value) if name == "reason" else f"{name} {_shown(value)}"
        for name, value in facts.items()
    )


def _shown(value: object) -> str:
    match value:
        case float() if math.isfinite(value):
            return f"{value:.2f}"
        case str() if len(value) > PEER_ID_LETTERS and " " not in value:
            return value[-6:]
        case list():
            return " ".join(_shown(item) for item in cast("list[object]", value))
        case _:
            return str(value)
