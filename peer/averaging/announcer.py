"""Tells the swarm about this peer, and looks at what the others tell: records in and out of the
DHT. `look` and `bootstrap_answers` belong to one thread and `tell` to another; the rest makes
records and waits for nothing.

`Cadence` says how often a peer tells and hears, so that it costs no more than a budget of bytes.

Every announcement of a peer is carried to all who look where it was made. In a swarm of equals a
peer therefore pays, for each of its announcements, what it hears when all of them announce once;
and that grows with the swarm. So announcements are made in intervals that stretch with it, and
records live for three of them, whatever that is: nobody vanishes between two. What must be prompt,
a bell or the news of a record, is told at once and paid from what was saved for it.

A look costs little where nothing is new, so looks are made several times between two announcements
of the others. Other stages than one's own are looked at once in four intervals.

    budget   1.3 kB/s, and 2 B/s more for each peer above 200; more where the manifest's heartbeat
             is shorter than 10 s: who sets that wants answers sooner
    interval (bytes heard when all announce once) / (two thirds of the budget), no shorter than the
             manifest's heartbeat, no longer than a record may live

These are pure rules over numbers and the times that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dilocox import __version__
from dilocox.dht.clock import Clock
from dilocox.dht.records import (
    MAX_LIFETIME_S,
    MAX_TEXTS,
    BellRecord,
    ClaimRecord,
    Record,
    ReplicaRecord,
    StageRecord,
    bell_key,
    claim_key,
    replica_key,
    stage_key,
)
from dilocox.dht.swarm import Swarm
from dilocox.dht.swarm_view import SwarmView, that_count
from dilocox.dht.wire import Malformed
from dilocox.peer.averaging.connectivity import LocalPeer
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.rounds.round_clock import newest_credible

R = TypeVar("R", bound=Record)

BUDGET_BYTES_PER_S = 1300.0
BUDGET_OF_LARGE = 2.0  # bytes/s more for each peer above LARGE_SWARM
LARGE_SWARM = 200
USUAL_HEARTBEAT_S = 10.0
REGULAR_SHARE = 2 / 3  # of the budget is for regular announcements; the rest is saved
SAVED_ANNOUNCEMENTS = 4  # as many can be made at once after a while without any
LIFETIMES = 3  # intervals that a record lives
LONGEST_S = min(MAX_LIFETIME_S["stage"], MAX_LIFETIME_S["bell"]) / LIFETIMES
LOOKS = 4  # at one's own stage, between two announcements of the others
OTHERS_SHARE = 4  # intervals between two looks at other stages


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What stood in the last looks.

    peers: of all stages that are known. own_bytes: of the records that this peer looks at with
        every look, its own stage's and the replicas'. other_bytes: of those of other stages.
    """

    peers: int = 0
    own_bytes: int = 0
    other_bytes: int = 0


class Cadence:
    """The intervals of one peer. Times are seconds of any clock that does not step back."""

    def __init__(self, *, heartbeat_s: float, now_s: float):
        """heartbeat_s: of the manifest, the shortest interval."""
        self._heartbeat_s = heartbeat_s
        self._heard = Heard()
        self._saved = float(SAVED_ANNOUNCEMENTS)  # who comes has something to tell
        self._filled_at = now_s

    def hear(self, heard: Heard) -> None:
        """Take in what a look has shown; this alone may be called from another thread."""
        self._heard = heard

    @property
    def budget_bytes_per_s(self) -> float:
        """What looks and announcements of this peer may cost on average."""
        above = max(0, self._heard.peers - LARGE_SWARM)
        haste = max(1.0, USUAL_HEARTBEAT_S / self._heartbeat_s)
        return haste * (BUDGET_BYTES_PER_S + BUDGET_OF_LARGE * above)

    @property
    def announce_s(self) -> float:
        """Seconds between two regular announcements."""
        wanted = self._announcement_bytes / (REGULAR_SHARE * self.budget_bytes_per_s)
        return min(max(wanted, self._heartbeat_s), LONGEST_S)

    @property
    def lifetime_s(self) -> float:
        """Seconds that what is announced now lives."""
        return LIFETIMES * self.announce_s

    @property
    def look_s(self) -> float:
        """Seconds between two looks at one's own stage and the replicas."""
        return max(self._heartbeat_s, self.announce_s / LOOKS)

    @property
    def look_at_others_s(self) -> float:
        """Seconds between two looks at the other stages."""
        # a swarm that pays for little is seen whole with every look
        stretched = self.announce_s > self._heartbeat_s
        return OTHERS_SHARE * self.announce_s if stretched else self.look_s

    def may_hurry(self, now_s: float) -> bool:
        """Whether enough was saved for an announcement before its time."""
        self._fill(now_s)
        return self._saved >= 1.0

    def hurried(self, now_s: float, share: float = 1.0) -> None:
        """An announcement was made before its time, or a `share` of one, as a bell alone is.

        It is paid for also where nothing was saved: the next ones wait longer.
        """
        self._fill(now_s)
        self._saved -= share

    def _fill(self, now_s: float) -> None:
        """Announcements are what is saved: what one costs changes with the swarm."""
        one_in_s = self._announcement_bytes / ((1 - REGULAR_SHARE) * self.budget_bytes_per_s)
        since_s, self._filled_at = now_s - self._filled_at, now_s
        # a bell costs little where nobody is: a hundred announcements a second are enough
        self._saved = min(SAVED_ANNOUNCEMENTS, self._saved + since_s / max(one_in_s, 0.01))

    @property
    def _announcement_bytes(self) -> float:
        """What it costs a peer when all announce once."""
        return self._heard.own_bytes + self._heard.other_bytes / OTHERS_SHARE


