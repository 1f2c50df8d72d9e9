"""The swarm's DHT as a table: what was stored, by whom, from when on and until when it is seen.

A search takes some round trips, a lost message a timeout on top. A partition cuts the swarm into
sides: a record that was stored on one side is not seen from another before the cut has healed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation.clock import ThreadClock, Timeline

SEARCH_TRIPS = (1.5, 3.0)  # round trips of a search, from and to
STORE_TRIPS = (2.0, 4.0)  # a search for the nearest nodes, then the store
LOST_S = 3.0  # until a question is asked again, or of another node


@dataclass(slots=True)
class _Stored:
    record: Any
    seen_from: float
    expires_at: float
    side: int
    before: _Stored | None = None  # what others see until this one is there


@dataclass(kw_only=True)
class Network:
    """Round trips and losses between all peers; `side` is where the partition puts a peer."""

    timeline: Timeline
    random: random.Random
    rtt_s: float
    loss: float = 0.0
    side: dict[str, int] = field(default_factory=dict[str, int])

    def takes(self, trips: tuple[float, float]) -> float:
        """Seconds that a search takes, those of lost messages included."""
        seconds = self.rtt_s * self.random.uniform(*trips)
        while self.loss and self.random.random() < self.loss:
            seconds += LOST_S
        return seconds

    def side_of(self, peer: str) -> int:
        """Peers of unequal sides do not hear each other; bootstraps are on side 0."""
        return self.side.get(peer, 0)

    def connected(self, one: str, other: str) -> bool:
        """Whether no partition is between two peers."""
        return self.side_of(one) == self.side_of(other)


class SimulatedDHT:
    """All records of the run."""

    def __init__(self, network: Network):
        self.network = network
        self._stored: dict[str, dict[str, _Stored]] = {}

    def store(
        self, owner: str, key: str, record: Any, seen_from: float, expires_at: float, side: int
    ) -> None:
        """Keep a record; an older one of its owner is seen until this one is."""
        here = self._stored.setdefault(key, {})
        before = here.get(owner)
        if before is not None:
            before.before = None
        here[owner] = _Stored(record, seen_from, expires_at, side, before)

    def found(self, key: str, now: float, side: int) -> dict[str, Any]:
        """The records under a key as they are seen from a side, by owner."""
        here = self._stored.get(key)
        if here is None:
            return {}
        cut = bool(self.network.side)
        seen: dict[str, Any] = {}
        gone: list[str] = []
        for owner, stored in here.items():
            current: _Stored | None = stored
            if stored.expires_at <= now:
                gone.append(owner)
                continue
            if stored.seen_from > now or (cut and stored.side != side):
                current = stored.before
                if current is None or current.expires_at <= now or (cut and current.side != side):
                    continue
            seen[owner] = current.record
        for owner in gone:
            del here[owner]
        if not here:
            del self._stored[key]
        return seen


class SimulatedSwarm:
    """One peer's face of the DHT: dilocox.dht.swarm.Swarm, whose calls spend simulated time."""

    admission = None

    def __init__(
        self,
        dht: SimulatedDHT,
        me: str,
        clock: Callable[[], ThreadClock],
        newest: Callable[[float], Any],
        says: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ):
        """clock: of the thread that calls. newest(time): the signed manifest that it finds then.
        says: what it stores of what it should.
        """
        self._dht = dht
        self._newest = newest
        self._says = says
        self._me = me
        self._clock = clock
        self.stores = self.searches = 0
        self.refused = Counter[str]()

    def publish(self, key: str, record: Any, lifetime_s: float, timeout_s: float = 10.0) -> bool:
        """Store one record."""
        return self.publish_many({key: record}, lifetime_s, timeout_s)

    def publish_many(
        self, records: Mapping[str, Any], lifetime_s: float, timeout_s: float = 10.0
    ) -> bool:
        """Store records at the cost of one."""
        clock, network = self._clock(), self._dht.network
        seconds = network.takes(STORE_TRIPS)
        self.stores += 1
        expires_at = clock.monotonic() + lifetime_s
        clock.spend(min(seconds, timeout_s))
        if seconds > timeout_s:
            return False
        side = network.side_of(self._me)
        for key, record in self._says(records).items():
            self._dht.store(self._me, key, record, clock.monotonic(), expires_at, side)
        return True

    def read(self, key: str, record_type: Any, timeout_s: float = 10.0) -> dict[str, Any] | None:
        """The records under one key."""
        return self.read_many({key: record_type}, timeout_s)[key]

    def read_many(
        self, keys: Mapping[str, Any], timeout_s: float = 10.0, *, thorough: bool = True
    ) -> dict[str, dict[str, Any] | None]:
        """The records under these keys, in one search; None for all where it took too long."""
        clock, network = self._clock(), self._dht.network
        seconds = network.takes(SEARCH_TRIPS)
        self.searches += 1
        asked_at = clock.monotonic()
        clock.spend(min(seconds, timeout_s))
        if seconds > timeout_s:
            return dict.fromkeys(keys)
        side = network.side_of(self._me)
        # what is stored while the search is under way may be missed
        return {key: self._dht.found(key, asked_at, side) for key in keys}

    def bootstrap_answers(self, timeout_s: float) -> bool:
        """Whether the bootstrap is on this peer's side."""
        if self._dht.network.side_of(self._me) != 0:
            self._clock().spend(timeout_s)
            return False
        self._clock().spend(self._dht.network.rtt_s)
        return True

    def newest_manifest(self, timeout_s: float) -> Any:
        """What the operator has signed by now."""
        clock = self._clock()
        asked_at = clock.monotonic()
        clock.spend(min(self._dht.network.takes(SEARCH_TRIPS), timeout_s))
        return self._newest(asked_at)
