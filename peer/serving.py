"""The part of a peer of any stage but the first: it serves the head that recruited it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from dilocox.peer.coordinator import Coordinator
from dilocox.peer.learner import POLL_S, Learner
from dilocox.peer.trainer import Move
from dilocox.pipeline.candidates import unfilled
from dilocox.pipeline.desk import Desk
from dilocox.pipeline.following import Follower
from dilocox.pipeline.happenings import Stepped
from dilocox.pipeline.member import Member

logger = logging.getLogger(__name__)

HANDOVER_LIMIT_S = 5.0  # how long a leaving member waits for the head to replace it


class Serving:
    """What such a peer does between two looks at records and sends."""

    def __init__(
        self,
        *,
        learner: Learner,
        follower: Follower,
        member: Member,
        desk: Desk,
        coordinator: Coordinator,
        num_stages: int,
        window: Callable[[], int],
    ):
        self._learner = learner
        self._follower = follower
        self._member = member
        self._desk = desk
        self._coordinator = coordinator
        self._num_stages = num_stages
        self._window = window
        self._stepped_at = time.monotonic()

    @property
    def between_steps(self) -> bool:
        """Whether nothing of an inner step is under way here."""
        return self._follower.between_steps

    @property
    def ended(self) -> bool:
        """Whether this peer is in no replica, and the run has ended or its operator has ended it.

        The run counts its tokens on stage 0; this stage's chain may be a little ahead or behind.
        """
        ended = self._coordinator.run_ended or self._learner.finished
        return ended and not self._follower.head

    def turn(self) -> None:
        """The next piece of work that came, or a wait for some."""
        self._desk.open({"round": self._learner.round, "window": self._window()})
        self._take(self._follower.turn(POLL_S))
        move = self._coordinator.move_to
        if move is not None and not self._learner.unsent and self._desk.state == "free":
            self._desk.shut("it moves to another stage")
            raise Move(move)

    def part(self, *, ended: bool) -> None:
        """Wait for the head to replace this peer at the end of an inner step, for a while."""
        self._desk.shut("it leaves")
        self._member.leaving = True
        end = time.monotonic() + HANDOVER_LIMIT_S
        while self._follower.head and time.monotonic() < end:
            self._take(self._follower.turn(POLL_S))
        self._follower.leave()
        self._show_place()

    def _take(self, stepped: Stepped | None) -> None:
        if stepped is not None:
            now = time.monotonic()
            self._learner.stepped(stepped, now - self._stepped_at)
            self._stepped_at = now
        self._show_place()

    def _show_place(self) -> None:
        head = self._follower.head
        if head != self._learner.place.head:
            self._stepped_at = time.monotonic()
        blocked = "" if head else self._blocked()
        if blocked != self._learner.place.blocked:
            if blocked:
                logger.warning("the run is blocked: %s", blocked)
            else:
                logger.info("the run is not blocked any more")
        self._learner.place = replace(self._learner.place, head=head, blocked=blocked)
        self._learner.publish()

    def _blocked(self) -> str:
        """Why no replica can be formed; as before where the look at the swarm is not one of now:
        without a record of this peer, which is here, it does not show others either.
        """
        view = self._coordinator.view
        own = (here[view.me].state for here in view.stages.values() if view.me in here)
        if all(state in ("left", "joining") for state in own):
            return self._learner.place.blocked
        return "; ".join(unfilled(view.stages, self._num_stages))
