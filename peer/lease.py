"""Leases on data parts: heads agree through the DHT who reads which, while peers come and go.

A lease is a signed record that expires by itself. A head tries parts in an order of its own (by a
hash of its id, so that heads rarely meet), takes the first that nobody holds, and looks again at
every heartbeat: where two took the same part at once, the smaller id keeps it and the other moves
on.
"""

from __future__ import annotations

import hashlib

from dilocox.dht.keys import part_key
from dilocox.dht.records import PartRecord, Record
from dilocox.dht.swarm import Swarm

MAX_TRIES = 8  # reads of the DHT for one new lease; after that parts are shared


class PartLease:
    """The part of the data that this head reads."""

    def __init__(
        self,
        *,
        swarm: Swarm,
        run: str,
        me: str,
        parts: int,
        first: int | None = None,
    ):
        """`first`: the part to try first, that of the snapshot."""
        self._swarm = swarm
        self._run = run
        self._me = me
        self._order = sorted(range(parts), key=lambda part: (part != first, _rank(me, part)))
        self._tried = 0
        self.part = self._order[0]
        self._positions: dict[int, int] = {}  # how far the holders of other parts were seen
        self.held = False
        self._moved = False  # to a part whose position is not this head's own

    @property
    def position(self) -> int:
        """Where to begin in a part that was just taken: how far its last holder was seen."""
        return self._positions.get(self.part, 0)

    def settle(self) -> bool:
        """Look who else has the part, and take another one if it is somebody else's; whether so.

        Then `announcement` is to be published, and `published` told how that went. (Three threads
        take turns with these: what one of them changes, the others see whole.)
        """
        part, tries = self.part, 0
        while self._taken_by_another(part) and tries < MAX_TRIES:
            part = self._next()
            tries += 1
        moved = part != self.part or not self.held
        self.part, self._moved = part, moved
        return moved

    def announcement(self, position: int) -> dict[str, Record]:
        """What keeps the lease. position: how far this head has read the part it held before."""
        record = PartRecord(part=self.part, position=self.position if self._moved else position)
        return {part_key(self._run, record.part): record}

    def published(self, stored: bool) -> None:
        """Whether the DHT took the announcement."""
        self.held, self._moved = stored, False

    def finished(self) -> None:
        """The part was read to its end: take another one."""
        self.part, self.held = self._next(), False

    def _next(self) -> int:
        self._tried += 1
        return self._order[self._tried % len(self._order)]

    def _taken_by_another(self, part: int) -> bool:
        holders = self._swarm.read(part_key(self._run, part), PartRecord) or {}
        others = {peer: lease for peer, lease in holders.items() if peer != self._me}
        if others:
            self._positions[part] = max(lease.position for lease in others.values())
        # a lease that we hold yields only to a smaller id; a free one must have nobody on it
        held = self.held and part == self.part
        return any(peer < self._me for peer in others) if held else bool(others)


def _rank(me: str, part: int) -> bytes:
    return hashlib.sha256(f"{me}/{part}".encode()).digest()
