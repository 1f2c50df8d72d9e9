"""A reservation's clock, and requests as heads make them, for the tests of recruiting."""

from __future__ import annotations

from typing import Any

from dilocox.pipeline.frames import Frame
from dilocox.pipeline.reservation import Assignment, Reservation

LEASE_S = 10.0


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def assignment(head: str = "A", epoch: int = 1, **fields: Any) -> Assignment:
    plain: dict[str, Any] = {
        "members": (head, "me", "last"),
        "clients": (False, True, False),
        "codecs": ("bf16", "int4"),
        "step": 4,
        "done": (3, 0.5, 1e-3),
    }
    return Assignment(replica=head, head=head, epoch=epoch, **plain | fields)


def assign(reservation: Reservation, what: Assignment, *, by: str = "") -> Frame:
    peer = by or what.head
    return reservation.answer(peer, Frame(kind="assign", replica=peer, facts=what.to_facts()))


def ask(reservation: Reservation, kind: str, head: str, **facts: object) -> Frame:
    return reservation.answer(head, Frame(kind=kind, replica=head, facts=facts))
