"""A group's members in rows and columns: which ones average which values together.

Why: in a flat exchange of N members each sends to all others, and waits for all of them. Here a
member talks to its row and, if it averages, to its column, about 2 * row + rows others, and sends
about the same bytes.

How, in each phase: its vector is cut into one part for each column, and each part into one share
for each row. A member sends its parts to the reducers of its row; the reducer of a column averages
its part over its row. The reducers of a column, one in each row, then average over the rows, each
one share: the others send it their row's mean of it in 16 bits. A share's mean is encoded once,
with the run's codec, goes to the other reducers of the column, and each gives it to its row. So all
members end with the same bytes, and a record's parts are the shares. They are cut between groups of
the codec: what a member finds to be its own in a share is what it sent within a part.

With one row this is the flat exchange: a part is a share, and nothing travels between rows.

The order of members is that of a hash over the group's id, new in every attempt, so that nobody
chooses its row, and a slow member is in a row with other ones each time. Those that do not average
(they only dial out, or have no vote where others have) come last; every row needs some that do. And
every row needs voters (standing.py), which judge its other members: voters are dealt first among
those that can be reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dilocox.compression.layout import split
from dilocox.compression.stage_codec import Phase


@dataclass(frozen=True, kw_only=True)
class Share:
    """A slice [start, stop) of one phase's vector, and the member that encodes its mean."""

    phase: int
    reducer: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many values it has; where there are none, nothing is sent."""
        return self.stop - self.start


@dataclass(frozen=True)
class Grid:
    """Rows of nearly equal size, in each the reducers first.

    width: how many columns there are; the first so many members of each row are its reducers.
    """

    rows: tuple[tuple[str, ...], ...]
    width: int

    @classmethod
    def of(
        cls,
        group: bytes,
        peers: Collection[str],
        reducers: Collection[str],
        row_size: int,
        voters: Collection[str] = (),
    ) -> Grid:
        """Arrange the members of a group.

        Args:
            group: its id, which all members know.
            peers: all members.
            reducers: those of them that average, see `attempt_setup`; at least one.
            row_size: how many members a row has at most, if there are reducers and voters for so
                many rows.
            voters: members that judge the others; all, if none is named.
        """

        def dealt(peer: str) -> tuple[bool, bool, bytes]:
            place = hashlib.sha256(group + peer.encode()).digest()
            return peer not in reducers, peer not in voters, place

        order = sorted(peers, key=dealt)
        count = min(-(-len(order) // row_size), len(reducers), len(voters or peers))
        rows = tuple(tuple(order[row::count]) for row in range(count))
        return cls(rows, len(reducers) // count)

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        return {peer: number for number, row in enumerate(self.rows) for peer in row}

    def row(self, peer: str) -> tuple[str, ...]:
        """The members of its row, itself included."""
        return self.rows[self.row_of[peer]]

    def column(self, peer: str) -> tuple[str, ...]:
        """The reducers of its column, one a row, itself included; () if it is no reducer."""
        place = self.row(peer).index(peer)
        return tuple(row[place] for row in self.rows) if place < self.width else ()

    def opposite(self, peer: str) -> tuple[str, ...]:
        """Those of the other rows that hear from this member what its row voted.

        Each member of another row is opposite to exactly one of this member's row.
        """
        own = self.row(peer)
        place = own.index(peer)
        return tuple(
            other
            for row in self.rows
            if row is not own
            for at, other in enumerate(row)
            if at % len(own) == place
        )

    def shares(self, phases: Sequence[Phase]) -> tuple[Share, ...]:
        """All shares: by phase, then by column, then by the row of the one that encodes it."""
        found: list[Share] = []
        for number, phase in enumerate(phases):
            group_size = phase.codec.group_size
            for place, part in enumerate(split(phase.numel, self.width, group_size)):
                pieces = split(part.stop - part.start, len(self.rows), group_size)
                for row, piece in zip(self.rows, pieces, strict=True):
                    start, stop = part.start + piece.start, part.start + piece.stop
                    found.append(Share(phase=number, reducer=row[place], start=start, stop=stop))
        return tuple(found)
