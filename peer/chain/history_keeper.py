"""Writes the history of the run beside a bootstrap (round_history.py says what it is).

Rounds come from the archive of stage 0, which has checked their records; losses, peers and void
rounds from what peers state at that time. The newest rounds stay open: their validation losses, and
the records of other stages, come after them. `look` belongs to the bootstrap's thread, `take` to
the archive's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from dilocox.dht.manifest import Manifest
from dilocox.dht.records import (
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    replica_key,
    stage_key,
)
from dilocox.dht.swarm import Swarm
from dilocox.peer.chain.round_history import SHORT_DIGEST, HistoryRow, RoundHistory
from dilocox.peer.chain.stated import more_voids, stated_losses

READ_LIMIT_S = 3.0
OPEN_ROUNDS = 8
LIVE_ROUNDS = 3  # more at once were not followed as they came, and nobody knows when that was
BACKLOG = 4096  # records of which the headers are read
KNOWN_ROUNDS = 64
MAX_HEARD = 64  # rounds whose losses are remembered until they are committed

Since = Callable[[Collection[str], int], list[ClaimRecord]]
"""Records of a stage's chain from after those that are known, by the beginnings of their digests,
oldest first, at most so many.
"""


@dataclass
class Heard:
    """What was stated last. train, validation: by round. voids: that no row has yet."""

    train: dict[int, float] = field(default_factory=dict[int, float])
    validation: dict[int, float] = field(default_factory=dict[int, float])
    peers: int | None = None
    replicas: int | None = None
    voids: float = 0.0
    voids_of: dict[str, int] = field(default_factory=dict[str, int])


class HistoryKeeper:
    """Adds to a history; any fault of the disk is an EnvironmentFault."""

    def __init__(self, history: RoundHistory, run: str, stages: int, now: Callable[[], float]):
        """now: run time, in seconds."""
        self.history = history
        self._run = run
        self._stages = stages
        self._now = now
        self._lock = threading.Lock()
        self._heard = Heard()
        self._open = {row.round: row for row in history.newest(OPEN_ROUNDS)}
        self._written = dict(self._open)
        self._sizes: dict[int, dict[int, int]] = {}  # bytes of records by round and stage
        self._heads: dict[int, str] = {}  # newest record of each stage that was taken
        self._follows = False  # rounds of stage 0, as they come
        self._before: HistoryRow | None = None  # of the newest round, if that was seen to come

    def look(self, swarm: Swarm) -> None:
        """Hear what heads and peers state now."""
        asked: dict[str, type[Record]] = {
            stage_key(self._run, stage): StageRecord for stage in range(self._stages)
        }
        asked[replica_key(self._run)] = ReplicaRecord
        found = swarm.read_many(asked, READ_LIMIT_S, thorough=False)
        if all(each is not None for each in found.values()):
            told = cast("Mapping[str, Any]", found)
            hosts = [told[stage_key(self._run, stage)] for stage in range(self._stages)]
            self.hear(hosts, told[replica_key(self._run)])

    def hear(
        self,
        hosts: Sequence[Mapping[str, StageRecord]],
        replicas: Mapping[str, ReplicaRecord],
    ) -> None:
        """The same of what was read: peers by stage, replicas by head."""
        present = [
            {peer: each for peer, each in peers.items() if each.state != "left"} for peers in hosts
        ]
        leading = [
            each
            for head, each in replicas.items()
            if each.members[:1] == (head,) and head in hosts[0]
        ]
        stated = stated_losses(leading)
        with self._lock:
            heard = self._heard
            for table, told in (
                (heard.train, stated.train),
                (heard.validation, stated.validation),
            ):
                table.update(told)
                for number in sorted(table)[:-MAX_HEARD]:
                    del table[number]
            heard.peers, heard.replicas = sum(map(len, present)), len(leading)
            heard.voids += sum(more_voids(peers, heard.voids_of) for peers in present)
            heard.voids_of = {peer: each.voids for peers in present for peer, each in peers.items()}
            if -1 in heard.validation and -1 not in self._open and not self.history.newest(1):
                self._open[-1] = HistoryRow(-1, 0, "", None, 0)
            self._amend()

    def take(self, stage: int, since: Since, *, claimed: bool = True) -> None:
        """Take in what is new in the chain of a stage; not for one stage twice at a time.

        claimed: whether others were seen to claim rounds: until then the archive cannot know what
        it missed, and what comes first may be old.
        """
        with self._lock:
            rows = self.history.newest(KNOWN_ROUNDS) if stage == 0 else []
            known = {self._heads.get(stage, ""), *(row.digest for row in rows)}
        new = since(known, BACKLOG if stage == 0 else OPEN_ROUNDS)
        with self._lock:
            begins = all(row.round < 0 for row in rows) and bool(new) and new[0].round == 0
            live = (self._follows or begins) and len(new) <= LIVE_ROUNDS
            for each in new:
                self._sizes.setdefault(each.round, {})[stage] = each.record_bytes
                if stage == 0 and self.history.counts(each.round, each.rules):
                    self._commit(each, self._now() if live else None)
            for number in sorted(self._sizes)[:-MAX_HEARD]:
                del self._sizes[number]
            self._follows |= claimed and stage == 0
            if new:
                self._heads[stage] = new[-1].digest[:SHORT_DIGEST]
            self._amend()

    def revise(self, manifest: Manifest) -> None:
        """Go on under a newer revision, which may have set rounds aside."""
        with self._lock:
            self.history.revise(manifest)
            if all(self.history.counts(row.round, row.rules) for row in self._open.values()):
                return
            self._open = {row.round: row for row in self.history.newest(OPEN_ROUNDS)}
            self._written, self._before = dict(self._open), None
            self._heard.train.clear()  # heads tell of the rounds before until they go back
            self._heard.validation.clear()

    def close(self) -> None:
        """Write what is known of the open rounds."""
        with self._lock:
            for number in list(self._open):
                self._write(number)

    def _commit(self, claim: ClaimRecord, at: float | None) -> None:
        for number in [each for each in self._open if each > claim.round]:  # of another chain
            del self._open[number]
            self._written.pop(number, None)
        heard, before, speed = self._heard, self._before, None
        if at is not None and before is not None and before.at is not None and at > before.at:
            tokens = max(0, claim.chain_tokens - before.tokens)
            speed = round(tokens / (at - before.at), 2)
        row = HistoryRow(
            round=claim.round,
            rules=claim.rules,
            digest=claim.digest[:SHORT_DIGEST],
            at=None if at is None else round(at, 2),
            tokens=claim.chain_tokens,
            tokens_per_s=speed,
        )
        if at is not None:
            row = row._replace(peers=heard.peers, replicas=heard.replicas, voids=int(heard.voids))
            heard.voids -= int(heard.voids)
        self._before = self._open[row.round] = row

    def _amend(self) -> None:
        """Bring the open rows up to date; write those that are new, know more, or close."""
        for number, row in list(self._open.items()):
            sizes = sum(self._sizes.get(number, {}).values())
            loss, validation = self._heard.train.get(number), self._heard.validation.get(number)
            self._open[number] = new = row._replace(
                train=row.train if loss is None else round(loss, 5),
                validation=row.validation if validation is None else round(validation, 5),
                record_bytes=max(row.record_bytes or 0, sizes) or None,
            )
            written = self._written.get(number)
            if written is None or written.digest != new.digest or written.filled(new) != written:
                self._write(number)
        for number in sorted(self._open)[:-OPEN_ROUNDS]:
            self._write(number)
            del self._open[number]
            del self._written[number]

    def _write(self, number: int) -> None:
        if self._written.get(number) != self._open[number]:
            self.history.add(self._open[number])
            self._written[number] = self._open[number]
