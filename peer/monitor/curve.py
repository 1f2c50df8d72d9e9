"""The run's curve: losses, throughput and peers by round, of the whole run in at most 1,200 points.

It is made of what bootstraps keep of every round (chain/round_history.py), whenever this monitor
was started, and of what it sees itself, which is newer, and all there is where no bootstrap tells.
Beyond the limit neighbours become one point, evenly over all rounds but for the first and the
newest ones; the range of their validation losses stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dilocox.peer.chain.round_history import FIRST, HistoryRow

MAX_POINTS = 1200
WHOLE = 64  # of the first and of the newest rounds, each for itself


class Point(NamedTuple):
    """A round, or several: then what it says is of the last of them that says it. In this order
    the status page gets it.

    tokens: of the whole chain. at: run time in seconds. low, high: of the validation losses.
    """

    round: int
    tokens: int | None = None
    at: float | None = None
    train: float | None = None
    validation: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None
    peers: int | None = None

    @classmethod
    def of(cls, row: HistoryRow) -> Point:
        loss = row.validation
        known = (row.round, row.tokens, row.at, row.train, loss, loss, loss)
        return cls(*known, row.tokens_per_s, row.peers)

    def over(self, older: Point) -> Point:
        """This point, with what only the older one knows."""
        pairs = zip(self, older, strict=True)
        return Point._make(before if mine is None else mine for mine, before in pairs)

    def joined(self, later: Point) -> Point:
        """One point for two neighbours."""
        lows = [each.low for each in (self, later) if each.low is not None]
        highs = [each.high for each in (self, later) if each.high is not None]
        low, high = min(lows, default=None), max(highs, default=None)
        return later.over(self)._replace(low=low, high=high)


@dataclass(kw_only=True)
class Curve:
    """points: by round. told: the newest round that a bootstrap has told of."""

    points: dict[int, Point] = field(default_factory=dict[int, Point])
    told: int = FIRST

    def take(self, rows: Iterable[HistoryRow]) -> None:
        """What bootstraps say, which is more than this monitor can have seen."""
        for row in rows:
            self.points[row.round] = Point.of(row).over(self._at(row.round))
            self.told = max(self.told, row.round)
        self._thin()

    def see(self, seen: Point) -> None:
        """What this monitor saw of a round, or heard of its losses."""
        self.points[seen.round] = seen.over(self._at(seen.round))
        self._thin()

    def go_back(self, last: int) -> None:
        """Forget the rounds after this one."""
        self.points = {number: each for number, each in self.points.items() if number <= last}
        self.told = min(self.told, last)

    def newest(self, name: str) -> tuple[int, float] | None:
        """Round and value of the newest point that has this."""
        values = ((number, getattr(each, name)) for number, each in self.points.items())
        return max(((number, value) for number, value in values if value is not None), default=None)

    def _at(self, number: int) -> Point:
        return self.points.get(number) or Point(round=number)

    def _thin(self) -> None:
        if len(self.points) <= MAX_POINTS:
            return
        numbers = sorted(self.points)
        middle, stride = numbers[WHOLE:-WHOLE], 2
        while len({number // stride for number in middle}) > MAX_POINTS // 2:
            stride *= 2
        thinned: dict[int, Point] = {}
        for number in middle:
            point, before = self.points.pop(number), thinned.get(number // stride)
            thinned[number // stride] = point if before is None else before.joined(point)
        self.points |= {each.round: each for each in thinned.values()}
