"""What happened in a run, in lines for people: who came, moved and left, what broke and healed,
what the operator changed, and what the run has reached.

Pure: from a look and what the one before it said. What happens again and again is one line with a
number. A monitor that starts does not tell of what was there before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dilocox.peer.monitor.look import SwarmLook

Kind = Literal["joined", "left", "moved", "healed", "fault", "revision", "milestone"]

MAX_EVENTS = 120
GROUPED = 16  # newest lines among which the same one counts as its repetition
TOLD_SINGLY = 4  # peers that come or leave between two looks; of more there is one line
BETTER = 0.95  # of the best loss that was told is a better one that is told
STATES = {"running": "resumed", "paused": "paused", "ended": "ended"}


@dataclass(frozen=True)
class Event:
    """One line. at: when it happened last, seconds since the epoch. count: how often."""

    at: float
    kind: Kind
    text: str
    count: int = 1


@dataclass(kw_only=True)
class EventLog:
    """The newest events, the oldest first, and what is known of the run since the last look.

    members: of replicas by head. tenths: of end_tokens that are trained. best: the best validation
    loss that was told. revision, state: of the manifest.
    """

    rows: list[Event] = field(default_factory=list[Event])
    members: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tenths: int | None = None
    best: float | None = None
    revision: int | None = None
    state: str = "running"

    def add(self, at: float, kind: Kind, text: str) -> None:
        """Take in one, which may be the repetition of another; the text is bounded already."""
        for row in self.rows[-GROUPED:]:
            if (row.kind, row.text) == (kind, text):
                self.rows.remove(row)
                self.rows.append(replace(row, at=at, count=row.count + 1))
                return
        self.rows = [*self.rows, Event(at, kind, text)][-MAX_EVENTS:]

    def come_and_go(
        self, look: SwarmLook, before: Mapping[str, int], present: Mapping[str, int]
    ) -> None:
        """Peers by their stage, at the look before and now."""
        came = sorted(present.keys() - before.keys())
        left = sorted(
            peer
            for peer, stage in before.items()
            if peer not in present and peer in look.stages.get(stage, {})  # else it went silent
        )
        if self.revision is not None:
            self._tell_of(look.at, "joined", {peer: present[peer] for peer in came})
        self._tell_of(look.at, "left", {peer: before[peer] for peer in left})
        for peer in sorted(present.keys() & before.keys()):
            if present[peer] != before[peer]:
                text = f"peer {peer[-6:]} moved from stage {before[peer]} to stage {present[peer]}"
                self.add(look.at, "moved", text)

    def _tell_of(self, at: float, kind: Kind, stages: Mapping[str, int]) -> None:
        if len(stages) > TOLD_SINGLY:
            self.add(at, kind, f"{len(stages)} peers {kind}")
            return
        for peer, stage in stages.items():
            self.add(at, kind, f"peer {peer[-6:]} {kind} stage {stage}")

    def look(self, look: SwarmLook, tokens: int, validation: tuple[int, float] | None) -> None:
        """Replicas, the operator's changes, and what is reached. tokens: of the chain of stage 0.
        validation: round and loss, in nats a token, of the newest one.
        """
        for head, record in look.replicas.items():
            old = self.members.get(head, record.members)
            for stage, pair in enumerate(zip(old, record.members, strict=False)):
                if pair[0] != pair[1]:
                    text = f"peer {pair[1][-6:]} took over stage {stage} from {pair[0][-6:]}"
                    self.add(look.at, "healed", text)
        self.members = {head: record.members for head, record in look.replicas.items()}
        self._hear_operator(look)
        self._reach(look, tokens, validation)

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
            text = f"the operator {done} (revision {operation.revision})"
            self.add(look.at, "revision", text)
        self.revision, self.state = operation.revision, operation.state

    def _reach(self, look: SwarmLook, tokens: int, validation: tuple[int, float] | None) -> None:
        tenths = min(10, 10 * tokens // look.manifest.end_tokens)
        if tenths > (tenths if self.tenths is None else self.tenths):
            text = f"{10 * tenths} % of the tokens are trained"
            self.add(look.at, "milestone", text)
        if tokens or not look.claims.get(0):  # else its chain is not walked yet
            self.tenths = tenths
        if validation is None:
            return
        number, loss = validation
        if self.best is not None and 0 < loss <= BETTER * self.best:
            text = f"validation loss {loss:.3f} after round {number}, the best so far"
            self.add(look.at, "milestone", text)
            self.best = loss
        self.best = loss if self.best is None else self.best
