"""One peer of a swarm under test: its processes, and what it says in its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgpack

from dilocox.dht.identity import Identity
from dilocox.peer.commands.demo import WatchedPeer
from dilocox.peer.rounds.vote import Vote
from dilocox.peer.state_folder import StateFolder
from tests.swarm.halting import Halt
from tests.swarm.processes import Process, family
from tests.swarm.shown import Shown


@dataclass
class Peer(WatchedPeer):
    """A peer of the swarm; `expected` while it should be running."""

    tag: str = ""
    expected: bool = True
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # what python runs, if not `-m dilocox`
    shown: Shown | None = None
    halt: Halt | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, oldest first."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def peer_id(self) -> str:
        """Its id in the swarm; it must have started."""
        return Identity.load_or_create(StateFolder(self.state).identity).peer_id

    @property
    def doing(self) -> str:
        """joining, spare, training or leaving; empty before its first status."""
        return self.status.get("state", "")

    def record(self, round_number: int) -> dict[str, Any] | None:
        """What it reported of a committed round."""
        return next((line for line in self.rounds if line["round"] == round_number), None)

    @property
    def in_flight(self) -> int | None:
        """The round whose exchange is under way."""
        return self.status.get("in_flight")

    def processes(self) -> list[Process]:
        """All its processes that run."""
        return family(self.tag)

    def p2pd(self) -> Process:
        """Its libp2p daemon."""
        return next(process for process in self.processes() if process.name == "p2pd")

    def averager(self) -> Process:
        """Its averaging process: the main process forks it last."""
        children = [each for each in self.processes() if each.parent == self.child.pid]
        python = [each for each in children if "shm_manag" not in each.name]
        return max(python, key=lambda each: each.pid)

    def decided(self, round_number: int) -> dict[str, Any] | None:
        """How a round that it was in ended for it: its record, or a void."""
        ends = (event for event in self.events if event["event"] in ("round", "void"))
        return next((event for event in ends if event["round"] == round_number), None)

    def log_text(self) -> str:
        """The log of its newest start."""
        return self.child.log.read_text(errors="replace")

    def voted(self, round_number: int, attempt: int = 0) -> bool:
        """Whether its vote of this attempt is on disk."""
        return any(self.state.glob(f"*-stage*/log/{round_number:08d}-{attempt}.vote"))

    def votes(self, round_number: int) -> list[Vote]:
        """Its votes of all attempts that are on disk; for a peer that does not run."""
        files = sorted(self.state.glob(f"*-stage*/log/{round_number:08d}-*.vote"))
        votes = [msgpack.unpackb(file.read_bytes()) for file in files]
        return [
            Vote(voter=voter, digest=digest, missed=tuple(missed))
            for voter, digest, missed, *_ in votes
        ]

    def look(self) -> None:
        """Read what it has said since the last look."""
        super().look()
        if self.shown is not None:
            self.shown.look()

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        super()._take(event)
