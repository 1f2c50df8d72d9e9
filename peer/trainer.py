"""The training loop of a peer: inner steps with its replica, and what comes between them.

Runs in the main thread. A peer of stage 0 forms a replica and leads it; a peer of another stage
serves the head that recruited it. Who is in no replica follows the records and waits: heads for
free peers, others for a head. Records and sends are learner.py's.
"""

from __future__ import annotations

import threading
from typing import Protocol

from dilocox.dht.errors import UnreadableManifest
from dilocox.peer.learner import Learner, Revised


class Move(Exception):
    """This spare is to host another stage."""

    def __init__(self, stage: int):
        super().__init__(stage)
        self.stage = stage


class Part(Protocol):
    """What differs between a head and the other members of a replica."""

    def turn(self) -> None:
        """Do the next piece of work, of a few seconds at most, or wait a moment for some."""
        ...

    @property
    def between_steps(self) -> bool:
        """Whether the weights may be changed now."""
        ...

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to do here."""
        ...

    def part(self, *, ended: bool) -> None:
        """Leave the replica in good order."""
        ...


class Trainer:
    """One peer's training; `run` returns when the run has ended or `stop` is set."""

    def __init__(self, *, learner: Learner, part: Part, stop: threading.Event):
        self._learner = learner
        self._part = part
        self._stop = stop

    def run(self) -> None:
        """Join, then train until the run's end, a stop, or a failure (which is raised).

        Raises:
            Move: this peer should start anew as a peer of another stage; everything is on disk.
            Revised: likewise, as a peer of the same stage.
            UnreadableManifest: the run goes on under rules that this program cannot follow.
        """
        learner, part = self._learner, self._part
        move: Move | Revised | UnreadableManifest | None = None
        try:
            learner.join()
            while not (self._stop.is_set() or part.ended):
                if part.between_steps:
                    learner.between_steps()
                part.turn()
        except (Move, Revised, UnreadableManifest) as asked:
            move = asked
        ended = not self._stop.is_set() and move is None
        part.part(ended=ended)
        learner.leave(ended=ended)
        if move is not None:
            raise move