# Of a record beside its fields: envelope, key, signature, and its place in an answer.
ENVELOPE_BYTES = 230
READ_LIMIT_S = 3.0  # of each look; a slow one must not keep an exchange from its time
STARTED_OVER = "its weights were not finite; it goes on from the anchor"
MAX_BLOCKED = 160  # characters: a run of many stages may lack peers for most of them


class Announcer:
    """Publishes records and looks at those of others, as often as `cadence` allows. `view` is what
    the last looks showed, and `revision` the newest of the manifest that somebody knows.
    """

    def __init__(self, local: LocalPeer, swarm: Swarm, clock: Clock):
        deadlines = local.manifest.deadlines
        self._local = local
        self._swarm = swarm
        self._clock = clock
        self.cadence = Cadence(heartbeat_s=deadlines.heartbeat_s, now_s=clock.monotonic())
        self._looked_at = self._looked_at_others_at = float("-inf")
        self._answered = False
        self.view = SwarmView(me=local.me)
        self.revision = 0

    def look(
        self,
        bell_rounds: Iterable[int],
        *,
        own_round: int,
        last_record: int,
        whole: bool = True,
        eager: bool = False,
    ) -> bool:
        """Read what the others say; what gives no answer stays as it was. Whether all answered.

        own_round, last_record: rounds of this peer and of its chain's newest record; replicas in
        rounds far from them are counted as refused, and not believed. whole: everything whose time
        has come; else only the bells, which must be heard at once. eager: the time of one's own
        stage has come, whatever the cadence says. Where nobody else of the stage is in view all
        nodes are asked that may know somebody, every time.
        """
        local, view = self._local, self.view
        run, stage = local.run, local.stage
        rings = {bell_key(run, number): number for number in bell_rounds}
        hosts = {stage_key(run, number): number for number in range(local.manifest.stages)}
        own_claims, run_claims = claim_key(run, stage), claim_key(run, 0)
        asked: dict[str, type[Record]] = dict.fromkeys(rings, BellRecord)
        now = self._clock.monotonic()
        slack_s = local.manifest.deadlines.heartbeat_s / 2  # looks come with heartbeats
        alone = not view.stage.keys() - {local.me}
        eager = eager or alone or now + slack_s >= self._looked_at + self.cadence.look_s
        if whole and eager:
            self._looked_at = now
            asked |= {stage_key(run, stage): StageRecord, own_claims: ClaimRecord}
            asked[replica_key(run)] = ReplicaRecord
        if whole and now + slack_s >= self._looked_at_others_at + self.cadence.look_at_others_s:
            self._looked_at_others_at = now
            asked |= dict.fromkeys(hosts, StageRecord) | {run_claims: ClaimRecord}
        found: dict[str, Any] = dict.fromkeys((*hosts, own_claims, run_claims, replica_key(run)))
        found |= self._swarm.read_many(asked, timeout_s=READ_LIMIT_S, thorough=whole and alone)
        stages = {
            number: view.stages.get(number, {}) if found[key] is None else found[key]
            for key, number in hosts.items()
            if found[key] is not None or number in view.stages
        }
        replicas = self._credible(found[replica_key(run)], own_round, last_record)
        claims, of_run = found[own_claims], found[run_claims]
        if claims is not None:  # of peers under any rules
            told: Iterable[ClaimRecord] = claims.values()
            self.revision = max((each.revision for each in told), default=0)
        claims = None if claims is None else that_count(claims, local.manifest)
        of_run = None if of_run is None else that_count(of_run, local.manifest)
        self.view = SwarmView(
            me=local.me,
            stage=stages.get(stage, {}),
            stages=stages,
            replicas=view.replicas if replicas is None else replicas,
            bells={
                number: view.bells.get(number, {}) if found[key] is None else found[key]
                for key, number in rings.items()
            },
            claims=view.claims if claims is None else claims,
            run_claims=view.run_claims if of_run is None else of_run,
        )
        self._reckon()
        if stage_key(run, stage) in asked:
            self._answered = found[stage_key(run, stage)] is not None and claims is not None
        return self._answered

    def of_stage(
        self,
        state: str,
        *,
        round_number: int,
        inner_steps: int,
        chain: ChainFollower,
        voids: int,
        own: LoopStatus,
        revision: int = 0,
    ) -> dict[str, Record]:
        """That this peer hosts its stage, and the last record it holds."""
        local, head, last = self._local, chain.head, chain.last_record
        if own.started_over and state != "left":
            state = "joining"  # nobody is to wait for it in this round
        hosting = _told(
            StageRecord,
            own,
            state=state,
            round=round_number,
            inner_steps=inner_steps,
            digest=head.digest,
            replica=own.head,
            tokens=0 if state == "left" else own.unsent_tokens,
            client_mode=local.client_mode,
            voids=voids,
            version=__version__,
            name=local.name,
            addresses=local.addresses,
            blocked=(STARTED_OVER if own.started_over else own.blocked)[:MAX_BLOCKED],
        )
        claim = ClaimRecord(
            round=head.round,
            digest=head.digest,
            tokens=0 if last is None else last.tokens,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
            rules=0 if last is None else last.rules,
            revision=revision,
        )
        return {
            stage_key(local.run, local.stage): hosting,
            claim_key(local.run, local.stage): claim,
        }

    def of_replica(self, record: ReplicaRecord | None) -> dict[str, Record]:
        """That this head leads a replica; None is nothing to tell."""
        return {} if record is None else {replica_key(self._local.run): record}

    def of_bells(self, bells: Iterable[BellRecord]) -> dict[str, Record]:
        """That this head finished these rounds."""
        return {bell_key(self._local.run, bell.round): bell for bell in bells}

    def tell(self, records: Mapping[str, Record]) -> bool:
        """Publish all of this at once; whether the DHT took it."""
        return self._swarm.publish_many(records, self.cadence.lifetime_s)

    def bootstrap_answers(self, timeout_s: float) -> bool:
        """Whether one of the bootstraps answers a ping."""
        return self._swarm.bootstrap_answers(timeout_s)

    def _reckon(self) -> None:
        """What it costs this peer when all that are in view announce once."""
        view, stage = self.view, self._local.stage
        hosts = dict(view.stages) | {stage: view.stage}
        sizes = {number: _bytes_of(records.values()) for number, records in hosts.items()}
        claims = _bytes_of(view.claims.values())
        self.cadence.hear(
            Heard(
                peers=sum(map(len, hosts.values())),
                own_bytes=sizes[stage] + claims + _bytes_of(view.replicas.values()),
                other_bytes=sum(sizes.values())
                - sizes[stage]
                + (_bytes_of(view.run_claims.values()) if stage else 0),
            )
        )

    def _credible(
        self, replicas: Mapping[str, ReplicaRecord] | None, own_round: int, last_record: int
    ) -> dict[str, ReplicaRecord] | None:
        if replicas is None:
            return None
        stated = [replica.round for replica in replicas.values()]
        newest = newest_credible(own_round, last_record, stated)
        credible = {peer: each for peer, each in replicas.items() if each.round <= newest}
        self._swarm.refused["round"] += len(replicas) - len(credible)
        return credible


