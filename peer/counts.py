"""Counters that the averaging process moves and the trainer's process reads: bytes, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dilocox.peer.memory import shared_zeros

BYTE_KINDS = ("averaging", "record", "state")
"""What payload bytes are for: exchanges, or records and states for those who were not in them."""
REFUSALS = ("frame", "group", "share", "payload", "late", "vote", "question", "record")
"""Why the averaging process refuses what another peer sent."""

_KINDS = {"record": "record", "certificate": "record", "state": "state"}


class Counts:
    """Integers by name. Only one process may add."""

    def __init__(self, names: Sequence[str], *, shared: bool = False):
        """shared: with the processes that are forked after this."""
        self._places = {name: place for place, name in enumerate(names)}
        zeros = shared_zeros if shared else torch.zeros
        self._counts = zeros(len(names), dtype=torch.int64)

    def add(self, name: str, count: int = 1) -> None:
        """Count so many more; KeyError for a name that was not given at the start."""
        self._counts[self._places[name]] += count

    def read(self) -> dict[str, int]:
        """All counts."""
        return {name: int(self._counts[place]) for name, place in self._places.items()}

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._counts.sum())


def byte_kind(what: object) -> str:
    """The kind of a download, by what was asked for."""
    return _KINDS.get(str(what), "averaging")
