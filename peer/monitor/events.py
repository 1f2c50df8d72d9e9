"""What happened in a run, in lines for people: which peers came, moved and left, what broke and
healed, what the operator changed, and what the run has reached. Apart from history.py, which
remembers these events: this puts them into words.

Pure: from two looks. What happens again and again is one line with a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dilocox.peer.monitor.look import SwarmLook

Shown = Callable[[str], str]
EventKind = Literal["joined", "left", "moved", "healed", "fault", "revision", "milestone"]

MAX_EVENTS = 120
GROUPED = 16  # newest lines among which the same one counts as its repetition
TOLD_SINGLY = 4  # peers that come or leave between two looks; of more there is one line
BETTER = 0.95  # of the best loss that was told is a better one that is told
STATES = {"running": "resumed", "paused": "paused", "ended": "ended"}


@dataclass(frozen=True)
class EventLine:
    """One line. at: when it happened last, seconds since the epoch. count: how often."""

    at: float
    kind: EventKind
    text: str
    count: int = 1


@dataclass(kw_only=True)
class EventLog:
    """The newest events, the oldest first, and what is known of the run since the last look.

    members: of replicas by head. tenths: of end_tokens that are trained. best: the best validation
    loss that was told. revision, state: of the manifest.
    """

    rows: list[EventLine] = field(default_factory=list[EventLine])
    members: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tenths: int | None = None
    best: float | None = None
    revision: int | None = None
    state: str = "running"

    def add(self, at: float, kind: EventKind, text: str) -> None:
        """Take in one, which may be the repetition of another; the text is bounded already."""
        for row in self.rows[-GROUPED:]:
            if (row.kind, row.text) == (kind, text):
                self.rows.remove(row)
                self.rows.append(replace(row, at=at, count=row.count + 1))
                return
        self.rows = [*self.rows, EventLine(at, kind, text)][-MAX_EVENTS:]

    def come_and_go(
        self, look: SwarmLook, before: Mapping[str, int], present: Mapping[str, int], shown: Shown
    ) -> None:
        """Peers by their stage, at the look before and now; `shown`: by id, as people see them."""
        said = [peer for stage in look.stages.values() for peer in stage]  # others went silent
        left = {peer: before[peer] for peer in said if peer in before and peer not in present}
        came = {peer: stage for peer, stage in present.items() if peer not in before}
        crowds: dict[EventKind, dict[str, int]] = {"left": left}
        if self.revision is not None:  # else they were there before
            crowds["joined"] = came
        for kind, peers in crowds.items():
            if len(peers) > TOLD_SINGLY:
                self.add(look.at, kind, f"{len(peers)} peers {kind}")
                continue
            for peer, stage in peers.items():
                self.add(look.at, kind, f"peer {shown(peer)} {kind} stage {stage}")
        for peer, stage in present.items():
            if (old := before.get(peer, stage)) != stage:
                text = f"peer {shown(peer)} moved from stage {old} to stage {stage}"
                self.add(look.at, "moved", text)

    def look(
        self, look: SwarmLook, tokens: int, validation: tuple[int, float] | None, shown: Shown
    ) -> None:
        """Replicas, the operator's changes, and what is reached. tokens: of the chain of stage 0.
        validation: round and loss, in nats a token, of the newest one.
        """
        for head, record in look.replicas.items():
            pairs = zip(self.members.get(head, record.members), record.members, strict=False)
            for stage, (old, new) in enumerate(pairs):
                if old != new:
                    text = f"peer {shown(new)} took over stage {stage} from {shown(old)}"
                    self.add(look.at, "healed", text)
        self.members = {head: record.members for head, record in look.replicas.items()}
        self._hear_operator(look)
        tenths = min(10, 10 * tokens // look.manifest.end_tokens)
        if self.tenths is not None and tenths > self.tenths:
            self.add(look.at, "milestone", f"{10 * tenths} % of the tokens are trained")
        if tokens or not look.claims.get(0):  # else its chain is not walked yet
            self.tenths = tenths
        if validation is not None and (self.best is None or validation[1] <= BETTER * self.best):
            if self.best is not None:
                text = "validation loss {1:.3f} after round {0}, the best so far"
                self.add(look.at, "milestone", text.format(*validation))
            self.best = validation[1]

    def _hear_operator(self, look: SwarmLook) -> None:
        operation = look.manifest.operation
        if self.revision is not None and operation.revision > self.revision:
            if operation.state != self.state:
                done = f"{STATES[operation.state]} the run"
            elif [rules for rules, _ in operation.rollbacks[-1:]] == [operation.revision]:
                done = f"went back to round {operation.rollbacks[-1][1]}"
            elif operation.rules == operation.revision:
                done = "changed the run's values"
            else:
                done = "revised the run"
            self.add(look.at, "revision", f"the operator {done} (revision {operation.revision})")
        self.revision, self.state = operation.revision, operation.state