def _bytes_of(records: Collection[Record]) -> int:
    """What these records are in the DHT, all taken to be as long as the first."""
    first = next(iter(records), None)
    if first is None:
        return 0
    try:
        size = len(first.encode())
    except Malformed:  # others may write numbers in fewer bytes than we do
        size = first.max_bytes
    return len(records) * (size + ENVELOPE_BYTES)


def replica_record(
    local: LocalPeer, round_number: int, own: LoopStatus, *, hear_s: float
) -> ReplicaRecord | None:
    """The record of the replica that this peer leads, None if it leads none."""
    if not own.members:
        return None
    return _told(
        ReplicaRecord,
        own,
        # a record has room for that many; of more stages the last ones are not told
        members=own.members[:MAX_TEXTS],
        round=round_number,
        # a record holds finite numbers only; `val_round` alone says that there was a loss
        val_loss=own.val_loss if math.isfinite(own.val_loss or 0.0) else None,
        waiting_share=own.round_waiting_share,
        hear_s=hear_s,
    )


def _told(kind: type[R], own: LoopStatus, **facts: Any) -> R:
    """A record of these facts and, for its other fields, the loop's figures of the same names."""
    names = {spec.name for spec in fields(kind)} - facts.keys()
    return kind(**facts, **{name: getattr(own, name) for name in names})
