"""A member that is no head: it does what comes over its links, and knows when it is on its own.

A head that dies or freezes tells nobody. So a member that loses a neighbour asks the head whether
it still leads this replica, again and again; when the head does not answer, or says no, the member
leaves the replica, keeps what it learnt, and is free for another head. A head that does answer is
given a while to heal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from dilocox.pipeline.desk import Assignment
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.happenings import Dissolved, Fault, Stepped
from dilocox.pipeline.member import Member
from dilocox.pipeline.ports import Asking, receive

PING_LIMIT_S = 1.0
ASK_S = 1.0  # between two questions to the head
PATIENCE = 3  # questions without an answer until a head counts as gone
STALL_LIMIT_S = 300.0  # without a piece of work in a replica whose links stand
RESCUE_LIMIT_S = 45.0  # what healing may take before a member gives its replica up


class Orders(Protocol):
    """What a follower needs of its desk, where heads leave their orders."""

    @property
    def released(self) -> bool:
        """Whether the head let this peer go."""
        ...

    def take_assignment(self) -> Assignment | None:
        """The newest assignment that was not taken yet."""
        ...

    def leave(self, replica: str) -> None:
        """This peer is in that replica no more."""
        ...


class Follower:
    """Turns what heads and neighbours say into inner steps of this stage.

    `tell(kind, **facts)` hears of faults and of the end of a replica.
    """

    def __init__(self, *, member: Member, network: Asking, desk: Orders, tell: Callable[..., None]):
        self._member = member
        self._network = network
        self._desk = desk
        self._tell = tell
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
        assignment = self._desk.take_assignment()
        if assignment is not None:
            return self._take_up(assignment)
        if self._desk.released and self.head:
            stepped = self._receive(0.0)  # its last words may have come before that
            if stepped is None and self.head:
                self._leave("its head let it go")
            return stepped
        worked = self._lost_at is None and self._member.work()
        if worked:
            self._moved_at = time.monotonic()
        elif self.head and time.monotonic() - self._moved_at > STALL_LIMIT_S:
            self._leave("nothing came from its head")
        return self._receive(0.0 if worked else wait_s)

    def leave(self) -> None:
        """Leave the replica, if this peer is in one."""
        if self._member.assignment is not None:
            self._leave("this peer leaves")

    def _take_up(self, assignment: Assignment) -> Stepped | None:
        self._lost_at, self._moved_at = None, time.monotonic()
        stepped = self._member.take_up(assignment)
        self._tell("replica", epoch=assignment.epoch, members=list(assignment.members))
        return stepped

    def _receive(self, wait_s: float) -> Stepped | None:
        """Take in all that has come, up to the end of an inner step."""
        while (message := receive(self._network.inbox, wait_s)) is not None:
            wait_s = 0.0
            happening = self._member.handle(message)
            match happening:
                case Stepped():
                    return happening
                case Fault():
                    self._lose(happening)
                case Dissolved():
                    self._leave("its head dissolved it")
                case _:
                    pass
        self._ask_head()
        return None

    def _lose(self, fault: Fault) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._asked_at = 0.0
            self._unanswered = 0 if fault.stage > 0 else PATIENCE - 1  # it is the head that is lost
            self._tell("lost", stage=fault.stage, reason=fault.reason, after_s=fault.after_s)

    def _ask_head(self) -> None:
        """With a neighbour lost: is there still a head that will heal this replica?"""
        assignment, now = self._member.assignment, time.monotonic()
        if self._lost_at is None or assignment is None or now - self._asked_at < ASK_S:
            return
        if now - self._lost_at > RESCUE_LIMIT_S:
            self._leave("it was not healed in time")
            return
        ping = Frame(kind="ping", replica=assignment.replica, epoch=assignment.epoch)
        answer = self._network.request_all({assignment.head: ping}, PING_LIMIT_S)[assignment.head]
        self._asked_at = time.monotonic()
        if answer is None:
            self._unanswered += 1
            if self._unanswered >= PATIENCE:
                self._member.dissolve()  # those below need not find out by themselves
                self._leave("its head is gone")
            return
        self._unanswered = 0
        if not _still_leads(answer.frame.facts, assignment, self._member.stage):
            self._leave("its head leads a replica without it, or none")

    def _leave(self, reason: str) -> None:
        assignment = self._member.assignment
        self._lost_at = None
        self._member.end()
        if assignment is not None:
            self._desk.leave(assignment.replica)
            self._tell("dissolved", reason=reason)


def _still_leads(facts: Mapping[str, object], assignment: Assignment, stage: int) -> bool:
    """Whether a head that shows these facts has not let its member of this stage go.

    It shows them between inner steps: a member that it took in since then is in a later epoch.
    """
    members, epoch = facts.get("members"), facts.get("epoch")
    overtaken = isinstance(epoch, int) and epoch < assignment.epoch
    listed = isinstance(members, list | tuple) and assignment.members[stage] in members
    return overtaken or listed
