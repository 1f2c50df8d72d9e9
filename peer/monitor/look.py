"""One look of the monitor at the swarm: what the signed records in the DHT say right now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import NoAnswer
from dilocox.dht.records import (
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    claim_key,
    replica_key,
    stage_key,
)
from dilocox.dht.swarm_view import that_count
from dilocox.peer.chain.stated_facts import finite, leading

READ_LIMIT_S = 5.0
PING_LIMIT_S = 3.0
PING_PERIOD_S = 10.0


@dataclass(frozen=True, kw_only=True)
class SwarmLook:
    """Records by peer id, of every stage and of the run.

    at: run time, seconds since the epoch. manifest: the operator's newest. bootstraps: by peer id
    in the invite's order, whether they answer. answered: whether the DHT gave an answer at all.
    witness: the id of the operator's archive, whose claims count first.
    stages, claims: by stage. replicas: by head, only of those that host stage 0.
    """

    at: float
    manifest: Manifest
    bootstraps: Mapping[str, bool]
    answered: bool = False
    witness: str = ""
    stages: Mapping[int, Mapping[str, StageRecord]] = field(
        default_factory=dict[int, Mapping[str, StageRecord]]
    )
    claims: Mapping[int, Mapping[str, ClaimRecord]] = field(
        default_factory=dict[int, Mapping[str, ClaimRecord]]
    )
    replicas: Mapping[str, ReplicaRecord] = field(default_factory=dict[str, ReplicaRecord])

    @property
    def reachable(self) -> bool:
        """Whether anybody is to be seen; an empty answer and no swarm look alike in the DHT."""
        seen = any(self.stages.values()) or any(self.claims.values())
        return (self.answered and seen) or any(self.bootstraps.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas together, as they state it."""
        return sum(finite(each.tokens_per_s) for each in self.replicas.values())

    @property
    def waiting_share(self) -> float | None:
        """Of the replicas' last rounds, a mean as they state it; None without replicas."""
        told = [min(1.0, finite(each.waiting_share)) for each in self.replicas.values()]
        return sum(told) / len(told) if told else None

    def present(self, stage: int) -> dict[str, StageRecord]:
        """The peers of a stage that have not left."""
        records = self.stages.get(stage, {})
        return {peer: record for peer, record in records.items() if record.present}


class Looker:
    """Looks again and again; all in one thread."""

    def __init__(self, joined: Joined, bootstraps: Iterable[str], ping_s: float = PING_PERIOD_S):
        self._joined, self._ping_s = joined, ping_s
        self._pinged_at = float("-inf")
        self._last = SwarmLook(
            at=joined.clock.time(),
            manifest=joined.manifest,
            bootstraps=dict.fromkeys(bootstraps, True),
        )

    def look(self, manifest: Manifest) -> SwarmLook:
        """Read everything, by the newest manifest; what gives no answer stays as it was."""
        run, last, stages = self._joined.run, self._last, range(manifest.stages)
        asked: dict[str, type[Record]] = {stage_key(run, stage): StageRecord for stage in stages}
        asked |= {claim_key(run, stage): ClaimRecord for stage in stages}
        asked[replica_key(run)] = ReplicaRecord
        found = cast("Mapping[str, Any]", self._joined.swarm.read_many(asked, READ_LIMIT_S))

        def heard(key: str, before: Any) -> Any:
            return before if found[key] is None else found[key]

        hosts = {s: heard(stage_key(run, s), last.stages.get(s, {})) for s in stages}
        claims = {s: heard(claim_key(run, s), last.claims.get(s, {})) for s in stages}
        replicas = heard(replica_key(run), last.replicas)
        self._last = SwarmLook(
            at=self._joined.clock.time(),
            manifest=manifest,
            bootstraps=self._bootstraps(),
            answered=any(found[key] is not None for key in asked),
            witness=self._joined.witness,
            stages=hosts,
            claims={stage: that_count(told, manifest) for stage, told in claims.items()},
            replicas=leading(replicas, hosts[0]),
        )
        return self._last

    def _bootstraps(self) -> Mapping[str, bool]:
        now = time.monotonic()
        if now < self._pinged_at + self._ping_s:
            return self._last.bootstraps
        self._pinged_at = now
        try:
            answering = self._joined.dht.answering_bootstraps(PING_LIMIT_S)
        except NoAnswer:
            answering = frozenset[str]()
        return {peer: peer in answering for peer in self._last.bootstraps}
