"""What a monitor keeps of one stage's chain: sums for good, details of the newest rounds, and a
bounded curve. A record counts once, however often it is met; when the chain turns out to go on
elsewhere, what the abandoned records added is taken away again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from dilocox.peer.chain_list import ChainRound, LoggedRound, tokens_by_peer
from dilocox.peer.monitor_chain import DETAILED, Walk

MAX_POINTS = 1200
MAX_KNOWN = 20_000
MAX_GAPS = 8
LIVE_ROUNDS = 3  # a walk of more was not followed as it came, and nobody knows when that was
RATE_WINDOW_S = 3600.0
RATE_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class Point:
    """A round as the curves need it. at: when it was first seen, None if it was there before."""

    round: int
    at: float | None
    tokens: int
    members: int
    record_bytes: int
    ranks: tuple[int, int, int] | None
    inner_steps: int


class StageRounds:
    """One stage's chain.

    tokens: by peer id. gaps: digests of records that nobody gave, and how often they were asked
    for again. head: the newest round. rounds: of the chain; records_seen: the same for a counter,
    which never falls, not even when the chain goes on elsewhere.
    paced_from: rounds from before it say nothing of the pace, seconds since the epoch.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.points: list[Point] = []
        self.gaps: dict[str, int] = {}
        self.head: LoggedRound | None = None
        self.chain_tokens = 0
        self.rounds = self.records_seen = 0
        self.paced_from = 0.0
        self._recent: dict[int, ChainRound] = {}
        self._known: dict[str, int] = {}  # round by digest

    def known(self, digest: str) -> bool:
        """Whether this record is counted."""
        return digest in self._known

    def holds(self, number: int) -> bool:
        """Whether a round of this number is among the newest of the chain."""
        return number in self._recent

    @property
    def digests(self) -> Collection[str]:
        """Of the records that are counted."""
        return self._known.keys()

    @property
    def progress_at(self) -> float | None:
        """When the newest round was seen to come."""
        return next((each.at for each in reversed(self.points) if each.at is not None), None)

    def add(self, walk: Walk, now: float, root: str) -> None:
        """Take in a walk from the head or from a gap; root: what stands before the first record."""
        if not walk.rounds:
            if walk.start in self.gaps:
                self.gaps[walk.start] += 1
            return
        from_head = walk.start not in self.gaps
        live = from_head and self.records_seen > 0 and len(walk.rounds) <= LIVE_ROUNDS
        if walk.connected and from_head:
            if self.rounds and walk.end != root and not self.known(walk.end):
                return  # it began before the operator went back, and ends where nothing counts
            self._abandon(walk, root)
        for each in reversed(walk.rounds):
            if not self.known(each.listed.digest):
                self._count(each, now if live else None)
        self.tokens.update(walk.folded)
        self.gaps.pop(walk.start, None)
        if not walk.connected and len(self.gaps) < MAX_GAPS:
            self.gaps[walk.end] = 0
        if from_head:
            newest = walk.rounds[0]
            self.head, self.chain_tokens = newest.listed, newest.chain_tokens
        self._thin()

    def go_back(self, last: int, now: float) -> None:
        """Take away the rounds after this one, as the operator did; the pace begins anew."""
        self.paced_from = now
        self._take_away(last)
        older = [digest for digest, number in self._known.items() if number > last]
        for digest in older:  # of these nothing but their number is known
            del self._known[digest]
        self.rounds -= len(older)
        self.points = [point for point in self.points if point.round <= last]
        if (newest := max(self._recent, default=None)) is not None:
            base = self._recent[newest]
            self.head, self.chain_tokens = base.listed, base.chain_tokens
        elif last < 0:
            self.head, self.chain_tokens = None, 0

    def per_hour(self, now: float) -> float | None:
        """Rounds an hour, from those that were seen to come; None while there are too few."""
        begin = max(now - RATE_WINDOW_S, self.paced_from)
        times = [p.at for p in self.points[-RATE_POINTS:] if p.at and p.at >= begin]
        return (len(times) - 1) / (now - times[0]) * 3600 if len(times) > 1 else None

    @property
    def usual_s(self) -> float:
        """Median time between two of the last rounds that were seen to come, 0 while unknown."""
        times = [p.at for p in self.points[-9:] if p.at is not None and p.at >= self.paced_from]
        steps = [late - early for early, late in pairwise(times)]
        return median(steps) if steps else 0.0

    # ---- counting --------------------------------------------------------------------------------
    def _count(self, each: ChainRound, at: float | None) -> None:
        listed = each.listed
        self._known[listed.digest] = listed.round
        self._recent[listed.round] = each
        self.rounds += 1
        self.records_seen += 1
        self.tokens.update(tokens_by_peer([each]))
        self.points.append(
            Point(
                round=listed.round,
                at=at,
                tokens=listed.tokens,
                members=listed.members,
                record_bytes=listed.record_bytes,
                ranks=listed.ranks,
                inner_steps=listed.next_inner_steps,
            )
        )

    def _abandon(self, walk: Walk, root: str) -> None:
        """Take away the rounds that the chain has left."""
        last = -1 if walk.end == root else self._known.get(walk.end, -1)
        self._take_away(last, {each.listed.digest for each in walk.rounds})

    def _take_away(self, last: int, kept: Collection[str] = ()) -> None:
        for number, each in list(self._recent.items()):
            if number <= last or each.listed.digest in kept:
                continue
            del self._recent[number]
            self._known.pop(each.listed.digest, None)
            self.rounds -= 1
            self.tokens.subtract(tokens_by_peer([each]))
            self.points = [point for point in self.points if point.round != number]

    def _thin(self) -> None:
        self.points.sort(key=lambda each: each.round)
        if len(self.points) > MAX_POINTS:
            self.points = thinned(self.points)
        for number in sorted(self._recent)[:-DETAILED]:
            del self._recent[number]
        if len(self._known) > MAX_KNOWN:
            newest = sorted(self._known.items(), key=lambda item: -item[1])[:MAX_KNOWN]
            self._known = dict(newest)
        self.tokens = +self.tokens  # none below one

    # ---- on disk ---------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        return {
            "tokens": dict(self.tokens),
            "points": [asdict(each) for each in self.points],
            "gaps": self.gaps,
            "head": None if self.head is None else asdict(self.head),
            "chain_tokens": self.chain_tokens,
            "rounds": self.rounds,
            "records_seen": self.records_seen,
            "paced_from": self.paced_from,
            "known": self._known,
            "recent": [
                {"chain_tokens": each.chain_tokens, "members": each.members}
                | {"listed": asdict(each.listed)}
                for each in self._recent.values()
            ],
        }

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> StageRounds:
        """Read what `to_dict` wrote; raises KeyError, TypeError or ValueError."""
        made = cls()
        made.tokens = Counter({str(peer): int(count) for peer, count in kept["tokens"].items()})
        made.points = [
            replace(Point(**each), ranks=_ranks(each["ranks"])) for each in kept["points"]
        ]
        made.gaps = {str(digest): int(tries) for digest, tries in kept["gaps"].items()}
        made.head = None if kept["head"] is None else _listed(kept["head"])
        made.chain_tokens, made.rounds = int(kept["chain_tokens"]), int(kept["rounds"])
        made.records_seen = int(kept["records_seen"])
        made.paced_from = float(kept.get("paced_from", 0.0))  # not in what older ones wrote
        made._known = {str(digest): int(number) for digest, number in kept["known"].items()}
        for each in kept["recent"]:
            listed = _listed(each["listed"])
            members = tuple((str(peer), int(count)) for peer, count in each["members"])
            made._recent[listed.round] = ChainRound(
                listed=listed, chain_tokens=int(each["chain_tokens"]), members=members
            )
        return made


def thinned(points: list[Any]) -> list[Any]:
    """Without every second one of the older half."""
    half = len(points) // 2
    return points[:half:2] + points[half:]


def thin_keys(table: dict[int, Any], limit: int) -> None:
    """Keep a table by round number within its limit, the newest half of it whole."""
    if len(table) > limit:
        keep = set(thinned(sorted(table)))
        for number in [number for number in table if number not in keep]:
            del table[number]


def _listed(kept: dict[str, Any]) -> LoggedRound:
    return replace(LoggedRound(**kept), ranks=_ranks(kept["ranks"]))


def _ranks(kept: Any) -> tuple[int, int, int] | None:
    if kept is None:
        return None
    low, middle, high = (int(rank) for rank in kept)
    return low, middle, high
