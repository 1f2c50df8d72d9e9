"""The run's curve: losses, throughput and peers by round, of the whole run in at most 1,200 points.

It is made of what bootstraps keep of every round (chain/round_history.py), whenever this monitor
was started, and of what it sees itself, which is newer, and all there is where no bootstrap tells.
Beyond the limit neighbours become one point, evenly over all rounds but for the first and the
newest ones; the range of their validation losses stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dilocox.peer.chain.round_history import FIRST, HistoryRow

MAX_POINTS = 1200
WHOLE = 64  # of the first and of the newest rounds, each for itself


@dataclass(frozen=True, kw_only=True)
class Point:
    """A round, or several: then what it says is of the last of them that says it.

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
        return cls(
            round=row.round,
            tokens=row.tokens,
            at=row.at,
            train=row.train,
            validation=row.validation,
            low=row.validation,
            high=row.validation,
            tokens_per_s=row.tokens_per_s,
            peers=row.peers,
        )

    def over(self, older: Point) -> Point:
        """This point, with what only the older one knows."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return replace(older, **known)

    def joined(self, later: Point) -> Point:
        """One point for two neighbours."""
        lows = [each.low for each in (self, later) if each.low is not None]
        highs = [each.high for each in (self, later) if each.high is not None]
        return replace(later.over(self), low=min(lows, default=None), high=max(highs, default=None))

    def row(self) -> list[float | None]:
        """As the status page gets it."""
        return [
            self.round,
            self.tokens,
            _rounded(self.at, 1),
            _rounded(self.train, 5),
            _rounded(self.validation, 5),
            _rounded(self.low, 5),
            _rounded(self.high, 5),
            _rounded(self.tokens_per_s, 2),
            self.peers,
        ]


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

    def see(self, point: Point) -> None:
        """What was seen of a round itself, or heard of its losses."""
        if point.validation is not None:
            point = replace(point, low=point.validation, high=point.validation)
        self.points[point.round] = point.over(self._at(point.round))
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


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
