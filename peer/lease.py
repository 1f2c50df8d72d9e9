"""Leases on data parts: heads agree through the DHT who reads which, while peers come and go.

A lease is a signed record that expires by itself. A head tries parts in an order of its own (by a
hash of its id, so that heads rarely meet), takes the first that nobody holds, and looks again at
every heartbeat: where two took the same part at once, the smaller id keeps it and the other moves
on.
"""

from __future__ import annotations

import hashlib

from dilocox.dht.keys import part_key
from dilocox.dht.records import PartRecord
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
        lifetime_s: float,
        first: int | None = None,
    ):
        """`first`: the part to try first, that of the snapshot."""
        self._swarm = swarm
        self._run = run
        self._me = me
        self._order = sorted(range(parts), key=lambda part: (part != first, _rank(me, part)))
        self._lifetime_s = lifetime_s
        self._tried = 0
        self.part = self._order[0]
        self._positions: dict[int, int] = {}  # how far the holders of other parts were seen
        self.held = False

    @property
    def position(self) -> int:
        """Where to begin in a part that was just taken: how far its last holder was seen."""
        return self._positions.get(self.part, 0)

    def renew(self, position: int) -> bool:
        """Keep the lease, or take another part if somebody else has this one; True if it changed.

        `position`: how far this head has read the part that it holds.
        """
        before = self.part if self.held else None
        tries = 0
        while self._taken_by_another() and tries < MAX_TRIES:
            self._next()
            tries += 1
        if self.part != before:
            position = self.position
        record = PartRecord(part=self.part, position=position)
        self.held = self._swarm.publish(part_key(self._run, self.part), record, self._lifetime_s)
        return self.part != before

    def finished(self) -> None:
        """The part was read to its end: take another one at the next renewal."""
        self._next()
        self.held = False

    def _next(self) -> None:
        self._tried += 1
        self.part = self._order[self._tried % len(self._order)]

    def _taken_by_another(self) -> bool:
        holders = self._swarm.read(part_key(self._run, self.part), PartRecord) or {}
        others = {peer: lease for peer, lease in holders.items() if peer != self._me}
        if others:
            self._positions[self.part] = max(lease.position for lease in others.values())
        # a lease that we hold yields only to a smaller id; a free one must have nobody on it
        return any(peer < self._me for peer in others) if self.held else bool(others)


def _rank(me: str, part: int) -> bytes:
    return hashlib.sha256(f"{me}/{part}".encode()).digest()
