"""Leases on data parts: heads agree in the DHT which one reads which, while peers come and go.

A lease is a signed record that expires by itself. A head tries parts in an order of its own (by a
hash of its id, so that heads rarely meet), takes the first that nobody holds, and looks again at
every heartbeat: where two took the same part at once, the smaller id keeps it and the other moves
on. Where there are more heads than parts they are spread over them, and each head that shares a
part reads it from an epoch of its own: in another order than the others. A head that was in no
record yet keeps no head that was in one from a part: keys that train nothing may say that they read
everything. How far a part was read know those alone that looked at it while the record of its last
head lived. Who takes it without that, in a run that has records, reads it from an epoch of its own,
too: from the beginning of the first one each would read what those before it have read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

from dilocox.dht.records import PartRecord, Record, part_key
from dilocox.peer.averaging.local_peer import LocalPeer

READ_AT_ONCE = 16  # parts that are looked at together
# Epochs at which heads begin that share a part, or do not know how far it was read: beyond what the
# first readers come to.
SHARED_EPOCHS = range(1 << 12, 1 << 20)
MOST_EPOCHS = 3 << 19  # that a head is believed; from there on a record has room for as many again
_ROW_BITS = 32  # the low bits of a position count rows, the others epochs


def position_of(epoch: int, rows: int = 0) -> int:
    """A place in a part as one integer, which a record in the DHT has room for up to epoch 2^21."""
    return epoch << _ROW_BITS | rows


def place_of(position: int) -> tuple[int, int]:
    """The epoch and the rows of it that were read."""
    return position >> _ROW_BITS, position & ((1 << _ROW_BITS) - 1)


class PartLease:
    """The part of the data that this head reads.

    position: where to begin in it, once `settle` has taken it.
    """

    def __init__(self, local: LocalPeer, first: int | None = None):
        """`first`: the part to try first, that of the snapshot."""
        self._local = local
        parts = range(local.manifest.data.parts)
        self._order = sorted(parts, key=lambda part: _rank(local.me, part))
        # those behind it are next: with a restart a day the ones before would else come each day
        self._tried = 0 if first is None or first not in parts else self._order.index(first)
        self.part = self._order[self._tried]
        self.position = 0
        self._positions: dict[int, int] = {}  # how far the holders of other parts were seen
        self.held = False
        self._lifetime_s = local.manifest.deadlines.record_lifetime_s
        self._finished = False  # the part, by the training loop
        self._shared = False  # with a head that was there before
        self._credited: Collection[str] = ()
        self._announced = -1  # the part that was told last
        self._stored_at = -math.inf

    def settle(self, credited: Collection[str] = ()) -> bool:
        """Look who else has the part, and take another one if it is somebody else's; whether so.

        credited: heads whose values are in the chain. Where this one is, the others' leases are as
        if they were not; else they go before it.
        Then `announcement` is to be published, and `published` told how that went. (Three threads
        take turns with these: what one of them changes, the others see whole.)
        """
        self._credited = credited
        part, shared = self.part, self._shared
        if self._finished:
            self._tried += 1
            part, shared = self._order[self._tried % len(self._order)], False
            self._finished = self.held = False
        holders = self._holders([part])[part]
        # a lease that we hold yields only to a smaller id; a free one must have nobody on it
        own = self._turn(self._local.me)
        lost = any(self._turn(peer) < own for peer in holders) if self.held else bool(holders)
        if lost and not (shared and self.held):
            part, shared = self._free_part()
        elif not holders:
            shared = False  # it goes on where it is, and is the part's first reader now
        moved = part != self.part or not self.held
        if part != self.part:
            self._stored_at = -math.inf  # nothing of it is
        if part != self._announced or (shared and not self._shared):  # else it reads there already
            self.position = self._beginning(part, shared=shared)
        self.part, self._shared = part, shared
        return moved

    def announcement(self, part: int, position: int) -> dict[str, Record]:
        """What keeps the lease. part, position: what this head reads now, and where it is in it: of
        another part than that of the lease until it has opened that.
        """
        position = position if part == self.part else self.position
        record = PartRecord(part=self.part, position=position)
        self._announced = record.part
        return {part_key(self._local.run, record.part): record}

    def published(self, stored: bool) -> None:
        if self._announced != self.part:  # `settle` has taken another one meanwhile
            return
        now, lifetime_s = self._local.clock.monotonic(), self._lifetime_s
        if stored:
            self._stored_at = now
        # a write that fails leaves the one before, which lives on for a while
        self.held = stored or (self.held and now < self._stored_at + lifetime_s)

    def finish(self) -> None:
        """The part was read to its end: `settle` takes another one."""
        self._finished = True

    def _turn(self, peer: str) -> tuple[bool, str]:
        return peer not in self._credited, peer

    def _beginning(self, part: int, *, shared: bool) -> int:
        """Where its last holder was seen, or, where none was or others read it now, the start of an
        order of this head's own. Of a run without records nothing was read: its first heads begin
        at the first epoch.
        """
        seen = None if shared else self._positions.get(part)
        if seen is None and (shared or self._credited):
            own = int.from_bytes(_rank(self._local.me, part)[:8], "big")
            return position_of(SHARED_EPOCHS[own % len(SHARED_EPOCHS)])
        return seen or 0

    def _free_part(self) -> tuple[int, bool]:
        """The next part that nobody holds; if there is none, the next of those that the fewest
        hold, and that it is shared.
        """
        first = self._tried + 1
        ahead = [self._order[(first + n) % len(self._order)] for n in range(len(self._order))]
        holders: dict[int, int] = {}
        for start in range(0, len(ahead), READ_AT_ONCE):
            found = self._holders(ahead[start : start + READ_AT_ONCE])
            holders |= {part: len(peers) for part, peers in found.items()}
            if not all(found.values()):
                break
        part = min(holders, key=holders.__getitem__)  # the first where they tie
        self._tried = first + ahead.index(part)
        return part, bool(holders[part])

    def _holders(self, parts: Sequence[int]) -> dict[int, set[str]]:
        keys = {part_key(self._local.run, part): part for part in parts}
        found = self._local.swarm.read_many(dict.fromkeys(keys, PartRecord), thorough=False)
        holders: dict[int, set[str]] = {}
        credited, all_count = self._credited, self._local.me not in self._credited
        for key, part in keys.items():
            here = (found[key] or {}).items()
            others = {peer: each for peer, each in here if all_count or peer in credited}
            others.pop(self._local.me, None)
            believed = [peer for peer in others if peer in credited or not credited]
            stated = [others[peer].position for peer in believed]
            if credible := [each for each in stated if 0 <= each < position_of(MOST_EPOCHS)]:
                self._positions[part] = max(credible)
            holders[part] = set(others)
        return holders


def _rank(me: str, part: int) -> bytes:
    return hashlib.sha256(f"{me}/{part}".encode()).digest()
